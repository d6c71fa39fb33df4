"""Answers that let the code go on, and masks whose values are known."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import sample_nets.raising as raising
import torch
from running import Runs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fxmem
from fxmem.fakes.branches import find_passing_answer


class Unknown:
    """Its truth is what lets the code that asks for it go on; asked for elsewhere, an error."""

    def __bool__(self) -> bool:
        answer = find_passing_answer(sys._getframe(1))
        if answer is None:
            raise LookupError("both answers let the code go on")
        return answer

    def __lt__(self, other: object) -> Unknown:
        return self


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raising, "a", Unknown())
    monkeypatch.setattr(raising, "b", Unknown())


GO_ON = """
    assert_it assert_its_opposite assert_several assert_one_of_several assert_over_lines raise_if
    raise_if_any raise_if_not raise_if_not_all raise_if_any_listed raise_else raise_elif warn_if
    log_if
"""
STOP = """
    branch branch_both_raise loop convert_within set_if call_if call_print_if call_own_error_if
"""


@pytest.mark.parametrize("name", GO_ON.split())
def test_a_test_that_only_raises_or_warns_passes(name: str) -> None:
    getattr(raising, name)()


@pytest.mark.parametrize("name", STOP.split())
def test_any_other_truth_is_not_known(name: str) -> None:
    with pytest.raises(LookupError):
        getattr(raising, name)()


def test_operands_that_need_different_answers_are_told_apart_since_python_3_12() -> None:
    """Before, Python says of a jump where the whole statement is written."""
    is_told = sys.version_info >= (3, 12)
    with contextlib.nullcontext() if is_told else pytest.raises(LookupError):
        raising.mixed()


def is_fake_tensor(x: object) -> bool:
    return isinstance(x, FakeTensor)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """As ``transformers.utils.import_utils``, which asks before it looks into a mask."""
    module = types.ModuleType("transformers.utils.import_utils")
    module.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def apply_mask(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = model.linear(x)
    if not model.library.is_fake_tensor(mask) and (mask == 1).all():
        return y
    return torch.tanh(y) * mask


@pytest.mark.parametrize("mask, is_masked", [(torch.ones(3, 4), False), ("3x4:int64", True)])
def test_a_mask_that_is_given_is_looked_into(
    library: types.ModuleType, mask: Tensor | str, is_masked: bool
) -> None:
    mask = mask.long() if isinstance(mask, Tensor) else mask
    model = Runs(apply_mask, linear=nn.Linear(4, 4), library=library)
    analysis = fxmem.analyze(model, ("3x4", mask), device="cpu")
    assert any(node.target == "tanh" for node in analysis.nodes) is is_masked
    assert library.is_fake_tensor is is_fake_tensor


def test_a_mask_is_looked_into_where_a_script_imports_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "transformers" / "utils"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "import_utils.py").write_text(
        "from torch._subclasses import FakeTensor\n"
        "def is_fake_tensor(x):\n"
        "    return isinstance(x, FakeTensor)\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from transformers.utils.import_utils import is_fake_tensor\n"
        "mask = torch.arange(4, device='cuda').diff()\n"
        "assert not is_fake_tensor(mask)\n"
    )
    fxmem.run(str(tmp_path / "train.py"))
    for name in ("transformers", "transformers.utils", "transformers.utils.import_utils"):
        sys.modules.pop(name, None)
