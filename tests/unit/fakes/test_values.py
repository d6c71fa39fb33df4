"""Masks whose values are known."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fxmem


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
