"""Sizes that depend on data, taken from a hint instead.

``nonzero`` and its kin return as many rows as the data say, which a static analysis cannot know.
With a size hint they return that many. Without one the fake mode refuses, and so does fxmem,
naming the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


def _hint_nonzero(hint: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((hint, tensor.dim()), dtype=torch.int64)


def _hint_masked_select(hint: int, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((hint,))


def _hint_unique(hint: int, tensor: torch.Tensor, *flags: Any, **named: Any) -> Any:
    # _unique2(self, sorted, return_inverse, return_counts): inverse as the input, counts per value.
    inverse = tensor.new_empty(tensor.shape, dtype=torch.int64)
    return tensor.new_empty((hint,)), inverse, tensor.new_empty((hint,), dtype=torch.int64)


def _hint_item(hint: int, tensor: torch.Tensor) -> int:
    if tensor.dtype.is_floating_point or tensor.dtype in (torch.bool, *_COMPLEX):
        # Not a size: what the value is for nobody can guess.
        raise torch._subclasses.fake_tensor.DataDependentOutputException(
            _aten._local_scalar_dense.default
        )
    return hint


_COMPLEX = (torch.complex64, torch.complex128)

_HINTED: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _hint_nonzero,
    _aten.masked_select.default: _hint_masked_select,
    _aten._unique2.default: _hint_unique,
    _aten._local_scalar_dense.default: _hint_item,
}


class SizeHints(TorchDispatchMode):
    """Answers operators whose result's size depends on data, while active.

    Args:
        hint: How many elements such an operator finds.
    """

    def __init__(self, hint: int) -> None:
        super().__init__()
        self._hint = hint

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see fxmem.recording.recorder.Recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = _HINTED.get(func)
        if answer is not None:
            return answer(self._hint, *args, **(kwargs or {}))
        if func is _aten.index.Tensor:
            args = (args[0], self._count_masks(args[1]))
        return func(*args, **(kwargs or {}))

    def _count_masks(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Boolean masks as the integer indices that their nonzero gives."""
        counted: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found = index.new_empty((self._hint,), dtype=torch.int64)
                counted += [found] * index.dim()
            else:
                counted.append(index)
        return counted
