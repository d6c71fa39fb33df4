"""The recorded steps of a script, as pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.analysis import Analysis, Shown
from fxmem.graph import SourceLocation


@dataclass(frozen=True, slots=True)
class Read:
    """A line of the script that read the values of fake tensors."""

    source: SourceLocation
    value: str  # the stand-in of its first read, as text
    decides: bool  # a truth value was asked for: a branch may hang on it
    library: SourceLocation | None = None  # the line of a library that read it for the script


@dataclass
class Progress:
    """How far a script is, for those who ask while it runs."""

    describe: Callable[[], str] = str


@dataclass(frozen=True)
class ScriptRun(Shown):
    """The steps of a script, as they were recorded.

    Attributes:
        steps: The analysis of each step, in order; what ran after the last step comes last.
        reads: The lines that read values of tensors, and got stand-ins.
        notes: On how the script was run, a sentence each.
        partial: Whether the script was interrupted before all steps asked for were recorded.
    """

    steps: tuple[Analysis, ...]
    reads: tuple[Read, ...]
    notes: tuple[str, ...]
    partial: bool = False

    def __repr__(self) -> str:
        peaks = [step.peak_bytes for step in self.steps]
        return f"ScriptRun(peak_bytes={peaks}, reads=<{len(self.reads)}>)"

    @property
    def largest(self) -> Analysis:
        """The step with the highest peak; the first of equal ones."""
        return max(self.steps, key=lambda step: step.peak_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Everything of the largest step, as :meth:`Analysis.to_dict` has it, and what is new here.

        ``script`` has the peak of each step, the lines that read values, the notes, and whether
        the script was interrupted.
        """
        steps = [
            {
                "name": ", ".join(step.setup.inputs),
                "peak_bytes": step.peak_bytes,
                "reserved_bytes": step.reserved_bytes,
                "phase": step.peak.phase.value,
                "node": step.peak.node.name if step.peak.node else None,
                "source": asdict(step.peak.source) if step.peak.source else None,
            }
            for step in self.steps
        ]
        reads = [asdict(read) for read in self.reads]
        script = {"steps": steps, "reads": reads, "notes": list(self.notes)}
        script["partial"] = self.partial
        return {**self.largest.to_dict(), "script": script}
