"""Values that an analysis knows or assumes, and the operators that they answer.

Models look at values that are known before any input is: a mask of ones that they made
themselves, positions, a threshold, the draw that decides whether a layer is dropped. Fake tensors
have no values, so each small tensor made from constants alone carries the real one beside it,
computed by the same operators, and ``item`` and ``nonzero`` are answered from it.

Three assumptions hold in a healthy step: activations are finite, so ``isfinite(x).all()`` holds;
a truth value that is asked for only to raise is the one that passes (:mod:`fxmem.tracing.checks`);
and a single random number is 0.5, so a layer that is dropped with a probability below one half is
there, which takes most memory. The last one is a guess, and an analysis notes each line that it
decides. ``nonzero`` and its kin return as many rows as the user's size hint says. The fake mode
refuses what is left.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.kernels.registry import ANY
from fxmem.tracing.checks import find_passing_answer
from fxmem.tracing.known_values import (
    MAX_ELEMENTS,
    Memory,
    Value,
    attach_value,
    find_attached,
    find_known,
    find_value,
)

_aten = torch.ops.aten
_FACTORIES = frozenset(
    {
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.linspace.default,
        _aten.scalar_tensor.default,
        _aten.eye.default,
    }
)
_FILLS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    _aten.zeros_like.default: lambda args: 0,
    _aten.new_zeros.default: lambda args: 0,
    _aten.ones_like.default: lambda args: 1,
    _aten.new_ones.default: lambda args: 1,
    _aten.full_like.default: lambda args: args[1],
    _aten.new_full.default: lambda args: args[2],
}
"""Operators whose result depends on no value of their argument, and what they fill it with."""
_REDUCTIONS = frozenset({_aten.all.default, _aten.any.default})
_ALL = "_fxmem_all"  # an attribute of tensors too large for a value: that of each element
_DRAWS = frozenset({_aten.rand.default, _aten.uniform_.default})


def remember_inputs(fakes: Any, given: Any) -> None:
    """Keeps the values of small integer and boolean inputs that were given as real tensors.

    A mask or a length that the user passes decides sizes; the values of a floating input are
    data, and differ in any other batch. Both arguments have the same containers.
    """
    for fake, real in zip(tree_leaves(fakes), tree_leaves(given), strict=True):
        if type(real) is torch.Tensor and real.device.type == "cpu" and _is_index(real):
            with _disable_current_modes():
                attach_value(fake, real.detach().clone(), Memory(held=True))


def remember_constant(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Keeps the value of a small real tensor that the user's code holds."""
    if real.device.type == "cpu" and real.numel() <= MAX_ELEMENTS:
        with _disable_current_modes():
            attach_value(fake, real.detach().clone(), Memory(held=True))


def _mark_all(function: Callable[..., torch.Tensor], element: bool, x: torch.Tensor) -> Any:
    result = function(x)
    result.__dict__[_ALL] = element
    return result


for _name, _element in (("isfinite", True), ("isinf", False), ("isnan", False)):
    _function = getattr(torch, _name)
    _replacement = functools.partial(_mark_all, _function, _element)
    ANY.function(_function, getattr(torch.Tensor, _name))(_replacement)


def _is_index(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.numel() <= MAX_ELEMENTS


def comes_of_draw(arguments: Any) -> bool:
    """Whether the value of a tensor among some arguments was computed from a random number."""
    found = map(find_known, list_tensors((arguments,)))
    return any(value.drawn for value in found if value)


def answer_from_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes the result of an operator that looks at values, if these are known.

    Returns:
        The result in a tuple, or None where the operator must be run.
    """
    if func is _aten.index.Tensor:
        return _answer_index(args)
    if not _looks_at_values(func):
        return None
    if func is _aten.masked_select.default:  # the mask alone decides the size
        return _answer_index((args[0], [args[1]])) if args[0].shape == args[1].shape else None
    values = [find_known(tensor) for tensor in list_tensors((args, kwargs))]
    if not all(values):
        return None
    real = _run_real(func, args, kwargs)
    fake = tree_map_only(torch.Tensor, lambda tensor: _make_fake(tensor, args[0]), real)
    return (fake,)


def is_known_index(args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and find_attached(first) is not None and _is_index(first)


def see_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Attaches a value to an operator's result, if all its arguments have one."""
    if func in _REDUCTIONS and args[0].__dict__.get(_ALL) is not None:
        _fill(result, args[0].__dict__[_ALL], True)
        if (value := find_attached(result)) is not None:
            value.memory.held = True  # it need not be that of each step
        return
    if func in _DRAWS or func in _FILLS:
        drawn = func in _DRAWS
        _fill(result, 0.5 if drawn else _FILLS[func](args), drawn, drawn)
        return
    found: list[Value] = []
    for tensor in list_tensors((args, kwargs)):
        value = find_known(tensor)
        if value is None:
            if found and func._schema.is_mutable:  # known values are overwritten with others
                for argument, given in zip(func._schema.arguments, args, strict=False):
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        for old in filter(None, map(find_attached, list_tensors((given,)))):
                            old.memory.known = False
            return
        found.append(value)
    if not found and func not in _FACTORIES:
        return
    fakes = list_tensors((result,))
    if fakes and sum(fake.numel() for fake in fakes) <= MAX_ELEMENTS:
        real = _run_real(func, args, kwargs)
        for fake, computed in zip(fakes, list_tensors((real,)), strict=True):
            _attach(fake, computed, found)


def _answer_index(args: tuple[Any, ...]) -> Any:
    """Indexes with the integers that boolean masks of known values stand for."""
    counted: list[torch.Tensor | None] = []
    masks = 0
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            mask = find_value(index)
            if mask is None:
                return None
            masks += 1
            with _disable_current_modes():
                positions = mask.nonzero().unbind(1)
            counted += [_make_fake(position, index) for position in positions]
        else:
            counted.append(index)
    return (_aten.index.Tensor(args[0], counted),) if masks else None


@functools.cache
def _looks_at_values(func: Any) -> bool:
    return (
        torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    )


def _attach(fake: torch.Tensor, real: torch.Tensor, sources: list[Value]) -> None:
    address = real.untyped_storage()._cdata
    memory = next((s.memory for s in sources if s.real.untyped_storage()._cdata == address), None)
    memory = memory or Memory()
    memory.held |= any(source.memory.held for source in sources)
    attach_value(fake, real, memory, drawn=any(source.drawn for source in sources))


def _run_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = tree_map_only(torch.Tensor, find_value, (args, kwargs))
    with _disable_current_modes():
        return func(*real_args, **real_kwargs)


def _make_fake(real: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    fake = like.new_empty(real.shape, dtype=real.dtype)
    attach_value(fake, real)
    return fake


def _fill(result: torch.Tensor, number: Any, single: bool, drawn: bool = False) -> None:
    if result.numel() <= (1 if single else MAX_ELEMENTS):
        with _disable_current_modes():
            real = torch.full(tuple(result.shape), number, dtype=result.dtype)
        attach_value(result, real, drawn=drawn)


def list_tensors(arguments: Iterable[Any], found: list[torch.Tensor] | None = None) -> Any:
    """Lists the tensors in an operator's arguments or results, which nest in lists and dicts.

    >>> len(list_tensors((torch.ones(1), [torch.ones(2), None], 3, {"alpha": 1})))
    2
    """
    found = [] if found is None else found
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            list_tensors(argument, found)
        elif isinstance(argument, dict):
            list_tensors(argument.values(), found)
    return found


# -- size hints and checks -------------------------------------------------------------------------


def answer_operator(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size_hint: int | None
) -> tuple[Any] | None:
    """Assumes the result of an operator that would have to look at data.

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
    """Tells whether a size hint answers an operator."""
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
        raise DataDependentOutputException(_aten.unique_consecutive.default)
    most = max(hint, tensor.numel())
    return (
        _cut(tensor.new_empty((most,)), hint),
        tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=torch.int64),
        _cut(tensor.new_empty((most * return_counts,), dtype=torch.int64), hint * return_counts),
    )


def _cut(tensor: torch.Tensor, count: int) -> torch.Tensor:
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
        raise DataDependentOutputException(_aten._local_scalar_dense.default)
    return hint


def _hint_index(
    hint: int, tensor: torch.Tensor, indices: list[torch.Tensor | None]
) -> torch.Tensor:
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
    _aten.repeat_interleave.Tensor: _hint_repeat,
    _aten.bincount.default: _hint_bincount,
    _aten._local_scalar_dense.default: _hint_item,
    _aten.index.Tensor: _hint_index,
}
