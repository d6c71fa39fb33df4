"""Bounds of the elements of a result, from those of the elements of arguments.

``finished | is_last`` is True where ``is_last`` is, whatever ``finished`` may be: generated text
ends at its greatest length. So that code which waits for this ends, a small tensor of truth values
of which only some are known, and a count of such, carries the least and the most that each element
may be. An operator runs once for each combination of them. That finds the bounds of the result
where it rises or falls with each argument, and where there is nothing between least and most.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.fakes.values import (
    SELECTED,
    Memory,
    attach_value,
    find_most_elements,
    find_partly_known,
)

Bounds: TypeAlias = tuple[Tensor, Tensor]

_RISING = frozenset(
    f"aten::{name}"
    for name in (
        *("_to_copy", "all", "amax", "amin", "any", "cat", "cumsum", "max", "mean", "min", "stack"),
        *("sum", "sum.dim_IntList", "all.dim", "any.dim", "all.dims", "any.dims"),
    )
)
"""Operators that are not of one element each, and rise with every element; so do views."""
_SELECTING = frozenset(
    f"aten::{name}"
    for name in ("gather", "index.Tensor", "index_select", "masked_select", "sort", "sort.stable")
)
"""Operators whose results have elements of the first argument, whichever they are."""
_MONOTONE = frozenset(
    f"aten::{name}{overload}"
    for name in ("add", "ge", "gt", "le", "lt", "mul", "rsub", "sub")
    for overload in (".Scalar", ".Tensor")
) | {"aten::clone", "aten::maximum", "aten::minimum", "aten::where.self"}
"""Operators of one element each that rise or fall with each argument that is not negative."""


def find_bounds(tensor: Tensor) -> Bounds | None:
    """Finds the least and the most that each element may be; of a truth value False and True."""
    value = find_partly_known(tensor)
    if value is not None:
        return value.real, value.real if value.most is None else value.most
    if tensor.dtype != torch.bool or tensor.numel() > find_most_elements(tensor):
        return None
    with _disable_current_modes():
        least = torch.zeros(tuple(tensor.shape), dtype=torch.bool)
        return least, ~least


def bound_result(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
) -> None:
    """Attaches what is known of an operator's results, not all of whose arguments are known.

    The operator writes to none of the tensors among its arguments.
    """
    if func.name() in _SELECTING:
        bound_selection(args[0], results)
        return
    is_view, is_pointwise = _list_traits(func)
    if not (is_view or is_pointwise or func.name() in _RISING):
        return
    if not results or sum(result.numel() for result in results) > find_most_elements(*results):
        return
    values = [value for value in map(find_partly_known, tensors) if value is not None]
    if not values and (is_view or results[0].dtype == torch.bool):
        return
    bounds: dict[int, Bounds] = {}
    for tensor in tensors:
        found = find_bounds(tensor)
        if found is None:
            return
        bounds[id(tensor)] = found
    with _disable_current_modes():
        corners = _run_corners(func, args, kwargs, bounds, is_pointwise=is_pointwise)
        joined = [_join(parts) for parts in zip(*corners, strict=True)]
    memory = values[0].memory if is_view else Memory(copied=True)
    memory.held |= any(value.memory.held for value in values)
    assumed = max((value.assumed for value in values), default="")
    for result, (least, most, is_told) in zip(results, joined, strict=False):
        if is_told:
            attach_value(result, least, memory, assumed=assumed, most=most)


def bound_selection(source: Tensor, results: Sequence[Tensor]) -> None:
    """Attaches the bounds of all elements to a result that has some of them, or all in an order."""
    value = find_partly_known(source)
    if value is None or not source.numel() or results[0].numel() > find_most_elements(*results):
        return
    shape, most = tuple(results[0].shape), value.real if value.most is None else value.most
    with _disable_current_modes():
        bounds = value.real.min().expand(shape), most.max().expand(shape)
    memory = Memory(held=value.memory.held, copied=True)
    attach_value(results[0], bounds[0], memory, assumed=value.assumed or SELECTED, most=bounds[1])


def bound_whole(numbers: Tensor, least: Sequence[int], most: Sequence[int]) -> None:
    """Attaches the bounds of whole numbers that are drawn or found, of the last dimension each."""
    if not 0 < numbers.numel() <= find_most_elements(numbers):
        return
    shape, dtype = tuple(numbers.shape), numbers.dtype
    with _disable_current_modes():
        bounds = [torch.tensor(ends, dtype=dtype).expand(shape) for ends in (least, most)]
    if list(least) == list(most):
        attach_value(numbers, bounds[0], Memory(copied=True))
    else:
        attach_value(numbers, bounds[0], Memory(copied=True), assumed=SELECTED, most=bounds[1])


@functools.cache
def _list_traits(func: Any) -> tuple[bool, bool]:
    """Returns whether an operator makes views, and whether it is of one element each."""
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return is_view, torch.Tag.pointwise in func.tags


def _run_corners(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bounds: dict[int, Bounds],
    *,
    is_pointwise: bool,
) -> list[list[Tensor]]:
    """Runs an operator on the bounds of its arguments, and returns the results of each run."""
    if is_pointwise and func.name() not in _MONOTONE and not all(map(_is_narrow, bounds.values())):
        return []
    unknown = [index for index, (least, most) in bounds.items() if least is not most]
    choices: Any = [[0] * len(unknown), [1] * len(unknown)]
    if is_pointwise:
        choices = itertools.product((0, 1), repeat=len(unknown))

    def run(choice: Sequence[int]) -> list[Tensor]:
        ends = dict(zip(unknown, choice, strict=True))
        real_args, real_kwargs = tree_map_only(
            Tensor, lambda tensor: bounds[id(tensor)][ends.get(id(tensor), 0)], (args, kwargs)
        )
        result = func(*real_args, **real_kwargs)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    try:
        return [run(choice) for choice in choices]
    except (NotImplementedError, RuntimeError):
        return []


def _is_narrow(bounds: Bounds) -> bool:
    """Returns whether no element may be anything between the least and the most that it is."""
    least, most = bounds
    if least is most or least.dtype == torch.bool:
        return True
    return not least.is_floating_point() and bool(((most - least) <= 1).all())


def _join(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, bool]:
    """Joins the results of all runs to bounds, and tells whether these say anything.

    Those of numbers are kept as long as further operators cannot overflow with them.
    """
    if parts[0].is_complex():
        return parts[0], None, False
    least, most = functools.reduce(torch.minimum, parts), functools.reduce(torch.maximum, parts)
    if torch.equal(least, most):
        return least, None, True
    if least.dtype == torch.bool:
        return least, most, bool((least | ~most).any())
    limit = math.inf if least.is_floating_point() else math.isqrt(torch.iinfo(least.dtype).max)
    return least, most, bool(((least >= 0) & (most <= limit)).all())
