"""A memory snapshot of a GPU, aligned with the predicted step, and how the two differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxmem.comparison.changes import Growth
from fxmem.graph import Phase, SourceLocation
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Table
from fxmem.report.text import write_place, write_source, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
LEAST_SHARE = 0.5  # of a step's bytes, in a trace of it


@dataclass(frozen=True, slots=True)
class Predicted:
    """A block of the predicted step.

    Attributes:
        nbytes: Its size.
        start: The event of the timeline that allocates it; -1 for one that was there.
        stop: The event that frees it; None for none.
        label: Its name, or the operator whose scratch memory it is.
        phase: The phase in which it is allocated.
        source: The line of the node that does.
    """

    nbytes: int
    start: int
    stop: int | None
    label: str
    phase: Phase
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Blocks of one size and line that are not as predicted.

    Attributes:
        kind: ``"leak"``, ``"held"``, ``"short"``, ``"new"``, ``"before"`` or ``"missing"``.
        nbytes: What they take together; negative where they are missing.
        count: How many there are.
        label: What they are in the prediction; empty for unknown.
        source: The line that made them, as the trace has it, else as the prediction has it.
    """

    kind: str
    nbytes: int
    count: int
    label: str
    source: SourceLocation | None

    @property
    def text(self) -> str:
        """The difference in words."""
        return TEXTS[self.kind]


TEXTS = {
    "leak": "made in one step after the other, never freed",
    "held": "still alive, predicted to be freed before",
    "short": "there for a moment, not predicted: a kernel's or a library's",
    "new": "alive, not predicted",
    "before": "alive since before the step, not predicted",
    "missing": "predicted, not alive",
}


@dataclass(frozen=True, slots=True)
class Alignment(Result):
    """A snapshot beside a predicted step.

    Attributes:
        setup: The predicted step.
        names: Of the report and of the snapshot.
        predicted_bytes: The predicted peak, of sizes as asked for, like all sizes here.
        measured_bytes: The peak of the snapshot.
        predicted_slack_bytes: What the allocator was predicted to hold beyond its peak.
        measured_slack_bytes: What it held.
        share: Of the step's bytes those that are in the trace in the same order.
        place: The predicted allocation at which the snapshot has its peak; None for unknown.
        differences: Blocks that are alive there and were not predicted, or the other way round,
            the largest first; empty where too little of the step is in the trace to tell.
    """

    setup: Setup
    names: tuple[str, str]
    predicted_bytes: int
    measured_bytes: int
    predicted_slack_bytes: int
    measured_slack_bytes: int
    share: float
    place: Predicted | None
    differences: tuple[Difference, ...]

    def list_blocks(self, top: int = 10) -> list[Block]:
        measured, predicted = map(format_bytes, (self.measured_bytes, self.predicted_bytes))
        more = self.measured_bytes - self.predicted_bytes
        share = 100 * more / max(self.predicted_bytes, 1)
        line = f"Measured {measured}, predicted {predicted}: {Growth(more)} ({share:+.1f} %)"
        lines = [write_subject(self.setup), f"{self.names[1]}: {self._describe_share()}"]
        if self.place is not None:
            where = write_place(self.place.phase, self.place.label, self.place.source)
            lines.append(f"{self.names[1]}: peak in {where}")
        rows = [
            (Growth(each.nbytes), each.count, each.text, each.label, write_source(each.source))
            for each in self.differences[:top]
        ]
        rest = self.differences[top:]
        left = f"... and {len(rest)} more, {Growth(sum(each.nbytes for each in rest))}"
        sizes = [
            ("peak", Bytes(self.predicted_bytes), Bytes(self.measured_bytes)),
            ("held beyond it", Bytes(self.predicted_slack_bytes), Bytes(self.measured_slack_bytes)),
        ]
        return [
            Heading(line, lines),
            Table(["allocator", "predicted", "measured"], sizes, ["predicted", "measured"]),
            Table(
                ["bytes", "blocks", "at the measured peak", "of", "source"],
                rows,
                right=["bytes", "blocks"],
                names=["of", "source"],
                rest=left if rest else "",
            ),
            Paragraph([] if self.share >= LEAST_SHARE else [_UNLIKE]),
        ]

    def _describe_share(self) -> str:
        return f"{100 * self.share:.0f} % of the step's bytes are allocated in the predicted order"

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["setup"]
        return {"schema_version": SCHEMA_VERSION, **values}


_UNLIKE = (
    "The trace is not of the predicted step, or of inputs of another size: differences are told of"
    " steps that are alike."
)
