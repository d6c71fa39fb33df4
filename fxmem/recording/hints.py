"""What depends on data, answered without data.

``nonzero`` and its kin return as many rows as the data say, which a static analysis cannot know.
With a size hint they return that many. Without one the fake mode refuses, and so does fxmem,
naming the line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

_aten = torch.ops.aten
_FUNCTIONAL = os.path.join("torch", "nn", "functional.py")
_PASSING_CHECKS = {"gaussian_nll_loss": False}
"""Functions of torch.nn.functional that look at values only to raise, and what they find in a
step that does not."""


def answer_operator(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size_hint: int | None
) -> tuple[Any] | None:
    """The result of an operator that would have to look at data.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        size_hint: How many elements a search finds; None if nobody said.

    Returns:
        The result in a tuple, or None where the operator must be run.
    """
    if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
        return _answer_check(sys._getframe(2))
    if size_hint is None:
        return None
    answer = _HINTED.get(func)
    return None if answer is None else (answer(size_hint, *args, **kwargs),)


def _answer_check(frame: FrameType | None) -> tuple[bool] | None:
    while frame is not None:
        if frame.f_code.co_name in _PASSING_CHECKS:
            if frame.f_code.co_filename.endswith(_FUNCTIONAL):
                return (_PASSING_CHECKS[frame.f_code.co_name],)
            return None
        frame = frame.f_back
    return None


def _hint_nonzero(hint: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((hint, tensor.dim()), dtype=torch.int64)


def _hint_masked_select(hint: int, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((hint,))


def _hint_unique(hint: int, tensor: torch.Tensor, *_flags: Any, **_named: Any) -> Any:
    inverse = tensor.new_empty(tensor.shape, dtype=torch.int64)
    return tensor.new_empty((hint,)), inverse, tensor.new_empty((hint,), dtype=torch.int64)


def _hint_item(hint: int, tensor: torch.Tensor) -> int:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        # No size: what the value is nobody can guess.
        raise DataDependentOutputException(_aten._local_scalar_dense.default)
    return hint


def _hint_index(
    hint: int, tensor: torch.Tensor, indices: list[torch.Tensor | None]
) -> torch.Tensor:
    """Boolean masks become the integer indices that their ``nonzero`` gives."""
    counted: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            counted += [index.new_empty((hint,), dtype=torch.int64)] * index.dim()
        else:
            counted.append(index)
    result: torch.Tensor = _aten.index.Tensor(tensor, counted)
    return result


_HINTED: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _hint_nonzero,
    _aten.masked_select.default: _hint_masked_select,
    _aten._unique2.default: _hint_unique,
    _aten._local_scalar_dense.default: _hint_item,
    _aten.index.Tensor: _hint_index,
}
