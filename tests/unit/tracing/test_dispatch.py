"""Modes that see operators without torch.compile in between."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.tracing.fakes import LeanDispatchMode


def test_nothing_is_wrapped_around_a_lean_mode() -> None:
    def see(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    plain, lean = (
        type("Sees", (base,), {"__torch_dispatch__": see})
        for base in (TorchDispatchMode, LeanDispatchMode)
    )
    with lean():
        torch.zeros(2)
    assert seen == [torch.ops.aten.zeros.default]
    assert lean.__torch_dispatch__ is see is not plain.__torch_dispatch__
