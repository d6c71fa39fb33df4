"""Which lines are the user's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import fxmem
from fxmem.tracing.source import find_raising_source, find_source, is_user_file

HERE = __file__


def test_the_line_that_runs() -> None:
    source = find_source()
    assert source is not None
    assert (source.file, source.function) == (HERE, "test_the_line_that_runs")
    assert "find_source()" in Path(HERE).read_text().splitlines()[source.line - 1]


@pytest.mark.parametrize(
    "file",
    [
        torch.nn.functional.__file__,
        os.path.join(os.path.dirname(fxmem.__file__), "api.py"),
        threading.__file__,
        "<string>",
        "<eval_with_key>.3",
        "/lib/site-packages/transformers/utils/generic.py",
        "/lib/site-packages/einops/einops.py",
    ],
)
def test_files_that_are_not_the_user_s(file: str) -> None:
    assert not is_user_file(file)


@pytest.mark.parametrize(
    "file",
    [
        HERE,
        "/lib/site-packages/torchvision/models/resnet.py",
        "/lib/site-packages/transformers/models/gpt2/modeling_gpt2.py",
    ],
)
def test_files_of_models(file: str) -> None:
    assert is_user_file(file)


def fail() -> None:
    torch.zeros(2) @ torch.zeros(3)


def test_the_innermost_line_of_the_user_in_a_traceback() -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    source = find_raising_source(caught.value.__traceback__)
    assert source is not None
    assert (source.function, source.line) == ("fail", fail.__code__.co_firstlineno + 1)


def test_no_traceback_has_no_line() -> None:
    assert find_raising_source(None) is None
