"""What the user's code keeps outside of the model: left as it was found.

A model is copied, its classes and the globals that they name are not. A table that ``forward``
computes once and keeps in a global, on the class or in ``functools.lru_cache`` would be a fake
tensor from then on, and the user's next real step would meet it.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.tracing.reach import (
    LEAVES,
    find_globals,
    find_held,
    iterate_reached,
    list_slots,
    read_slots,
)

_Restore = Callable[[], None]
_FOREIGN = frozenset({"torch", "numpy", *sys.stdlib_module_names})
_Cache: Any = functools._lru_cache_wrapper
_MISSING = object()


@contextmanager
def restore_user_state(roots: Iterable[object]) -> Iterator[None]:
    """Takes fake tensors out of whatever code keeps for itself, as the context ends.

    Only what holds one then is put back; counters and the like stay as the code left them.

    Args:
        roots: Functions and classes whose code runs within.
    """
    roots = [*roots]
    restores = [restore for holder in iterate_holders(roots) for restore in _remember(holder)]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def iterate_holders(roots: Iterable[object]) -> Iterator[object]:
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


def _remember(holder: Any) -> Iterator[_Restore]:
    """What puts a holder back."""
    if isinstance(holder, Tensor):
        return
    if isinstance(holder, _Cache):
        yield functools.partial(_restore_cache, holder)
    elif isinstance(holder, FunctionType):
        names = find_globals(holder)
        if names:
            yield functools.partial(_restore_names, holder.__globals__, names)
    elif isinstance(holder, type):
        yield functools.partial(_restore_class, holder, dict(vars(holder)))
    else:
        if isinstance(holder, dict):
            yield functools.partial(_restore_dict, holder, dict.copy(holder))
        elif isinstance(holder, list | deque):
            yield functools.partial(_restore_sequence, holder, [*holder])
        elif isinstance(holder, set):
            yield functools.partial(_restore_set, holder, {*holder})
        attributes = getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            yield functools.partial(_restore_dict, attributes, dict(attributes))
        if list_slots(holder):
            yield functools.partial(_restore_slots, holder, read_slots(holder))


def _restore_cache(cache: Any) -> None:
    if any(map(_holds_fake, gc.get_referents(cache))):
        cache.cache_clear()


def _restore_names(names: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if names.get(name) is not value and _holds_fake(names.get(name)):
            names[name] = value


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    for name, value in [*vars(kind).items()]:
        if before.get(name, _MISSING) is not value and _holds_fake(value):
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)


def _restore_dict(current: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key, value in [*dict.items(current)]:
        if before.get(key, _MISSING) is not value and _holds_fake(value):
            if key in before:
                dict.__setitem__(current, key, before[key])
            else:
                dict.__delitem__(current, key)


def _restore_slots(holder: Any, before: dict[str, Any]) -> None:
    for name, value in read_slots(holder).items():
        if before.get(name, _MISSING) is not value and _holds_fake(value):
            if name in before:
                object.__setattr__(holder, name, before[name])
            else:
                object.__delattr__(holder, name)


def _restore_sequence(current: Any, before: list[Any]) -> None:
    known = {id(element) for element in before}
    if any(id(element) not in known and _holds_fake(element) for element in current):
        current.clear()
        current.extend(before)


def _restore_set(current: set[Any], before: set[Any]) -> None:
    current -= {element for element in current - before if _holds_fake(element)}


def _holds_fake(value: object) -> bool:
    return any(isinstance(reached, FakeTensor) for reached in iterate_reached(value))
