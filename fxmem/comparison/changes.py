"""Storages of two peaks matched with each other, and the modules and the line that grew."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxmem.comparison.footprints import LiveStorage
from fxmem.graph import Category, SourceLocation

LineMap = Mapping[str, Mapping[int, int]]
"""By file, the lines that two revisions share: the new number of each by its old one."""

_MOST_MODULES = 10
_NOTABLE = 0.1  # share of the growth that makes an edited line the guilty one
_OCCURRENCE = re.compile(r"_\d+$")


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


def match_storages(
    before: Sequence[LiveStorage], after: Sequence[LiveStorage], lines: LineMap | None
) -> tuple[Change, ...]:
    """Matches the storages of two peaks, and lists those that differ: first those that grew.

    Storages match by the line that made them, as far as it is known where lines moved to; then
    by label and category; and those that are left by category, shape, dtype and size, for a
    module may have got another name.
    """

    def key_by_line(storage: LiveStorage, moved: LineMap | None) -> Hashable:
        source = storage.source
        line = source.line if source else None
        if source is not None and moved is not None:
            line = moved.get(source.file, {}).get(source.line)
        if source is None or line is None:
            return None
        family = _OCCURRENCE.sub("", storage.label)
        return storage.category, family, storage.fqn, source.file, line

    def key_by_label(storage: LiveStorage, _moved: LineMap | None) -> Hashable:
        return storage.category, storage.label

    def key_by_size(storage: LiveStorage, _moved: LineMap | None) -> Hashable:
        return storage.category, storage.shape, storage.dtype, storage.nbytes

    keys: list[Callable[[LiveStorage, LineMap | None], Hashable]] = [key_by_label, key_by_size]
    if lines is not None:
        keys.insert(0, key_by_line)
    old, new, pairs = list(before), list(after), list[tuple[LiveStorage, LiveStorage]]()
    for find_key in keys:
        waiting: dict[Hashable, deque[LiveStorage]] = defaultdict(deque)
        unmatched = []
        for storage in old:
            waiting[find_key(storage, lines)].append(storage)
        for storage in new:
            key = find_key(storage, None)
            if key is not None and waiting.get(key):
                pairs.append((waiting[key].popleft(), storage))
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
    before: Sequence[LiveStorage], after: Sequence[LiveStorage]
) -> dict[str, tuple[int, int]]:
    """Compares modules at the deepest level at which a reader can take in those that differ.

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


def find_guilty_line(changes: Sequence[Change], lines: LineMap | None) -> SourceLocation | None:
    """Finds the line of the user's repository that accounts for most of the growth.

    A line that was edited comes first, if it grew by a tenth of all that grew: what follows it
    may grow more, as everything does that is computed in a wider dtype from there on.
    """
    growth = Counter[SourceLocation]()
    for change in changes:
        if change.source is not None and not os.path.isabs(change.source.file):
            growth[change.source] += change.growth_bytes
    grown = {source: nbytes for source, nbytes in growth.items() if nbytes > 0}
    edited = {
        source: nbytes
        for source, nbytes in grown.items()
        if lines is not None
        and source.line not in lines.get(source.file, {}).values()
        and nbytes >= _NOTABLE * sum(grown.values())
    }
    candidates = edited or grown
    return max(candidates, key=candidates.__getitem__, default=None)
