"""The recorded steps of a script, as pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.analysis import Analysis
from fxmem.graph import Phase, SourceLocation
from fxmem.memory.succession import Fragmentation
from fxmem.report.blocks import Block, Paragraph
from fxmem.report.fragmentation import list_fragmentation
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Table
from fxmem.report.text import write_peak_place

_PARTIAL = "The script did not run to its last step: these are the steps that it had ended."
ALL_ELEMENTS = "as many as there are elements"
"""Stands for what masks and ``nonzero`` find."""
_ALIKE = 0.01  # share of the peak by which steps may differ and count as one
APART = (Phase.LOADING, Phase.EVALUATION, Phase.GENERATION, Phase.SAVING)
"""Phases of a script that are no part of its steps."""


def find_apart(window: Analysis) -> Phase | None:
    """Finds the phase of a window that is apart from the steps; None for a step."""
    phase = window.graph.operations[0].phase
    return phase if phase in APART else None


@dataclass(frozen=True, slots=True)
class Read:
    """A line of the script that read the values of fake tensors."""

    source: SourceLocation
    value: str  # the stand-in of its first read, as text
    decides: bool  # a truth value was asked for: a branch may hang on it
    library: SourceLocation | None = None  # the line of a library that read it for the script


@dataclass
class Progress:
    """The progress of a script, to be read while it runs, and where it fails."""

    describe: Callable[[], str] = str
    recorded: ScriptRun | None = None  # of a script that fails after a step


@dataclass(frozen=True)
class ScriptRun(Result):
    """The steps of a script, as they were recorded.

    Attributes:
        windows: The analyses of the steps and of what ran apart from them, in order.
        reads: The lines that read values of tensors, and got stand-ins.
        notes: On how the script was run, a sentence each.
        partial: Whether the script was interrupted, or failed, before all steps asked for were
            recorded.
        fragmentation: What is reserved for the first batches of the loader, in its order, with the
            settings of the allocator and with others; nothing unless they were read.
    """

    windows: tuple[Analysis, ...]
    reads: tuple[Read, ...]
    notes: tuple[str, ...]
    partial: bool = False
    fragmentation: tuple[Fragmentation, ...] = ()

    @property
    def steps(self) -> tuple[Analysis, ...]:
        """The analysis of each step, in order; what ran after the last step comes last.

        Of a script without a step, what ran.
        """
        steps = tuple(window for window in self.windows if find_apart(window) is None)
        return steps or self.windows

    def find_largest(self, phase: Phase) -> Analysis | None:
        """Finds the largest window of a phase that is no part of the steps; None for none."""
        found = [window for window in self.windows if find_apart(window) is phase]
        return max(found, key=lambda window: window.peak_bytes, default=None)

    @property
    def loading(self) -> Analysis | None:
        """The analysis of what ran before a model or an optimizer did; None for nothing."""
        return self.find_largest(Phase.LOADING)

    @property
    def evaluation(self) -> Analysis | None:
        """The analysis of the evaluation with the highest peak; None for none."""
        return self.find_largest(Phase.EVALUATION)

    @property
    def generation(self) -> Analysis | None:
        """The analysis of the calls of ``generate`` with the highest peak; None for none."""
        return self.find_largest(Phase.GENERATION)

    @property
    def saving(self) -> Analysis | None:
        """The analysis of the saved checkpoint with the highest peak; None for none."""
        return self.find_largest(Phase.SAVING)

    def __repr__(self) -> str:
        peaks = [step.peak_bytes for step in self.steps]
        return f"ScriptRun(peak_bytes={peaks}, reads=<{len(self.reads)}>)"

    @property
    def largest(self) -> Analysis:
        """The window with the highest peak; the first of equal ones."""
        return max(self.windows, key=lambda window: window.peak_bytes)

    def _list_rows(self) -> list[Analysis]:
        """Lists the steps, and of each phase apart from them the largest window."""
        apart = {id(self.find_largest(phase)) for phase in APART}
        return [each for each in self.windows if find_apart(each) is None or id(each) in apart]

    def list_blocks(self, top: int = 10) -> list[Block]:
        """Lists the report on the largest window, a row for each, and the report on the first.

        The first step is left out where its peak is that of the largest, or within 1 % of it, and
        where its batch was chosen.
        """
        largest, first = self.largest, self.steps[0]
        first = first if find_apart(first) is None else largest
        windows = self._list_rows()
        sizes = [(Bytes(each.peak_bytes), Bytes(each.reserved_bytes)) for each in windows]
        rows = [
            (each.setup.window, *figures, write_peak_place(each.peak))
            for each, figures in zip(windows, sizes, strict=True)
        ]
        reads = [
            (
                " in ".join(map(str, filter(None, (read.source, read.library)))),
                read.value,
                "a branch may hang on it" if read.decides else _suggest_size(read),
            )
            for read in self.reads
        ]
        # Steps whose batches were chosen differ by these.
        is_chosen = ", batch " in first.setup.window
        differs = abs(first.peak_bytes - largest.peak_bytes) > _ALIKE * largest.peak_bytes
        headers = ["recorded", "peak", "reserved", "in"]
        return [
            *largest.list_blocks(top),
            Table(headers, rows, right=["peak", "reserved"], names=["in"]),
            *self._list_fragmentation(),
            Table(["values read at", "taken as", ""], reads),
            Paragraph([*self.notes, *[_PARTIAL] * self.partial]),
            *(first.list_blocks(top) if differs and not is_chosen else ()),
        ]

    def _list_fragmentation(self) -> list[Block]:
        count = max((each.steps for each in self.fragmentation), default=0)
        return list_fragmentation(self.fragmentation, f"After {count:,} of the loader's batches:")

    def list_bars(self) -> Mapping[str, int | None]:
        return {each.setup.window: each.peak_bytes for each in self._list_rows()}

    @property
    def pictured(self) -> Analysis:
        """The largest window."""
        return self.largest

    def draw_pictures(self) -> Iterator[tuple[str, bytes]]:
        return self.largest.draw_pictures()

    def to_dict(self) -> dict[str, Any]:
        """Everything of the largest window, as :meth:`Analysis.to_dict` has it, and ``script``.

        That has the peaks of steps, loading, evaluation, generation and saving, the lines that read
        values, the notes, and whether the script was interrupted.
        """
        script: dict[str, Any] = {"steps": [_summarize(step) for step in self.steps]}
        for phase in APART:
            if (window := self.find_largest(phase)) is not None:
                script[phase.value] = _summarize(window)
        script |= {"reads": [asdict(read) for read in self.reads], "notes": list(self.notes)}
        script["partial"] = self.partial
        script["fragmentation"] = [asdict(each) for each in self.fragmentation]
        return {**self.largest.to_dict(), "script": script}


def _suggest_size(read: Read) -> str:
    return f"--size-hint {read.library or read.source}=N" if read.value == ALL_ELEMENTS else ""


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
