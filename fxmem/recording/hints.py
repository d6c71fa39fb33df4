"""What depends on data, answered without data.

A truth value that is asked for only to raise is what it is in a step that goes well
(:mod:`fxmem.tracing.checks`). ``nonzero`` and its kin return as many rows as the data say, which a
static analysis cannot know: with a size hint they return that many. Whatever is left the fake
mode refuses, and so does fxmem, naming the line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from fxmem.tracing.checks import find_passing_answer

_aten = torch.ops.aten


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
    is_truth = func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool
    if is_truth or func is _aten.equal.default:
        passing = find_passing_answer(sys._getframe(1))
        return None if passing is None else (passing,)
    if size_hint is None:
        return None
    answer = _HINTED.get(func)
    return None if answer is None else (answer(size_hint, *args, **kwargs),)


def takes_hint(func: Any) -> bool:
    """Whether a size hint answers an operator."""
    return func in _HINTED


def _hint_nonzero(hint: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((hint, tensor.dim()), dtype=torch.int64)


def _hint_masked_select(hint: int, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((hint,))


def _hint_unique(
    hint: int,
    tensor: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    return (
        tensor.new_empty((hint,)),
        tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=torch.int64),
        tensor.new_empty((hint if return_counts else 0,), dtype=torch.int64),
    )


def _hint_runs(
    hint: int,
    tensor: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten/src/ATen/native/Unique.cpp: runs and counts are cut from as many as there may be."""
    if dim is not None:
        return _hint_unique_rows(hint, tensor, dim)
    most = max(hint, tensor.numel())
    return (
        _cut(tensor.new_empty((most,)), hint),
        tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=torch.int64),
        _cut(tensor.new_empty((most * return_counts,), dtype=torch.int64), hint * return_counts),
    )


def _hint_unique_rows(
    hint: int, tensor: torch.Tensor, dim: int, *_flags: Any
) -> tuple[torch.Tensor, ...]:
    """Unique.cpp, ``_unique_dim_cpu_template``: likewise for the counts."""
    shape = list(tensor.shape)
    length, shape[dim] = shape[dim], hint
    inverse = tensor.new_empty((length,), dtype=torch.int64)
    counts = tensor.new_empty((max(hint, length),), dtype=torch.int64)
    return tensor.new_empty(shape), inverse, _cut(counts, hint)


def _cut(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first elements, as a tensor that a dispatched operator may return."""
    return tensor.as_strided((count,), (1,))


def _hint_bincount(
    hint: int, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """aten/src/ATen/native/SummaryOps.cpp, ``_bincount_cpu_template``."""
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    return tensor.new_empty((max(hint, minlength),), dtype=dtype)


def _hint_repeat(
    hint: int, repeats: torch.Tensor, *, output_size: int | None = None
) -> torch.Tensor:
    return repeats.new_empty((hint if output_size is None else output_size,))


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
    _aten.unique_consecutive.default: _hint_runs,
    _aten.unique_dim.default: _hint_unique_rows,
    _aten.unique_dim_consecutive.default: _hint_unique_rows,
    _aten.repeat_interleave.Tensor: _hint_repeat,
    _aten.bincount.default: _hint_bincount,
    _aten._local_scalar_dense.default: _hint_item,
    _aten.index.Tensor: _hint_index,
}
