"""The values of small tensors that do not depend on the inputs.

Models look at values that are known before any input is: a mask of ones that they made
themselves, positions, a threshold, the draw that decides whether a layer is dropped. Fake tensors
have no values, so each small tensor made from constants alone carries the real one beside it,
computed by the same operators, and ``item`` and ``nonzero`` are answered from it.

Two things are assumed, each what a healthy step does: activations are finite, so
``isfinite(x).all()`` holds; and a single random number is 0.5, so a layer that is dropped with a
probability below one half is there, which is what takes most memory. Who looks at a value that
came of such a number is told to the user: it is the one guess of an analysis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.kernels.target import ANY
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
_ALL = "_fxmem_all"  # on a tensor too large for a value: what each of its elements is
_DRAWS = frozenset({_aten.rand.default, _aten.uniform_.default})


def remember_inputs(fakes: Any, given: Any) -> None:
    """Keeps the values of small integer and boolean inputs that were given as real tensors.

    A mask or a length that the user passes decides sizes; the values of a floating input are
    data, of which any other batch has others.

    Args:
        fakes: The fake inputs.
        given: What the user gave, in the same containers.
    """
    for fake, real in zip(tree_leaves(fakes), tree_leaves(given), strict=True):
        if type(real) is torch.Tensor and real.device.type == "cpu" and _is_index(real):
            with _disable_current_modes():
                attach_value(fake, real.detach().clone(), Memory(held=True))


def remember_constant(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Keeps the value of a small real tensor that the user's code brought with it.

    Args:
        fake: What stands for it.
        real: The tensor, which is left alone.
    """
    if real.device.type == "cpu" and real.numel() <= MAX_ELEMENTS:
        with _disable_current_modes():
            attach_value(fake, real.detach().clone(), Memory(held=True))


@ANY.function(torch.isfinite, torch.Tensor.isfinite)
def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    return _mark_all(torch.isfinite(tensor), True)


@ANY.function(torch.isinf, torch.Tensor.isinf)
def _isinf(tensor: torch.Tensor) -> torch.Tensor:
    return _mark_all(torch.isinf(tensor), False)


@ANY.function(torch.isnan, torch.Tensor.isnan)
def _isnan(tensor: torch.Tensor) -> torch.Tensor:
    return _mark_all(torch.isnan(tensor), False)


def _mark_all(tensor: torch.Tensor, element: bool) -> torch.Tensor:
    tensor.__dict__[_ALL] = element
    return tensor


def _is_index(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.numel() <= MAX_ELEMENTS


def comes_of_draw(arguments: Any) -> bool:
    """Whether the value of a tensor among an operator's arguments came of a random number."""
    found = map(find_known, _iterate_tensors(arguments))
    return any(value.drawn for value in found if value)


def answer_from_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that has to look at values, if they are known.

    Returns:
        The result in a tuple, or None where the operator must be run.
    """
    if func is _aten.index.Tensor:
        return _answer_index(args)
    if not _looks_at_values(func):
        return None
    if func is _aten.masked_select.default:  # the mask alone decides the size
        return _answer_index((args[0], [args[1]])) if args[0].shape == args[1].shape else None
    values = [find_known(tensor) for tensor in _iterate_tensors((args, kwargs))]
    if not all(values):
        return None
    real = _run_real(func, args, kwargs)
    fake = tree_map_only(torch.Tensor, lambda tensor: _make_fake(tensor, args[0]), real)
    return (fake,)


def is_known_index(args: tuple[Any, ...]) -> bool:
    """Whether an operator's first argument is integers whose values are known."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and find_attached(first) is not None and _is_index(first)


def see_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Gives a result its value, if all that it was computed from has one."""
    if func in _REDUCTIONS and args[0].__dict__.get(_ALL) is not None:
        _fill(result, args[0].__dict__[_ALL], True)
        _hold(result)
        return
    if func in _DRAWS or func in _FILLS:
        drawn = func in _DRAWS
        _fill(result, 0.5 if drawn else _FILLS[func](args), drawn, drawn)
        return
    found: list[Value] = []
    for tensor in _iterate_tensors((args, kwargs)):
        value = find_known(tensor)
        if value is None:
            if found and func._schema.is_mutable:
                _forget_overwritten(func, args)
            return
        found.append(value)
    if not found and func not in _FACTORIES:
        return
    fakes = tuple(_iterate_tensors(result))
    if fakes and sum(fake.numel() for fake in fakes) <= MAX_ELEMENTS:
        real = _run_real(func, args, kwargs)
        for fake, computed in zip(fakes, _iterate_tensors(real), strict=True):
            _attach(fake, computed, found)


def _answer_index(args: tuple[Any, ...]) -> Any:
    """Boolean masks whose values are known become the integer indices that they stand for."""
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


def _hold(result: torch.Tensor) -> None:
    """Notes that an assumed value need not be that of each step."""
    value = find_attached(result)
    if value is not None:
        value.memory.held = True


def _forget_overwritten(func: Any, args: tuple[Any, ...]) -> None:
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in _iterate_tensors(given):
                value = find_attached(tensor)
                if value is not None:
                    value.memory.known = False


def _iterate_tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments, which nest no deeper than lists."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for argument in arguments:
            yield from _iterate_tensors(argument)
    elif isinstance(arguments, dict):
        yield from _iterate_tensors(list(arguments.values()))
