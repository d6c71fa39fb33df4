"""Operators that the installed release lacks are missing, not an error."""

from __future__ import annotations

import pytest
import torch

from fxmem.kernels.registry import Backend
from fxmem.versions.operators import MISSING, aten, find_operators


def test_what_is_there_is_torchs_own() -> None:
    assert aten.add.Tensor is torch.ops.aten.add.Tensor


def test_a_missing_operator_gets_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.versions.operators.MISSING", MISSING.copy())
    absent = aten.operator_of_tomorrow.default
    target = Backend("test")
    target.kernel(absent, "other_operator", "relu")(lambda x: x)
    assert [*target.kernels] == [torch.ops.aten.relu.default]
    assert find_operators(absent, "add.of_tomorrow") == []
    with pytest.raises(NotImplementedError, match=r"no operator aten\.operator_of_tomorrow"):
        absent(torch.ones(2))
