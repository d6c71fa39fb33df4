"""The comparison of two steps: their totals, and what grew at the peak."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fxmem.comparison.changes import (
    SIZES,
    Change,
    Footprint,
    Growth,
    compare_modules,
    find_guilty_line,
    list_changes,
    list_sizes,
    match_storages,
    read_footprint,
)
from fxmem.errors import UsageError
from fxmem.graph import SourceLocation
from fxmem.report.blocks import Block, Heading
from fxmem.report.result import Result
from fxmem.report.tables import Table
from fxmem.report.text import write_place, write_subject
from fxmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """Two steps, before and after a change.

    Attributes:
        before: The peak before.
        after: The peak after.
        changes: Storages at the peak that differ: the ones that grew, the largest growth first,
            then the ones that shrank.
        modules: Bytes before and after of modules that differ, by fqn, at the deepest level of
            which at most ten do.
        guilty: The line of the user's repository that accounts for most of the growth; None where
            nothing grew, or no line is known.
        names: The names of the two, such as revisions.
    """

    before: Footprint
    after: Footprint
    changes: tuple[Change, ...]
    modules: Mapping[str, tuple[int, int]]
    guilty: SourceLocation | None
    names: tuple[str, str] = ("before", "after")

    @property
    def growth_bytes(self) -> int:
        """The growth of the peak; negative where it is lower."""
        return self.after.peak_bytes - self.before.peak_bytes

    def describe(self) -> str:
        """Writes the peaks and the line that grew in a sentence."""
        before, after = self.before.peak_bytes, self.after.peak_bytes
        if not self.growth_bytes:
            return f"Peak unchanged: {format_bytes(after)}"
        share = f" ({100 * self.growth_bytes / before:+.1f} %)" if before else ""
        growth = Growth(self.growth_bytes)
        text = f"Peak {format_bytes(before)} -> {format_bytes(after)}: {growth}{share}"
        return f"{text}, most at {self.guilty}" if self.guilty and self.growth_bytes > 0 else text

    def to_dict(self) -> dict[str, Any]:
        """Everything but the storages that did not change, as plain data."""
        values: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "growth_bytes": self.growth_bytes,
            "guilty": self.guilty and asdict(self.guilty),
        }
        sides = {"before": self.before, "after": self.after}
        for key, name in zip(sides, self.names, strict=True):
            peak = asdict(sides[key].headline)
            reserved, breakdown = sides[key].reserved_bytes, dict(sides[key].breakdown)
            values[key] = {"name": name, **peak, "reserved_bytes": reserved, "breakdown": breakdown}
        values["modules"] = self.modules
        values["changes"] = [{**asdict(c), "growth_bytes": c.growth_bytes} for c in self.changes]
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    def _write_subjects(self) -> Iterator[str]:
        sides = (self.before, self.after)
        subjects = [write_subject(side.setup) for side in sides]
        if subjects[0] == subjects[1]:
            yield subjects[0]
        for name, subject, side in zip(self.names, subjects, sides, strict=True):
            where = side.headline
            at = f"peak in {write_place(where.phase, where.node, where.source)}"
            yield f"{name}: {at if subjects[0] == subjects[1] else f'{subject}; {at}'}"

    def list_blocks(self, top: int = 10) -> list[Block]:
        """Lists the report, with :meth:`describe` as its heading, and so many rows of a table."""
        before, after = self.before, self.after
        totals = [("peak", before.peak_bytes, after.peak_bytes)]
        if after.setup.device != "cpu":
            totals.append(("reserved", before.reserved_bytes, after.reserved_bytes))
        totals += [
            (category.value, before.breakdown.get(category, 0), nbytes)
            for category, nbytes in after.breakdown.items()
        ]
        sizes = [(name, *list_sizes(a, b)) for name, a, b in totals if a or b]
        modules = [(fqn or "(none)", *list_sizes(*pair)) for fqn, pair in self.modules.items()]
        more = f"... and {len(modules) - top} more" if len(modules) > top else ""
        return [
            Heading(self.describe(), [*self._write_subjects()]),
            Table(["at the peak", *SIZES], sizes, SIZES),
            Table(["module", *SIZES], modules[:top], SIZES, ["module"], rest=more),
            list_changes(self.changes, top),
        ]


def compare(
    before: Footprint, after: Footprint, *, names: tuple[str, str] = ("before", "after")
) -> Comparison:
    """Compares the peaks of two steps.

    Args:
        before: One step.
        after: The other.
        names: Names for the two.
    """
    changes = match_storages(before.live, after.live)
    modules, guilty = compare_modules(before.live, after.live), find_guilty_line(changes)
    return Comparison(before, after, changes, modules, guilty, names)


def diff(before: Analysis, after: Analysis) -> Comparison:
    """Compares two analyses: their totals, and what grew at the peak.

    Args:
        before: Of the step before a change.
        after: Of the step after it.

    Returns:
        The growth of the peak, and the storages, modules and the line that account for it;
        ``print`` of it writes a report.

    >>> from torch import nn
    >>> from fxmem import analyze
    >>> before, after = (analyze(nn.Linear(64, n), "8x64", device="cpu") for n in (16, 32))
    >>> comparison = diff(before, after)
    >>> comparison.growth_bytes == after.peak_bytes - before.peak_bytes
    True
    """
    root = os.getcwd()
    return compare(read_footprint(before.to_dict(), root), read_footprint(after.to_dict(), root))


def measure_allowance(text: str, before_bytes: int) -> int:
    """Returns the bytes that a limit on growth allows: a share of the peak before, or a size.

    >>> measure_allowance("2%", 1000), measure_allowance("1MiB", 1000)
    (20, 1048576)
    """
    share = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", text)
    if share:
        return int(before_bytes * float(share[1]) / 100)
    if not re.search("[A-Za-z]", text) and text.strip() != "0":
        hint = f"{text.strip()}% or {text.strip()}MiB?"
        raise UsageError(f"the limit {text!r} on growth has no unit", hint=hint)
    return parse_bytes(text)
