"""The user's lines."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fxmem
from fxmem.source import find_raising_source, find_source, is_user_file

HERE = __file__


def test_the_line_that_runs() -> None:
    source = find_source()
    assert source is not None
    assert (source.file, source.function) == (HERE, "test_the_line_that_runs")
    assert "find_source()" in Path(HERE).read_text().splitlines()[source.line - 1]


@pytest.mark.parametrize(
    ("file", "is_user"),
    [
        (HERE, True),
        ("/lib/site-packages/torchvision/models/resnet.py", True),
        (torch.nn.functional.__file__, False),
        (os.path.join(os.path.dirname(fxmem.__file__), "analyzing.py"), False),
        (threading.__file__, False),
        ("<eval_with_key>.3", False),
        ("/lib/site-packages/transformers/utils/generic.py", False),
    ],
)
def test_files_of_models_are_the_user_s(file: str, is_user: bool) -> None:
    assert is_user_file(file) is is_user


def fail() -> None:
    torch.zeros(2) @ torch.zeros(3)


def test_the_innermost_line_of_the_user_in_a_traceback() -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    source = find_raising_source(caught.value)
    assert source is not None
    assert (source.function, source.line) == ("fail", fail.__code__.co_firstlineno + 1)


def test_an_installed_package_counts_only_where_no_line_is_the_user_s(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    installed = tmp_path / "site-packages" / "layer.py"
    exec(compile("def call(f): f()\ndef fail(): 1 / 0", installed, "exec"), names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["call"](names["fail"])
    own = find_raising_source(caught.value)
    assert own is not None
    assert own.file == HERE
    caught.value.__traceback__ = caught.tb.tb_next
    library = find_raising_source(caught.value)
    assert library is not None
    assert str(library) == "layer.py:2"


def test_the_line_of_a_syntax_error_is_its_own() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("\nx = (", "nets.py", "exec")
    assert str(find_raising_source(caught.value)) == "nets.py:2"
