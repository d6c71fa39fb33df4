"""The recorded steps of a script, as pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.analysis import Analysis
from fxmem.graph import SourceLocation
from fxmem.report.blocks import Block, Paragraph
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Table
from fxmem.report.text import write_peak_place

_PARTIAL = "The script was interrupted: these are the steps that it had ended."
_ALIKE = 0.01  # share of the peak by which steps may differ and count as one


@dataclass(frozen=True, slots=True)
class Read:
    """A line of the script that read the values of fake tensors."""

    source: SourceLocation
    value: str  # the stand-in of its first read, as text
    decides: bool  # a truth value was asked for: a branch may hang on it
    library: SourceLocation | None = None  # the line of a library that read it for the script


@dataclass
class Progress:
    """The progress of a script, to be read while it runs."""

    describe: Callable[[], str] = str


@dataclass(frozen=True)
class ScriptRun(Result):
    """The steps of a script, as they were recorded.

    Attributes:
        steps: The analysis of each step, in order; what ran after the last step comes last.
        reads: The lines that read values of tensors, and got stand-ins.
        notes: On how the script was run, a sentence each.
        partial: Whether the script was interrupted before all steps asked for were recorded.
        loading: The analysis of what ran before an optimizer was made; None for nothing.
    """

    steps: tuple[Analysis, ...]
    reads: tuple[Read, ...]
    notes: tuple[str, ...]
    partial: bool = False
    loading: Analysis | None = None

    def __repr__(self) -> str:
        peaks = [step.peak_bytes for step in self.steps]
        return f"ScriptRun(peak_bytes={peaks}, reads=<{len(self.reads)}>)"

    @property
    def largest(self) -> Analysis:
        """The step with the highest peak, or loading; the first of equal ones."""
        return max(self._list_windows(), key=lambda window: window.peak_bytes)

    def _list_windows(self) -> list[Analysis]:
        return [*filter(None, (self.loading,)), *self.steps]

    def list_blocks(self, top: int = 10) -> list[Block]:
        """Lists the report on the largest step, a row for each, and the report on the first.

        The first step is left out where its peak is that of the largest, or within 1 % of it.
        """
        largest, first = self.largest, self.steps[0]
        windows = self._list_windows()
        sizes = [(Bytes(each.peak_bytes), Bytes(each.reserved_bytes)) for each in windows]
        rows = [
            (each.setup.window, *figures, write_peak_place(each.peak))
            for each, figures in zip(windows, sizes, strict=True)
        ]
        reads = [
            (
                " in ".join(map(str, filter(None, (read.source, read.library)))),
                read.value,
                "a branch may hang on it" if read.decides else "",
            )
            for read in self.reads
        ]
        differs = abs(first.peak_bytes - largest.peak_bytes) > _ALIKE * largest.peak_bytes
        headers = ["recorded", "peak", "reserved", "in"]
        return [
            *largest.list_blocks(top),
            Table(headers, rows, right=["peak", "reserved"], names=["in"]),
            Table(["values read at", "taken as", ""], reads),
            Paragraph([*self.notes, *[_PARTIAL] * self.partial]),
            *(first.list_blocks(top) if differs else ()),
        ]

    def list_bars(self) -> Mapping[str, int | None]:
        return {each.setup.window: each.peak_bytes for each in self._list_windows()}

    @property
    def pictured(self) -> Analysis:
        """The largest step."""
        return self.largest

    def draw_pictures(self) -> Iterator[tuple[str, bytes]]:
        return self.largest.draw_pictures()

    def to_dict(self) -> dict[str, Any]:
        """Everything of the largest step, as :meth:`Analysis.to_dict` has it, and what is new here.

        ``script`` has the peak of each step and of loading, the lines that read values, the notes,
        and whether the script was interrupted.
        """
        script: dict[str, Any] = {"steps": [_summarize(step) for step in self.steps]}
        if self.loading is not None:
            script["loading"] = _summarize(self.loading)
        script |= {"reads": [asdict(read) for read in self.reads], "notes": list(self.notes)}
        script["partial"] = self.partial
        return {**self.largest.to_dict(), "script": script}


def _summarize(window: Analysis) -> dict[str, Any]:
    peak = window.peak
    return {
        "name": window.setup.window,
        "peak_bytes": window.peak_bytes,
        "reserved_bytes": window.reserved_bytes,
        "phase": peak.phase.value,
        "node": peak.node.name if peak.node else None,
        "source": asdict(peak.source) if peak.source else None,
    }
