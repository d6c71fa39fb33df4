"""Attributes of a model's modules, which a traced graph has as what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxmem.tracing.changes import is_same, take_snapshot
from fxmem.tracing.description import INTERNAL, PLAIN

_MISSING = object()

Place = tuple[str, str]
"""The name of a module, and of an attribute of it."""


class Settings:
    """What some modules' attributes are, to be held against what they are later.

    Args:
        modules: By name, those whose code was traced: others read their attributes in each call.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._plain: list[tuple[Place, nn.Module, Any]] = []
        self._others: list[tuple[Place, nn.Module, Any]] = []
        for name, module in modules:
            for attribute, value in vars(module).items():
                if attribute in INTERNAL:
                    continue
                place = (name, attribute)
                if isinstance(value, PLAIN):
                    self._plain.append((place, module, value))
                else:
                    self._others.append((place, module, take_snapshot([value])))
        self._modules = {place: module for place, module, _ in (*self._plain, *self._others)}

    def find_changed(self) -> list[Place]:
        """The attributes that are not what they were."""
        changed = [
            place
            for place, module, value in self._plain
            if not is_equal(getattr(module, place[1], _MISSING), value)
        ]
        if torch.compiler.is_compiling():  # which cannot follow the rest
            return changed
        return changed + [
            place
            for place, module, snapshot in self._others
            if not is_same(snapshot, take_snapshot([getattr(module, place[1], _MISSING)]))
        ]

    def read_values(self, places: Iterable[Place]) -> tuple[Any, ...]:
        """What some attributes are now.

        Args:
            places: Of those that were there.
        """
        values = ((place, getattr(self._modules[place], place[1], None)) for place in places)
        return tuple((p, v if isinstance(v, PLAIN) else take_snapshot([v])) for p, v in values)

    def find_type(self, place: Place) -> type[nn.Module]:
        """The class of the module that an attribute is of.

        Args:
            place: One that was there.
        """
        return type(self._modules[place])


@contextlib.contextmanager
def watch_reads() -> Iterator[set[tuple[type[nn.Module], str]]]:
    """The attributes that are read of modules meanwhile, by the modules' classes."""
    seen: set[tuple[type[nn.Module], str]] = set()

    def read(self: nn.Module, name: str) -> Any:
        seen.add((type(self), name))
        return object.__getattribute__(self, name)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        del nn.Module.__getattribute__


def is_equal(value: Any, before: Any) -> bool:
    """Whether a plain value is what it was, its type included.

    >>> is_equal(1, 1), is_equal(1, True)
    (True, False)
    """
    return value is before or (type(value) is type(before) and bool(value == before))
