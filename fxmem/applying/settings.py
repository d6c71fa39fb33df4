"""Attributes of a model's modules, which a traced graph has as what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxmem.planning.plan import Plan
from fxmem.tracing.changes import Snapshot, is_same, take_snapshot
from fxmem.tracing.description import INTERNAL, PLAIN
from fxmem.tracing.reads import find_package, watch_modules

_MISSING = type("Missing", (), {})  # a class: a copied model has the same
_TOGETHER = 5_000
"""Entries that are compared at once: fewer than what a snapshot leaves out from."""
_ALL = "__dict__"
_NO_CODE_OF_MODELS = ("copy", "fxmem", "torch")

Place = tuple[str, str]
"""The name of a module, and of an attribute of it."""

_Attributes = dict[str, Any]
"""The ``__dict__`` of a module."""

_Object = tuple[Place, _Attributes, Snapshot]
"""An attribute that holds others, and what it held."""

Read = tuple[type[nn.Module], str]
"""The class of a module, and an attribute that its code read."""


class Settings:
    """What some modules' attributes are, to be held against what they are later.

    Args:
        modules: By name, those whose code was traced: others read their attributes in each call.
        parts: Attributes that this code reads of those others, by their names.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        parts: Iterable[tuple[str, nn.Module, str]] = (),
    ) -> None:
        self._modules = dict(modules)
        # The dicts themselves: of these, compilers watch the keys.
        self._held = [
            (name, vars(module), len(vars(module)), INTERNAL.union(vars(module)))
            for name, module in self._modules.items()
        ]
        self._plain: list[tuple[Place, _Attributes, Any]] = []
        objects: list[_Object] = []
        for name, held, _, _ in self._held:
            for attribute, value in held.items():
                if attribute in INTERNAL or _is_ours(attribute, value):
                    continue
                self._hold((name, attribute), held, value, objects)
        for name, module, attribute in parts:
            self._modules[name] = module
            value = vars(module).get(attribute, _MISSING)
            self._hold((name, attribute), vars(module), value, objects)
        self._objects = [*_group(objects)]

    def _hold(self, place: Place, held: _Attributes, value: object, objects: list[_Object]) -> None:
        if isinstance(value, PLAIN) or value is _MISSING:
            self._plain.append((place, held, value))
        else:
            objects.append((place, held, take_snapshot([value])))

    def find_changed(self) -> list[Place]:
        """The attributes that are not what they were, or were not there."""
        changed = [
            place
            for place, held, value in self._plain
            if not is_equal(held.get(place[1], _MISSING), value)
        ]
        if not torch.compiler.is_compiling():  # which cannot follow this
            changed.extend(self._find_changed_objects())
        for name, held, count, known in self._held:
            # Where one has gone, which is a change, another may have come.
            if (changed or len(held) != count) and not held.keys() <= known:
                changed.extend(
                    (name, attribute)
                    for attribute, value in held.items()
                    if attribute not in known and not _is_ours(attribute, value)
                )
        return changed

    def _find_changed_objects(self) -> Iterator[Place]:
        """The same of attributes that hold others."""
        for places, snapshot in self._objects:
            if is_same(snapshot, _take_together(places)):
                continue
            for place, held, before in places:
                if not is_same(before, take_snapshot([held.get(place[1], _MISSING)])):
                    yield place

    def freeze_values(self, places: Iterable[Place]) -> tuple[Any, ...]:
        """What some attributes are now, to be looked up: numbers of other types are not equal."""
        values = ((p, getattr(self._modules[p[0]], p[1], _MISSING)) for p in places)
        return tuple(
            (
                place,
                type(value),
                repr(value) if isinstance(value, PLAIN) else take_snapshot([value]),
            )
            for place, value in values
        )

    def is_read(self, place: Place, reads: Collection[Read]) -> bool:
        """Whether an attribute is among those that were read.

        Args:
            place: Of a module that was there.
            reads: From :func:`watch_reads`.
        """
        kind = type(self._modules[place[0]])
        return (kind, place[1]) in reads or (kind, _ALL) in reads


def _group(objects: Iterable[_Object]) -> Iterator[tuple[list[_Object], Snapshot]]:
    """Attributes that are compared at once, with the snapshot of them all.

    What many modules hold, such as a configuration, is looked at once in it.
    """
    group: list[_Object] = []
    count = 0
    for each in objects:
        count += len(each[2])
        if group and count > _TOGETHER:
            yield group, _take_together(group)
            group, count = [], len(each[2])
        group.append(each)
    if group:
        yield group, _take_together(group)


def _take_together(group: Iterable[_Object]) -> Snapshot:
    return take_snapshot([held.get(place[1], _MISSING) for place, held, _ in group])


def _is_ours(attribute: str, value: object) -> bool:
    """Whether fxmem has put an attribute there, as :func:`fxmem.auto` does."""
    return attribute.startswith("_fxmem_") or isinstance(value, Plan)


@contextlib.contextmanager
def watch_reads() -> Iterator[set[Read]]:
    """The attributes that are read of modules meanwhile, in any thread, by the modules' classes."""
    seen: set[Read] = set()

    def note(module: nn.Module, name: str, reader: dict[str, Any]) -> None:
        if name != _ALL or find_package(reader) not in _NO_CODE_OF_MODELS:
            seen.add((type(module), name))

    with watch_modules(note):
        yield seen


def is_equal(value: Any, before: Any) -> bool:
    """Whether a plain value is what it was, its type included, and the sign of a zero.

    >>> is_equal(1, 1), is_equal(1, True), is_equal(0.0, -0.0)
    (True, False, False)
    """
    if value is before:
        return True
    if type(value) is not type(before) or value != before:
        return False
    return bool(value) or repr(value) == repr(before)
