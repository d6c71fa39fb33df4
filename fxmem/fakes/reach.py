"""Walk over everything that Python code reaches from a value, and the places that hold it.

``copy.deepcopy`` and ``named_parameters`` stop where a function begins. A hook, a patched
``forward`` or a callback reaches tensors and optimizers through what it closes over, its default
arguments, and the globals that its code names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GenericAlias,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks on a tensor: attributes, each a dict from ids to functions, or None."""

LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    ModuleType,
    CodeType,
    GenericAlias,
    FakeTensorMode,
    logging.Logger,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Generator,
    fx.Graph,
)
"""Types of values that hold nothing that code reaches."""

CONTAINERS = (list, tuple, set, frozenset, deque)
_LIBRARIES = frozenset({"torch", "fxmem", *sys.stdlib_module_names}) - {"__main__"}


def iterate_reached(value: object, seen: dict[int, object] | None = None) -> Iterator[object]:
    """Yields the objects that code reaches from a value, itself included, once, depth first.

    Classes, Python modules, numbers and texts are not entered or yielded; nor are objects of
    ``torch.distributed`` but tensors and modules, and the globals of functions of torch and fxmem.
    What was seen before, by id, is passed over, and the rest added to it.
    """
    seen = {} if seen is None else seen  # the objects too, so that no id is used again
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, LEAVES) or id(current) in seen or _is_of_wrapper(current):
            continue
        seen[id(current)] = current
        yield current
        stack.extend(reversed([*find_held(current)]))


def _is_of_wrapper(value: object) -> bool:
    """Returns whether an object is a wrapper's own, as the states of FSDP are."""
    is_own = type(value).__module__.startswith("torch.distributed")
    return is_own and not isinstance(value, Tensor | nn.Module)  # CheckpointWrapper is a module


def find_globals(function: FunctionType) -> dict[str, Any]:
    """Finds the globals that a function's code names; of torch's, fxmem's and Python's own none."""
    if (function.__module__ or "").split(".")[0] in _LIBRARIES:
        return {}
    names = _find_names(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


@functools.lru_cache(maxsize=4096)
def _find_names(code: CodeType) -> frozenset[str]:
    """Finds the names that a function's code looks up, itself or in functions that it defines."""
    inner = (_find_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def find_attributes(tensor: Tensor) -> dict[str, Any]:
    """Finds what a user has set on a tensor: ``weight.lr_scale = 0.1``."""
    internal = _list_internal() if isinstance(tensor, FakeTensor) else ()
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in internal and not name.startswith("_fxmem")
    }


@functools.cache
def _list_internal() -> frozenset[str]:
    with _disable_current_modes(), FakeTensorMode():  # no recording keeps a fake of this mode
        return frozenset(vars(torch.empty(0))) | {"_is_param", "_is_buffer"}


def find_grad(tensor: Tensor) -> Tensor | None:
    """Finds the gradient of a leaf.

    No view is asked whether it is one: those of FSDP1's flat parameters raise an error after
    forward, when their base has been modified.
    """
    return tensor.grad if tensor._base is None and tensor.is_leaf else None


def find_held(value: Any) -> Iterable[object]:
    """Finds what a value holds on to itself."""
    if isinstance(value, Tensor):
        hooks = [getattr(value, name) for name in HOOKS]
        return [*find_attributes(value).values(), *hooks, find_grad(value)]
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        own = (value.__defaults__, value.__kwdefaults__, vars(value) or None)
        return [*own, *cells, *find_globals(value).values()]
    if isinstance(value, CellType):
        with contextlib.suppress(ValueError):  # not filled yet
            return [value.cell_contents]
        return []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, BuiltinFunctionType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    elements: list[object] = []
    # A subclass may load what it is asked for: transformers' maps of models do.
    if isinstance(value, dict):
        elements = [*dict.keys(value), *dict.values(value)]
    for kind in CONTAINERS:
        if isinstance(value, kind):
            iterate: Any = kind.__iter__
            elements = [*iterate(value)]
    return elements + list_attributes(value)


def list_attributes(value: Any) -> list[object]:
    """Lists the values of an object's attributes, in its ``__dict__`` and its slots."""
    attributes = getattr(value, "__dict__", None)
    values = [*attributes.values()] if isinstance(attributes, dict) else []
    return [*values, *read_slots(value).values()]


def read_slots(value: Any) -> dict[str, object]:
    """Reads what an object holds in its slots, by name; those that are not filled are left out."""
    found: dict[str, object] = {}
    kind: Any = type(value)
    for name in list_slots(kind):
        with contextlib.suppress(Exception):  # none is there, or a property that fails
            found[name] = getattr(value, name)
    return found


@functools.lru_cache(maxsize=4096)
def list_slots(kind: type) -> tuple[str, ...]:
    """Lists the names of the attributes that objects of a class have in slots."""
    return tuple(
        name
        for owner in kind.__mro__
        if "__slots__" in vars(owner)
        for name, held in vars(owner).items()
        if isinstance(held, MemberDescriptorType)
    )


# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Something mutable that holds objects."""

    read: Callable[[], list[Any]]  # lists them, or pairs of names and objects
    write: Callable[[list[Any]], None]  # has the place hold such a list instead

    def restore(self, contents: list[Any]) -> None:
        """Writes back what was read before, unless nothing has changed."""
        if not are_same(contents, self.read()):
            self.write(contents)


@dataclass(frozen=True, slots=True)
class Entries:
    """The place of a dict's entries: a model has so many that each is one object."""

    holder: Any
    kind: Any = dict  # or OrderedDict: a subclass may do anything in its own methods

    def read(self) -> list[Any]:
        return [*self.kind.items(self.holder)]

    def write(self, items: list[Any]) -> None:
        self.kind.clear(self.holder)
        for key, value in items:
            self.kind.__setitem__(self.holder, key, value)

    restore = Place.restore


def list_places(holder: Any) -> Iterator[Place | Entries]:
    """Lists the places of an object: elements, attributes, slots, cells, defaults, globals."""
    if isinstance(holder, Tensor):
        return
    if isinstance(holder, CellType):

        def write_cell(contents: list[Any]) -> None:
            del holder.cell_contents
            for content in contents:  # none where it was not filled yet
                holder.cell_contents = content

        yield Place(lambda: [*find_held(holder)], write_cell)
    elif isinstance(holder, functools.partial):
        setstate = vars(functools.partial)["__setstate__"].__get__(holder)
        yield Place(lambda: [holder.__reduce__()[2]], lambda new: setstate(new[0]))
    elif isinstance(holder, FunctionType):
        names, own = holder.__globals__, [*find_globals(holder)]
        yield Place(lambda: [(name, names[name]) for name in own if name in names], names.update)
        yield Place(
            lambda: [holder.__defaults__], lambda new: setattr(holder, "__defaults__", new[0])
        )
    elif isinstance(holder, type):
        yield Place(
            lambda: [*vars(holder).items()],
            lambda new: _write_names(dict(vars(holder)), new, holder, type),
        )
    if isinstance(holder, (CellType, functools.partial, FunctionType, type)):
        return
    if isinstance(holder, dict):
        yield Entries(holder, OrderedDict if isinstance(holder, OrderedDict) else dict)
    bases: tuple[Any, ...] = (list, deque, set)
    for base in bases:
        if isinstance(holder, base):
            read = functools.partial(lambda base: [*base.__iter__(holder)], base)
            yield Place(read, functools.partial(_write_elements, base, holder))
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        yield Entries(attributes)
    kind: Any = type(holder)
    if list_slots(kind):
        yield Place(
            lambda: [*read_slots(holder).items()],
            lambda new: _write_names(read_slots(holder), new, holder, object),
        )
    if isinstance(holder, nn.Module):  # a lazy one becomes another
        yield Place(lambda: [type(holder)], lambda new: setattr(holder, "__class__", new[0]))


def _write_elements(base: Any, holder: Any, elements: list[Any]) -> None:
    base.clear(holder)
    (base.update if base is set else base.extend)(holder, elements)


def _write_names(held: dict[str, Any], items: list[Any], holder: Any, kind: Any) -> None:
    """Writes the attributes that differ, past what a class does when it is asked to."""
    new = dict(items)
    for name, value in held.items():
        if name not in new:
            kind.__delattr__(holder, name)
        elif new[name] is not value:
            kind.__setattr__(holder, name, new[name])


def are_same(one: list[Any], other: list[Any]) -> bool:
    """Returns whether two readings of a place hold the same objects."""
    flat, others = flatten_reading(one), flatten_reading(other)
    return len(flat) == len(others) and all(a is b for a, b in zip(flat, others, strict=True))


def flatten_reading(contents: list[Any]) -> list[Any]:
    """Lists the objects in a reading, out of its pairs."""
    return [part for value in contents for part in (value if type(value) is tuple else (value,))]
