"""What a segment's modules hold beside parameters and buffers, which it is computed again with.

Between forward and backward a rate may be set for the next call, or a mask: the second run finds
what the first one found.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.tracing.description import INTERNAL

_MISSING = object()


class Attributes:
    """What modules hold when a segment first runs, without what that run changes itself.

    Args:
        reads: By name, what the segment reads; only modules are looked at.
    """

    def __init__(self, reads: Mapping[str, nn.Module | Tensor]) -> None:
        modules = (each for each in reads.values() if isinstance(each, nn.Module))
        parts = dict.fromkeys(part for each in modules for part in each.modules())
        self._seen = [_Seen(vars(part)) for part in parts]

    def list_generators(self) -> list[torch.Generator]:
        """The generators of random numbers that modules have for themselves."""
        held = (value for seen in self._seen for value in seen.then.values())
        return [*dict.fromkeys(value for value in held if isinstance(value, torch.Generator))]

    def settle(self) -> None:
        """After the first run."""
        for seen in self._seen:
            seen.settle()

    @contextlib.contextmanager
    def repeat(self) -> Iterator[None]:
        """Has modules hold what they held, and afterwards what they hold now."""
        changed = [
            (seen.table, seen.then, seen.table.copy()) for seen in self._seen if seen.is_changed()
        ]
        for table, then, _ in changed:
            put_back(table, {**table, **then})
        try:
            yield
        finally:
            for table, _, now in changed:
                put_back(table, now)


class _Seen:
    """What one module held; its mode, which every module has, is its call's to know.

    Until the first run is over tensors are not held: those that it puts others in the place of, as
    code does that keeps a map of attention to be looked at, go when they would.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.then = {name: table[name] for name in table.keys() - INTERNAL}
        tensors = [name for name, value in self.then.items() if isinstance(value, Tensor)]
        self._tensors = {name: weakref.ref(self.then.pop(name)) for name in tensors}

    def settle(self) -> None:
        self.then |= {name: get() for name, get in self._tensors.items()}
        if self.is_changed():
            self.then = {n: v for n, v in self.then.items() if self.table.get(n, _MISSING) is v}
        self._tensors = {}

    def is_changed(self) -> bool:
        return any(self.table.get(n, _MISSING) is not value for n, value in self.then.items())


def put_back(table: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """Has a table of a module hold what it held; in that order where others were added or taken.

    Args:
        table: The table.
        wanted: What it held.
    """
    if table.keys() != wanted.keys():
        table.clear()
    for name, value in wanted.items():
        if table.get(name, _MISSING) is not value:
            table[name] = value
