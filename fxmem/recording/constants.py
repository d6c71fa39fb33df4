"""Values that an analysis knows or assumes, and the operators that they answer.

Models look at values that are known before any input is: a mask of ones that they made
themselves, positions, a threshold, the draw that decides whether a layer is dropped. Fake tensors
have no values, so each small tensor made from constants alone carries the real one beside it,
computed by the same operators, and ``item`` and ``nonzero`` are answered from it.

Four assumptions hold in a healthy step: activations are finite, so ``isfinite(x).all()`` holds;
a truth value that is asked for only to raise is the one that passes (:mod:`fxmem.fakes.values`);
a single random number is 0.5, so a layer that is dropped with a probability below one half is
there, which takes most memory; and a router sends tokens to its experts in turn, which balanced
training aims at. The last two are guesses, and an analysis notes each line that they decide.
``nonzero`` and its kin return as many rows as the user's size hint says. The fake mode refuses what
is left.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.fakes.branches import find_passing_answer
from fxmem.fakes.containers import PLAIN
from fxmem.fakes.values import (
    DRAW,
    ROUTING,
    Memory,
    Value,
    attach_value,
    find_attached,
    find_count,
    find_known,
    find_most_elements,
    find_value,
    is_whole,
    remember_constant,
    remember_count,
)
from fxmem.kernels.registry import ANY
from fxmem.recording.bounds import bound_result, bound_selection, bound_whole
from fxmem.recording.routing import choose_experts
from fxmem.recording.size_hints import SizeHints
from fxmem.versions.operators import aten

_FACTORIES = frozenset(
    {
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.linspace.default,
        aten.scalar_tensor.default,
        aten.eye.default,
    }
)
_FILLS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros_like.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
}
"""Operators whose result depends on no value of their argument, and what they fill it with."""
_REDUCTIONS = frozenset({aten.all.default, aten.any.default})
_ALL = "_fxmem_all"  # an attribute of tensors too large for a value: that of each element
_DRAWS = frozenset({aten.rand.default, aten.uniform_.default})
_RANGES = {aten.randint.default: 0, aten.randint.low: 1}
"""Operators that draw whole numbers, and the position of the least in ``(0, *args)``."""
_ROUTERS = {aten.topk.default: 2, aten.max.dim: 1, aten.argmax.default: 1}
"""Operators that choose experts, and the position of their dimension; indices come last."""
_MOST_EXPERTS, _MOST_CHOICES = 1 << 10, 1 << 17
"""More classes than a router has, and more indices than are worth computing with."""


def remember_inputs(fakes: Any, given: Any) -> None:
    """Keeps the values of small integer and boolean inputs that were given as real tensors.

    A mask or a length that the user passes decides sizes; the values of a floating input are
    data, and differ in any other batch. Both arguments have the same containers.
    """
    for fake, real in zip(tree_leaves(fakes), tree_leaves(given), strict=True):
        if type(real) is Tensor and is_index(real):
            remember_constant(fake, real)


def _replace_test(function: Callable[..., Tensor], element: bool) -> None:
    def run(x: Tensor) -> Tensor:
        result = function(x)
        result.__dict__[_ALL] = element
        return result

    ANY.function(function, getattr(Tensor, function.__name__))(run)


_replace_test(torch.isfinite, True)
_replace_test(torch.isinf, False)
_replace_test(torch.isnan, False)


def is_index(tensor: Tensor) -> bool:
    """Returns whether a tensor is small, and of integers or truth values."""
    return is_whole(tensor) and tensor.numel() <= find_most_elements(tensor)


def is_known_index(args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    if isinstance(first, list):  # of torch.cat
        first = first[0] if first else None
    return isinstance(first, Tensor) and find_attached(first) is not None and is_index(first)


def answer_operator(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hints: SizeHints
) -> tuple[Any] | None:
    """Answers an operator that looks at values: from those that are known, else as assumed.

    Returns:
        The result in a tuple, or None where the operator must be run.
    """
    if func is aten.index.Tensor:
        return _answer_index(args[0], args[1], hints)
    if not looks_at_values(func):
        return None
    if func is aten.masked_select.default and args[0].shape == args[1].shape:
        return _answer_index(args[0], [args[1]], hints)  # the mask alone decides the size
    is_number = func is aten._local_scalar_dense.default
    own_hint = _find_own_hint(args[0], hints) if func in HINTED and not is_number else None
    if own_hint is None and all(map(find_known, list_tensors((args, kwargs)))):
        real = _run_real(func, args, kwargs)
        return (tree_map_only(Tensor, lambda tensor: _make_fake(tensor, args[0]), real),)
    if (is_number and args[0].dtype == torch.bool) or func is aten.equal.default:
        passing = find_passing_answer(sys._getframe(1))
        return None if passing is None else (passing,)
    own_hint = hints.find_own() if is_number else own_hint
    size_hint = hints.default if own_hint is None else own_hint
    if size_hint is None or func not in HINTED:
        return None
    return (HINTED[func](size_hint, *args, **kwargs),)


def see_result(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    hints: SizeHints,
    *,
    is_routed: bool = True,
) -> None:
    """Attaches a value to an operator's result, or its bounds, if its arguments have such."""
    if func in _ROUTERS and is_routed:
        default = -1 if func is aten.topk.default else None
        dim = next(iter(args[_ROUTERS[func] :]), default)
        _route(args[0], result if isinstance(result, Tensor) else result[-1], dim, hints)
    if func in _REDUCTIONS and args[0].__dict__.get(_ALL) is not None:
        fill_value(result, args[0].__dict__[_ALL], 1)
        if (value := find_attached(result)) is not None:
            value.memory.held = True  # it need not be that of each step
        return
    if func in _DRAWS:
        fill_value(result, 0.5, 1, assumed=DRAW)
        return
    if func in _RANGES:
        low, high = (0, *args)[_RANGES[func] :][:2]
        bound_whole(result, [low], [high - 1])
        return
    if func in _FILLS:
        fill_value(result, _FILLS[func](args), find_most_elements(result))
        return
    tensors, fakes = list_tensors((args, kwargs)), list_tensors((result,))
    found: list[Value] = []
    for tensor in tensors:
        value = find_known(tensor)
        if value is None or (value.memory.copied and func._schema.is_mutable):
            if func._schema.is_mutable:  # values are overwritten with others
                for old in filter(None, map(find_attached, find_written(func, args, kwargs))):
                    old.memory.known = False
                if func is aten.scatter_.src and args[2].numel() == args[0].numel():
                    bound_selection(args[3], fakes)  # in an order: the graphs of pooled nodes
            else:
                bound_result(func, args, kwargs, tensors, fakes)
            return
        found.append(value)
    if (not found and func not in _FACTORIES) or not fakes:
        return
    if sum(fake.numel() for fake in fakes) > find_most_elements(*fakes, values=found):
        return
    try:
        reals = list_tensors((_run_real(func, args, kwargs),))
    except (NotImplementedError, RuntimeError):  # such as a histogram of integers, for GPUs alone
        return
    for fake, real in zip(fakes, reals, strict=True):
        # Views share their memory with the value that they are a view of.
        address = real.untyped_storage()._cdata
        same = (v.memory for v in found if v.real.untyped_storage()._cdata == address)
        memory = next(same, None) or Memory()
        memory.held |= any(value.memory.held for value in found)
        assumed = max((value.assumed for value in found), default="")
        attach_value(fake, real, memory, assumed=assumed)


def _find_own_hint(tensor: Tensor, hints: SizeHints) -> int | None:
    """Finds the size hint of the running line; in backward, of the line that used the mask."""
    hint = hints.find_own()
    if hint is None:
        return find_count(tensor)
    remember_count(tensor, hint)
    return hint


def _answer_index(
    tensor: Tensor, indices: Sequence[Tensor | None], hints: SizeHints
) -> tuple[Tensor] | None:
    """Indexes with the integers that boolean masks stand for."""
    counted: list[Tensor | None] = []
    masks = 0
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            counted.append(index)
            continue
        masks += 1
        own_hint = _find_own_hint(index, hints)
        size_hint = hints.default if own_hint is None else own_hint
        mask = find_value(index)
        if mask is not None and own_hint is None:
            with _disable_current_modes():
                positions = mask.nonzero().unbind(1)
            counted += [_make_fake(position, index) for position in positions]
        elif size_hint is not None:
            counted += [index.new_empty((size_hint,), dtype=torch.int64)] * index.dim()
        else:
            return None
    return (aten.index.Tensor(tensor, counted),) if masks else None


@functools.cache
def looks_at_values(func: Any) -> bool:
    """Returns whether an operator's result depends on values of its arguments, by its tags."""
    return (
        torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    )


def _run_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = tree_map_only(Tensor, find_value, (args, kwargs))
    with _disable_current_modes():
        return func(*real_args, **real_kwargs)


def _make_fake(real: Tensor, like: Tensor) -> Tensor:
    fake = like.new_empty(real.shape, dtype=real.dtype)
    attach_value(fake, real)
    return fake


def fill_value(result: Tensor, number: Any, most: int, *, assumed: str = "") -> None:
    """Attaches a number as the value of all elements of a result that has no more than ``most``."""
    if result.numel() <= most:
        with _disable_current_modes():
            real = torch.full(tuple(result.shape), number, dtype=result.dtype)
        attach_value(result, real, assumed=assumed)


def _route(scores: Tensor, chosen: Tensor, dim: int | None, hints: SizeHints) -> None:
    """Assumes which experts the scores of tokens choose."""
    experts = scores.shape[-1] if scores.dim() > 1 else 0
    is_last = dim in (-1, scores.dim() - 1)
    if not (is_last and scores.is_floating_point() and 0 < experts <= _MOST_EXPERTS):
        return
    if chosen.numel() > _MOST_CHOICES:
        return
    with _disable_current_modes():
        width = chosen.shape[-1] if chosen.dim() == scores.dim() else 1
        real = choose_experts(chosen.numel(), width, experts, hints.routing)
        attach_value(chosen, real.view(chosen.shape), Memory(held=True), assumed=ROUTING)


def list_tensors(arguments: Iterable[Any], found: list[Tensor] | None = None) -> Any:
    """Lists the tensors in an operator's arguments or results, which nest in lists and dicts."""
    found = [] if found is None else found
    for argument in arguments:
        kind = type(argument)
        if kind is FakeTensor:
            found.append(argument)
        elif kind in PLAIN or (kind is dict and not argument):
            continue
        elif isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            list_tensors(argument, found)
        elif isinstance(argument, dict):
            list_tensors(argument.values(), found)
    return found


def find_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Finds the tensors among an operator's arguments that it changes, by its schema."""
    written: list[Tensor] = []
    for position, name in _list_written(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        written += [tensor for tensor in values if isinstance(tensor, Tensor)]
    return written


@functools.lru_cache(maxsize=4096)
def _list_written(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


# -- results of the size that the user's hint says ------------------------------------------------


def _hint_unique(
    hint: int, tensor: Tensor, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, ...]:
    return (
        tensor.new_empty((hint,)),
        tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=torch.int64),
        tensor.new_empty((hint if return_counts else 0,), dtype=torch.int64),
    )


def _hint_item(hint: int, tensor: Tensor) -> int:
    if not is_index(tensor) or tensor.dtype == torch.bool:  # no size
        raise DataDependentOutputException(aten._local_scalar_dense.default)
    return hint


HINTED: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: lambda hint, x: x.new_empty((hint, x.dim()), dtype=torch.int64),
    aten.masked_select.default: lambda hint, x, mask: x.new_empty((hint,)),
    aten._unique2.default: lambda hint, x, is_sorted=True, *flags: _hint_unique(hint, x, *flags),
    aten.unique_consecutive.default: _hint_unique,
    aten.repeat_interleave.Tensor: lambda hint, repeats, output_size=None: repeats.new_empty(
        (hint if output_size is None else output_size,)
    ),
    aten.bincount.default: lambda hint, x, weights=None, minlength=0: x.new_empty(
        (max(hint, minlength),), dtype=torch.int64 if weights is None else weights.dtype
    ),
    aten._local_scalar_dense.default: _hint_item,
}
"""Operators that a size hint answers, and functions of the hint and their arguments that do."""
