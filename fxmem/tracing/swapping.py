"""A model run on fake tensors: they take the place of its own while it runs, which then come back.

As ``torch.func.functional_call`` does with parameters, but wherever the model's code finds a
tensor: attributes, lists, optimizers in hooks, closures. All Python state that is reached from the
model is put back to what it was, so an analysis leaves no trace in it.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.utils._pytree import tree_leaves

from fxmem.errors import TraceError, summarize_error
from fxmem.tracing.fakes import find_dtype, make_fake_inputs, refuse_compiled
from fxmem.tracing.reach import (
    HOOKS,
    LEAVES,
    find_attributes,
    find_globals,
    find_held,
    iterate_reached,
    list_slots,
    read_slots,
)
from fxmem.tracing.tensor_copier import TensorCopier
from fxmem.tracing.views import take_again

Fakes = dict[int, Tensor]
"""The fake of each tensor, by the tensor's id."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_FOREIGN = frozenset({"torch", "numpy", *sys.stdlib_module_names})
_CACHE: Any = functools._lru_cache_wrapper
_CLEARED = (list, dict, OrderedDict, set, deque)
_FORGETS: list[Callable[[], None]] = []
"""One for each swap that is under way."""


@contextmanager
def swap_in_fakes(
    model: nn.Module,
    fake_mode: FakeTensorMode,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dtype: str | None = None,
    train: bool,
    readers: Sequence[object] = (),
) -> Iterator[Inputs]:
    """Has a model hold fake CPU tensors; at the end it is as it was, in every attribute.

    Tensors that share a storage have fakes that share one; a tied parameter stays one. Hooks run
    as they are: an optimizer that one steps in backward finds the fakes of its parameters. A
    one-element CPU buffer keeps its value, so that ``.item()`` on it works; no other values are
    known. A tensor that was computed with gradients and kept on a module becomes a leaf. The model
    must not be used in another thread meanwhile.

    Args:
        model: Its tensors real, meta or fake, on any device.
        fake_mode: The mode that the fakes belong to.
        args: Positional inputs; see :func:`fxmem.tracing.fakes.make_fake_inputs`.
        kwargs: Keyword inputs.
        dtype: Name of a dtype that floating parameters, buffers and inputs are cast to, as by
            ``model.to(dtype)``.
        train: Whether the model is in training mode.
        readers: What else finds the fakes where it reads the model's or the inputs' tensors, such
            as a loss that compares the output with the input.

    Yields:
        The inputs on fake tensors.

    Raises:
        TraceError: A tensor has no fake.
        UsageError: The dtype is not a floating one, or an input is no spec.

    >>> from fxmem.tracing.fakes import make_fake_mode
    >>> linear = nn.Linear(3, 2)
    >>> with swap_in_fakes(linear, make_fake_mode(), dtype="bfloat16", train=True):
    ...     linear.weight
    Parameter(FakeTensor(..., size=(2, 3), dtype=torch.bfloat16, requires_grad=True))
    >>> type(linear.weight).__name__
    'Parameter'
    """
    refuse_compiled(model)
    given = args, dict(kwargs or {})
    objects = [leaf for leaf in tree_leaves(given) if not isinstance(leaf, (*LEAVES, Tensor))]
    seen: dict[int, object] = {}
    for root in (model, *objects):
        deque(iterate_reached(root, seen), maxlen=0)
    tensors = [value for value in seen.values() if isinstance(value, Tensor)]
    fakes = _make_fakes(model, tensors, fake_mode, find_dtype(dtype))
    inputs = make_fake_inputs(*given, fake_mode, dtype=dtype, fakes=fakes)
    tensors += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    for reader in readers:
        deque(iterate_reached(reader, seen), maxlen=0)
    places = [place for holder in seen.values() for place in _list_places(holder)]
    before = [(place, place.read()) for place in places]
    containers: list[Any] = [holder for holder in seen.values() if type(holder) in _CLEARED]

    def forget() -> None:
        reached: dict[int, object] = {}
        for root in (model, *objects, *inputs, *readers):
            deque(iterate_reached(root, reached), maxlen=0)
        for container in containers:
            if id(container) not in reached:
                container.clear()

    _FORGETS.append(forget)
    try:
        _write_fakes(before, tensors, fakes)
        del fakes  # a gradient, for instance, must be able to go
        model.train(train)
        yield inputs
    finally:
        _FORGETS.remove(forget)
        with ExitStack() as stack:  # goes on after one that fails
            for place, contents in before:
                stack.callback(_put_back, place, contents)


def forget_replaced() -> None:
    """Empties the lists and tables that the model has let go of within :func:`swap_in_fakes`.

    The results of a step before (``self.pyramid = [...]`` in forward) would live on in them.
    """
    for forget in _FORGETS:
        forget()


@contextmanager
def restore_user_state(roots: Iterable[object]) -> Iterator[None]:
    """Takes fake tensors out of whatever code keeps for itself, as the context ends.

    A table that ``forward`` computes once and keeps in a global, on the class or in
    ``functools.lru_cache`` would be a fake tensor from then on, and the user's next real step
    would meet it.

    Args:
        roots: Functions and classes whose code runs within.
    """
    holders = [*_iterate_holders(roots)]
    places = [place for holder in holders for place in _list_places(holder)]
    before = [(place, place.read()) for place in places]
    try:
        yield
    finally:
        for place, contents in before:
            known = {id(value) for value in _flatten(contents)}
            now = _flatten(place.read())
            if any(id(value) not in known and _holds_fake(value) for value in now):
                place.write(contents)
        for holder in holders:
            if isinstance(holder, _CACHE) and any(map(_holds_fake, gc.get_referents(holder))):
                holder.cache_clear()


def _iterate_holders(roots: Iterable[object]) -> Iterator[object]:
    """Everything that code reaches, each once; of classes the roots and the user's own."""
    seen: dict[int, object] = {}  # the objects too, so that no id is used again
    stack = [*roots]
    own = {kind for root in roots if isinstance(root, type) for kind in root.__mro__}
    while stack:
        current = stack.pop()
        is_class = isinstance(current, type)
        if id(current) in seen or (isinstance(current, LEAVES) and not is_class):
            continue
        seen[id(current)] = current
        if isinstance(current, type):
            if not _is_foreign(current) and (current in own or not _is_installed(current)):
                yield current
                stack += [*map(_unwrap, vars(current).values()), *current.__mro__]
        else:
            yield current
            stack += [*find_held(current), type(current)]


def _is_foreign(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _FOREIGN


def _is_installed(kind: type) -> bool:
    """Whether a class is of an installed package, whose classes name each other without end."""
    module = sys.modules.get(kind.__module__)
    return f"{os.sep}site-packages{os.sep}" in (getattr(module, "__file__", None) or "")


def _unwrap(attribute: object) -> object:
    """The function of a static method, a class method or a property."""
    if isinstance(attribute, property):
        return attribute.fget
    return getattr(attribute, "__func__", attribute)


# -- the fakes ---------------------------------------------------------------------------------


def _make_fakes(
    model: nn.Module,
    reached: Iterable[Tensor],
    fake_mode: FakeTensorMode,
    dtype: torch.dtype | None,
) -> Fakes:
    """A fake of each tensor, the registered ones and their gradients cast."""
    copier, fakes = TensorCopier(fake_mode), Fakes()

    def copy(tensor: Tensor | None, dtype: torch.dtype | None, name: str) -> None:
        if tensor is None or id(tensor) in fakes or is_lazy(tensor):
            return
        try:
            with fake_mode, torch.enable_grad():
                view = take_again(tensor, fakes)
            fakes[id(tensor)] = copier.copy(tensor, dtype) if view is None else view
        except TraceError as error:
            raise TraceError(f"{name}: {error.cause}", hint=error.hint) from error
        except Exception as error:
            raise TraceError(
                f"{name} has no fake copy: {summarize_error(error)}",
                hint="build the model from strided tensors, plain or of a wrapper subclass",
            ) from error

    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            fqn = f"{prefix}.{name}".strip(".")
            copy(tensor, dtype, repr(fqn))
            if tensor is not None and tensor.is_leaf:
                copy(tensor.grad, dtype, f"the gradient of {fqn!r}")
    for tensor in sorted(reached, key=lambda tensor: not tensor.is_leaf):  # views after their bases
        copy(tensor, None, f"a tensor of {type(model).__name__}")
    return fakes


def _write_fakes(
    before: Iterable[tuple[_Place, list[Any]]], tensors: Iterable[Tensor], fakes: Fakes
) -> None:
    for tensor in tensors:
        if id(tensor) in fakes:
            _carry_over(tensor, fakes[id(tensor)], fakes)
    for place, contents in before:
        swapped = [_replace(value, fakes) for value in contents]
        if not _are_same(contents, swapped):
            place.write(swapped)


def _carry_over(tensor: Tensor, fake: Tensor, fakes: Fakes) -> None:
    """Gives a fake what hangs on the original: attributes, hooks, a gradient."""
    for name, value in find_attributes(tensor).items():
        vars(fake).setdefault(name, _replace(value, fakes))
    if not (tensor.requires_grad and fake.requires_grad):
        return
    for name in HOOKS:
        if getattr(tensor, name):
            setattr(fake, name, getattr(tensor, name))
    if tensor.is_leaf and id(tensor.grad) in fakes:
        fake.grad = fakes[id(tensor.grad)]


def _replace(value: Any, fakes: Fakes) -> Any:
    """A value with fakes in the place of tensors; the value itself where it holds none."""
    if isinstance(value, Tensor):
        return fakes.get(id(value), value)
    if type(value) is int and value in fakes:  # optimizers by the ids of their parameters
        return id(fakes[value])
    if type(value).__name__ == "AccumulateGrad" and id(value.variable) in fakes:
        return _get_grad_fn_or_grad_acc(fakes[id(value.variable)])  # register_multi_grad_hook
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        elements = [_replace(element, fakes) for element in value]
        if all(new is old for new, old in zip(elements, value, strict=True)):
            return value
        return tuple(elements) if type(value) is tuple else type(value)(*elements)
    if isinstance(value, weakref.ref) and id(value()) in fakes:
        return weakref.ref(fakes[id(value())])
    return value


def settle_lazy(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fake_mode: FakeTensorMode,
    dtype: str | None,
) -> None:
    """Runs a swapped model that has lazy parameters once: they become fakes with their shapes.

    A model without lazy parameters is not run.

    Args:
        model: Within :func:`swap_in_fakes`.
        args: Positional inputs, on fakes.
        kwargs: Keyword inputs.
        fake_mode: The mode that the fakes belong to.
        dtype: Name of a dtype that floating parameters are cast to.
    """
    if not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    cast_to = find_dtype(dtype)

    def materialize(lazy: Any, shape: Sequence[int], device: Any = None, dtype: Any = None) -> None:
        own = dtype or lazy.dtype
        own = cast_to if cast_to is not None and own.is_floating_point else own
        fake: Tensor = torch.empty(tuple(shape), dtype=own)
        if isinstance(lazy, nn.Parameter):
            fake = nn.Parameter(fake, lazy.requires_grad)
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                held: dict[str, Any] = table
                held.update({name: fake for name, tensor in held.items() if tensor is lazy})

    mixin: Any = UninitializedParameter.__mro__[1]  # which buffers have too
    original = mixin.materialize
    mixin.materialize = materialize
    try:
        with fake_mode, torch.no_grad():
            model(*args, **kwargs)
    finally:
        mixin.materialize = original


# -- the places that tensors are held in -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Something mutable that holds objects: reads them as a list, and writes such a list back."""

    read: Callable[[], list[Any]]
    write: Callable[[list[Any]], None]


def _put_back(place: _Place, contents: list[Any]) -> None:
    if not _are_same(contents, place.read()):
        place.write(contents)


def _list_places(holder: Any) -> Iterator[_Place]:
    if isinstance(holder, Tensor):
        return
    if isinstance(holder, CellType):
        yield _Place(lambda: _read_cell(holder), lambda new: _write_cell(holder, new))
        return
    if isinstance(holder, functools.partial):
        setstate = vars(functools.partial)["__setstate__"].__get__(holder)
        yield _Place(lambda: [holder.__reduce__()[2]], lambda new: setstate(new[0]))
        return
    if isinstance(holder, FunctionType):
        names, own = holder.__globals__, [*find_globals(holder)]
        yield _Place(
            lambda: [(name, names[name]) for name in own if name in names],
            lambda new: names.update(new),
        )
        yield _Place(
            lambda: [holder.__defaults__],
            lambda new: setattr(holder, "__defaults__", new[0]),
        )
        return
    if isinstance(holder, type):
        yield _Place(lambda: [*vars(holder).items()], functools.partial(_write_class, holder))
        return
    if isinstance(holder, dict):
        table: Any = OrderedDict if isinstance(holder, OrderedDict) else dict
        yield _Place(lambda: [*table.items(holder)], functools.partial(_write_dict, table, holder))
    kinds: tuple[Any, ...] = (list, deque, set)
    for kind in kinds:
        if isinstance(holder, kind):
            yield _Place(
                functools.partial(_read_sequence, kind, holder),
                functools.partial(_write_sequence, kind, holder),
            )
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        yield _Place(
            lambda: [*attributes.items()], functools.partial(_write_dict, dict, attributes)
        )
    if list_slots(holder):
        yield _Place(lambda: [*read_slots(holder).items()], functools.partial(_write_slots, holder))
    if isinstance(holder, nn.Module):  # a lazy one becomes another
        yield _Place(lambda: [type(holder)], lambda new: setattr(holder, "__class__", new[0]))


def _read_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []


def _write_cell(cell: CellType, contents: list[Any]) -> None:
    if contents:
        cell.cell_contents = contents[0]
    else:
        del cell.cell_contents


def _write_dict(kind: Any, holder: Any, items: list[Any]) -> None:
    kind.clear(holder)
    for key, value in items:
        kind.__setitem__(holder, key, value)


def _read_sequence(kind: Any, holder: Any) -> list[Any]:
    return [*kind.__iter__(holder)]


def _write_sequence(kind: Any, holder: Any, elements: list[Any]) -> None:
    kind.clear(holder)
    (kind.update if kind is set else kind.extend)(holder, elements)


def _write_slots(holder: Any, items: list[Any]) -> None:
    new = dict(items)
    for name, value in read_slots(holder).items():
        if name not in new:
            object.__delattr__(holder, name)
        elif new[name] is not value:
            object.__setattr__(holder, name, new[name])


def _write_class(kind: type, items: list[Any]) -> None:
    new = dict(items)
    for name, value in [*vars(kind).items()]:
        if name not in new:
            delattr(kind, name)
        elif new[name] is not value:
            setattr(kind, name, new[name])


def _are_same(one: list[Any], other: list[Any]) -> bool:
    """Tells whether two readings of a place hold the same objects."""
    flat, others = _flatten(one), _flatten(other)
    return len(flat) == len(others) and all(a is b for a, b in zip(flat, others, strict=True))


def _flatten(contents: list[Any]) -> list[Any]:
    """The objects in a reading, out of the pairs that reading makes."""
    return [part for value in contents for part in (value if type(value) is tuple else (value,))]


def _holds_fake(value: object) -> bool:
    return any(isinstance(reached, FakeTensor) for reached in iterate_reached(value))
