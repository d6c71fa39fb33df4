"""What Python code reaches from a value: the walk that copying and labelling share.

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
from collections import deque
from collections.abc import Iterable, Iterator
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
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks on a tensor: attributes, each a dict from ids to functions, or None."""

NUMBERS_AND_TEXT = (type(None), bool, int, float, complex, str, bytes)
LEAVES = (
    *NUMBERS_AND_TEXT,
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
"""What holds nothing that code reaches."""

_CONTAINERS = (list, tuple, set, frozenset, deque)
_LIBRARIES = frozenset({"torch", *sys.stdlib_module_names}) - {"__main__"}


def iterate_reached(value: object, seen: dict[int, object] | None = None) -> Iterator[object]:
    """The objects that code reaches from a value, itself included, each once, depth first.

    Classes, Python modules, numbers and texts are not entered or yielded; nor are the globals
    of torch's own functions.

    Args:
        value: Where to begin.
        seen: What was reached before, by id, and is passed over; what is reached is added.

    >>> shared = torch.ones(2)
    >>> def scale(x, factor=[3]):
    ...     return x * shared * factor[0]
    >>> any(reached is shared for reached in iterate_reached(scale))
    True
    """
    seen = {} if seen is None else seen  # the objects too, so that no id is used again
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, LEAVES) or id(current) in seen:
            continue
        seen[id(current)] = current
        yield current
        stack.extend(reversed([*find_held(current)]))


def find_globals(function: FunctionType) -> dict[str, Any]:
    """The globals that a function's code names; none for functions of torch and of Python."""
    if (function.__module__ or "").split(".")[0] in _LIBRARIES:
        return {}
    names = _find_names(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def find_attributes(tensor: Tensor) -> dict[str, Any]:
    """What a user has set on a tensor: ``weight.lr_scale = 0.1``."""
    internal = _list_internal() if isinstance(tensor, FakeTensor) else ()
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in internal and not name.startswith("_fxmem")
    }


def open_cell(cell: CellType) -> object:
    """What a closure's cell holds; None for one that is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def find_held(value: Any) -> Iterable[object]:
    """What a value holds on to itself."""
    if isinstance(value, Tensor):
        hooks = [getattr(value, name) for name in HOOKS]
        grad = value.grad if value.is_leaf else None
        return [*find_attributes(value).values(), *hooks, grad]
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        own = (value.__defaults__, value.__kwdefaults__, vars(value) or None)
        return [*own, *cells, *find_globals(value).values()]
    if isinstance(value, CellType):
        return [open_cell(value)]
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
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            iterate: Any = kind.__iter__
            elements = [*iterate(value)]
    return elements + list_attributes(value)


def list_slots(value: object) -> tuple[str, ...]:
    """The names of the attributes that an object has in slots, filled or not.

    >>> class Point:
    ...     __slots__ = ["x", "__secret"]
    >>> sorted(list_slots(Point()))
    ['_Point__secret', 'x']
    """
    kind: Any = type(value)
    return _find_slots(kind)


@functools.lru_cache(maxsize=4096)
def _find_slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for owner in kind.__mro__
        if "__slots__" in vars(owner)
        for name, held in vars(owner).items()
        if isinstance(held, MemberDescriptorType)
    )


def list_attributes(value: Any) -> list[object]:
    """The values of an object's attributes, in its ``__dict__`` and its slots."""
    attributes = getattr(value, "__dict__", None)
    values = [*attributes.values()] if isinstance(attributes, dict) else []
    return [*values, *read_slots(value).values()]


def read_slots(value: Any) -> dict[str, object]:
    """What an object holds in its slots, by their names; those that are not filled are left out."""
    found: dict[str, object] = {}
    for name in list_slots(value):
        with contextlib.suppress(Exception):  # none is there, or a property that fails
            found[name] = getattr(value, name)
    return found


@functools.lru_cache(maxsize=4096)
def _find_names(code: CodeType) -> frozenset[str]:
    """The names that a function's code looks up, itself or in functions that it defines."""
    inner = (_find_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _list_internal() -> frozenset[str]:
    """The attributes that every fake tensor has."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(0))) | {"_is_param", "_is_buffer"}
