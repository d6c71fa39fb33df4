"""Storages of two peaks matched with each other, and the modules and the line that grew."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from fxmem.graph import Category, SourceLocation
from fxmem.report.document import LiveRow

_MOST_MODULES = 10


@dataclass(frozen=True, slots=True)
class Change:
    """A storage at the peak that is new, gone or of another size.

    Attributes:
        label: As in a report.
        category: Its purpose.
        fqn: The module that made it or that it belongs to; empty for the model itself.
        shape: Of the first tensor on it, after if there is one.
        dtype: Of that tensor.
        source: The line that made it.
        before_bytes: Its size before; 0 if it is new.
        after_bytes: Its size after; 0 if it is gone.
    """

    label: str
    category: Category
    fqn: str
    shape: tuple[int, ...] | None
    dtype: str
    source: SourceLocation | None
    before_bytes: int
    after_bytes: int

    @property
    def growth_bytes(self) -> int:
        """How much larger it is after; negative where it shrank."""
        return self.after_bytes - self.before_bytes


def match_storages(before: Sequence[LiveRow], after: Sequence[LiveRow]) -> tuple[Change, ...]:
    """Matches the storages of two peaks, and lists the differing ones, growth first.

    Storages match by label and category. The rest match by category, shape, dtype and size, for a
    module may have been renamed.
    """
    keys = (
        attrgetter("category", "label"),
        attrgetter("category", "shape", "dtype", "nbytes"),
    )
    old, new, pairs = list(before), list(after), list[tuple[LiveRow, LiveRow]]()
    for find_key in keys:
        waiting: dict[Hashable, deque[LiveRow]] = defaultdict(deque)
        unmatched = []
        for storage in old:
            waiting[find_key(storage)].append(storage)
        for storage in new:
            if same := waiting.get(find_key(storage)):
                pairs.append((same.popleft(), storage))
            else:
                unmatched.append(storage)
        old, new = [storage for queue in waiting.values() for storage in queue], unmatched
    pairs += [(replace(storage, nbytes=0), storage) for storage in new]
    pairs += [(storage, replace(storage, nbytes=0)) for storage in old]
    changes = (
        Change(b.label, b.category, b.fqn, b.shape, b.dtype, b.source, a.nbytes, b.nbytes)
        for a, b in pairs
        if a.nbytes != b.nbytes
    )
    return tuple(sorted(changes, key=lambda c: (c.growth_bytes < 0, -abs(c.growth_bytes))))


def compare_modules(
    before: Sequence[LiveRow], after: Sequence[LiveRow]
) -> dict[str, tuple[int, int]]:
    """Compares modules at the deepest level at which a reader can take in the differing ones.

    Returns:
        By module, the bytes that its storages take before and after; the largest change first.
    """
    deepest = max((s.fqn.count(".") + 1 for s in (*before, *after)), default=1)
    for depth in range(deepest, 0, -1):
        old, new = Counter[str](), Counter[str]()
        for storages, total in ((before, old), (after, new)):
            for storage in storages:
                total[".".join(storage.fqn.split(".")[:depth])] += storage.nbytes
        names = [name for name in {**old, **new} if old[name] != new[name]]
        if len(names) <= _MOST_MODULES:
            break
    names.sort(key=lambda name: -abs(new[name] - old[name]))
    return {name: (old[name], new[name]) for name in names}


def find_guilty_line(changes: Sequence[Change]) -> SourceLocation | None:
    """Finds the line of the user's repository that accounts for most of the growth."""
    growth = Counter[SourceLocation]()
    for change in changes:
        if change.source is not None and not os.path.isabs(change.source.file):
            growth[change.source] += change.growth_bytes
    grown = {source: nbytes for source, nbytes in growth.items() if nbytes > 0}
    return max(grown, key=grown.__getitem__, default=None)
