"""Peaks of two reports, storages matched with each other, what grew, and tables of both."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from fxmem.graph import Category, SourceLocation, is_installed
from fxmem.report.document import Headline, LiveRow
from fxmem.report.json_report import read_record, refuse_damage
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_shape, write_source
from fxmem.setup import Setup
from fxmem.units import format_bytes

_MOST_MODULES = 10
_TENSOR = ("category", "storage at the peak", "shape", "dtype", "source")
_NAMES, _OPTIONAL = ("storage at the peak", "source"), ("dtype", "shape")
SIZES = ("before", "after", "change")
_OWNER_DEPTH = {"PARAMETER": 1, "BUFFER": 1, "GRADIENT": 2, "OPTIMIZER_STATE": 2}
"""Names after that of the module: ``fc.weight``, ``fc.weight.grad``, ``fc.weight.exp_avg``."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The peak of a step: how much, where, and what is alive there, in order of allocation."""

    setup: Setup
    headline: Headline
    reserved_bytes: int
    breakdown: Mapping[Category, int]  # bytes by category; sums to the peak
    live: tuple[LiveRow, ...]  # sums to the peak too
    misfit: str = ""  # why the step does not fit its GPU

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at any moment."""
        return self.headline.peak_bytes


def read_footprint(report: Mapping[str, Any], root: str = "") -> Footprint:
    """Reads the peak from the values of a report (``Analysis.to_dict()``).

    Args:
        report: The report; its ``operations``, ``saved`` and ``timeline`` may be missing.
        root: A folder, below which files are named relative to it.

    Raises:
        UsageError: The report is damaged.
    """

    def place(source: Mapping[str, Any] | None) -> SourceLocation | None:
        if source is None:
            return None
        found = SourceLocation(**source)
        if root and found.file.startswith(f"{root}{os.sep}") and not is_installed(found.file):
            return replace(found, file=os.path.relpath(found.file, root))
        return found

    with refuse_damage():
        peak, nodes, live = report["peak"], report["nodes"], []
        modules: dict[str, SourceLocation | None] = {}
        for node in nodes:
            if node["source"]:
                modules.setdefault(node["fqn"], place(node["source"]))
        for index in sorted(peak["live"]):
            storage = report["storages"][index]
            depth, name = _OWNER_DEPTH.get(storage["category"], 0), storage["name"]
            fqn = ".".join(name.split(".")[:-depth]) if depth else ""
            node = None if storage["node"] is None else nodes[storage["node"]]
            found = modules.get(fqn) if node is None and fqn else None
            live.append(
                LiveRow(
                    storage["nbytes"],
                    Category(storage["category"]),
                    storage["label"],
                    tuple(storage["shape"]),
                    storage["dtype"],
                    found if node is None else place(node["source"]),
                    fqn=fqn if node is None else node["fqn"],
                )
            )
        if peak["workspace_bytes"]:
            running = {node["name"]: node for node in nodes}.get(peak["node"])
            label = peak["operation"].removesuffix(".default")
            workspace = (peak["workspace_bytes"], Category.WORKSPACE, label)
            fqn = running["fqn"] if running else ""
            live.append(LiveRow(*workspace, None, "", place(peak["source"]), fqn=fqn))
        setup, lack, misfit = read_record(Setup, report), report["exhaustion"], ""
        if lack is not None and setup.compile != "left out":
            verb = "does" if lack["is_certain"] else "may"
            misfit = f"{verb} not fit {setup.gpu}: {lack['cause']}"
        where = read_record(Headline, {**peak, "peak_bytes": report["peak_bytes"]})
        return Footprint(
            setup,
            replace(where, source=place(peak["source"]), optimizer=setup.optimizer),
            report["reserved_bytes"],
            {Category(name): nbytes for name, nbytes in report["breakdown"].items()},
            tuple(live),
            misfit,
        )


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
        """Its growth; negative where it shrank."""
        return self.after_bytes - self.before_bytes


def match_storages(before: Sequence[LiveRow], after: Sequence[LiveRow]) -> tuple[Change, ...]:
    """Matches the storages of two peaks, and lists the differing ones, growth first.

    Storages match by label and category. The rest match by category, shape, dtype and size, for a
    module may have been renamed.
    """
    keys = (attrgetter("category", "label"), attrgetter("category", "shape", "dtype", "nbytes"))
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


def list_storages(peak: Footprint, top: int, title: str = "") -> Table:
    """Lists the largest storages alive at a peak, equal ones in one row."""
    groups = _group(peak.live)
    groups.sort(key=lambda group: -sum(storage.nbytes for storage in group))
    rows: list[Sequence[Cell]] = [
        (Bytes(sum(s.nbytes for s in g)), *_describe(g)) for g in groups[:top]
    ]
    rest = [storage for group in groups[top:] for storage in group]
    more = f"... and {len(rest)} more, {format_bytes(sum(s.nbytes for s in rest))}"
    headers, left = ["bytes", *_TENSOR], more if rest else ""
    return Table(headers, rows, ["bytes"], _NAMES, _OPTIONAL, rest=left, title=title)


def list_changes(changes: Sequence[Change], top: int) -> Table:
    """Lists storages at the peak that differ, equal ones in one row.

    The ones that grew come first, unless more shrank.
    """
    groups = _group(changes)
    sign = -1 if sum(change.growth_bytes for change in changes) < 0 else 1
    groups.sort(key=lambda group: -sign * sum(change.growth_bytes for change in group))
    rows = []
    for group in groups[:top]:
        before, after = (sum(c.before_bytes for c in group), sum(c.after_bytes for c in group))
        rows.append((*list_sizes(before, after), *_describe(group)))
    rest = [change for group in groups[top:] for change in group]
    more = f"... and {len(rest)} more, {Growth(sum(c.growth_bytes for c in rest))}"
    headers, left = [*SIZES, *_TENSOR], more if rest else ""
    return Table(headers, rows, SIZES, _NAMES, _OPTIONAL, rest=left)


_Storage = TypeVar("_Storage", LiveRow, Change)


def _group(storages: Iterable[_Storage]) -> list[list[_Storage]]:
    """Groups storages that differ in their modules alone, as in blocks that repeat."""
    groups: dict[object, list[_Storage]] = {}
    for each in storages:
        grows = isinstance(each, Change) and each.growth_bytes > 0
        key = each.category, each.shape, each.dtype, each.source, grows
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _describe(group: Sequence[LiveRow | Change]) -> tuple[str, ...]:
    of = group[0]
    label = f"{of.label} and {len(group) - 1} alike" if len(group) > 1 else of.label
    tensor = (of.category.value, label, write_shape(of.shape), of.dtype)
    return *tensor, write_source(of.source)


class Growth(Bytes):
    """A change of a size, shown with its sign."""

    def __str__(self) -> str:
        return f"{'+' if self > 0 else ''}{format_bytes(self)}"


def list_sizes(before: int, after: int) -> tuple[Cell, Cell, Cell]:
    """Lists a size before and after a change, and the change."""
    return Bytes(before), Bytes(after), Growth(after - before) if after != before else "-"
