"""A figure that was measured on a GPU, and what could make it differ from the predicted one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.comparison.changes import Growth
from fxmem.graph import Category
from fxmem.memory.liveness import list_category_bytes
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.json_report import read_graph, read_record, refuse_damage
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Table
from fxmem.report.text import write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
_ALIKE = 0.01  # share of a figure by which two may differ and count as one
_MOST_LEFT = 0.5  # share of a difference that a cause may leave open
_MOST_CAUSES = 6
_MOVING = (Category.ACTIVATION, Category.TEMPORARY, Category.OUTPUT, Category.INPUT)
"""Categories whose sizes follow those of the inputs."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that could make a figure differ.

    Attributes:
        text: What would be so.
        expected_bytes: The figure that it would lead to.
    """

    text: str
    expected_bytes: int


@dataclass(frozen=True, slots=True)
class Measurement(Result):
    """A measured peak beside the predicted one.

    Attributes:
        setup: The step that was predicted.
        predicted_bytes: Its peak.
        measured_bytes: The figure that was measured.
        causes: Those that could make most of the difference, the one that leaves least open first.
    """

    setup: Setup
    predicted_bytes: int
    measured_bytes: int
    causes: tuple[Cause, ...]

    @property
    def difference_bytes(self) -> int:
        """How much more was measured; negative for less."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def is_alike(self) -> bool:
        """True if the two differ by 1 % at most."""
        return abs(self.difference_bytes) <= _ALIKE * self.predicted_bytes

    def list_blocks(self, top: int = _MOST_CAUSES) -> list[Block]:
        measured, predicted = map(format_bytes, (self.measured_bytes, self.predicted_bytes))
        share = 100 * self.difference_bytes / max(self.predicted_bytes, 1)
        more = Growth(self.difference_bytes)
        line = f"Measured {measured}, predicted {predicted}: {more} ({share:+.1f} %)"
        rows = [
            (
                Bytes(cause.expected_bytes),
                Growth(self.measured_bytes - cause.expected_bytes),
                cause.text,
            )
            for cause in self.causes[:top]
        ]
        table = Table(["would be", "leaves open", "if"], rows, right=["would be", "leaves open"])
        return [Heading(line, [write_subject(self.setup)]), table, Paragraph([self._advise()])]

    def _advise(self) -> str:
        if self.is_alike:
            return "The two are alike."
        known = "No known cause makes most of the difference. " if not self.causes else ""
        return (
            f"{known}A memory snapshot of the run tells what it is: fxmem diff snapshot.pickle"
            " report.json."
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "measured_bytes": self.measured_bytes,
            "predicted_bytes": self.predicted_bytes,
            "difference_bytes": self.difference_bytes,
            "causes": [asdict(cause) for cause in self.causes],
        }


def explain_measured(report: Mapping[str, Any], measured_bytes: int) -> Measurement:
    """Explains a measured peak by what could make it differ from a report's.

    Args:
        report: The values of a report (``Analysis.to_dict()``).
        measured_bytes: As ``torch.cuda.max_memory_allocated()`` returned.

    Raises:
        UsageError: The report is damaged.

    >>> from torch import nn
    >>> from fxmem import analyze
    >>> report = analyze(nn.Linear(1024, 1024), "8x1024", optimizer="adam").to_dict()
    >>> verdict = explain_measured(report, report["peak_bytes"] + report["parameter_bytes"])
    >>> verdict.causes[0].text
    'a second copy of the parameters is on the GPU: an average, a teacher, a state dict'
    """
    with refuse_damage():
        predicted_bytes: int = report["peak_bytes"]
        difference_bytes = abs(measured_bytes - predicted_bytes)
        causes = [*_list_causes(report, measured_bytes)]
        setup = read_record(Setup, report)
    if difference_bytes <= _ALIKE * predicted_bytes:
        causes = []
    left = {cause: abs(measured_bytes - cause.expected_bytes) for cause in causes}
    near = sorted(
        (cause for cause in causes if left[cause] <= _MOST_LEFT * difference_bytes),
        key=left.__getitem__,
    )
    return Measurement(setup, predicted_bytes, measured_bytes, tuple(near[:_MOST_CAUSES]))


def _list_causes(report: Mapping[str, Any], measured_bytes: int) -> Iterator[Cause]:
    """Lists causes, whether or not they come near."""
    peak_bytes, graph = report["peak_bytes"], read_graph(report)
    live_bytes = list_category_bytes(graph)
    parameters, states = report["parameter_bytes"], report["optimizer_state_bytes"]

    def find_peak(change: Callable[[int], float]) -> int:
        """Finds the peak of a step in which each operation finds so many bytes more alive."""
        total = [sum(each) for each in zip(*live_bytes.values(), strict=True)]
        return int(max(nbytes + change(at) for at, nbytes in enumerate(total)))

    if report["device"] == "cuda":
        least, most = report["process_bytes"]
        yield Cause("the figure is torch.cuda.max_memory_reserved()", report["reserved_bytes"])
        yield Cause(
            "the figure is nvidia-smi's, of the process", min(max(measured_bytes, least), most)
        )
    yield Cause("the figure is in GB (10^9 bytes), written as GiB", round(peak_bytes * 2**30 / 1e9))
    if report["library_peak_bytes"] > peak_bytes:
        yield Cause("cuDNN takes the workspaces that it may", report["library_peak_bytes"])
    if report["first_step"]:
        first_bytes = report["first_step"]["peak_bytes"]
        yield Cause("the first step alone was measured", first_bytes)
    if states:
        kept = live_bytes[Category.OPTIMIZER_STATE]
        text = "the optimizer keeps no state, or had not stepped"
        yield Cause(text, find_peak(lambda at: -kept[at]))
        yield Cause("the optimizer keeps twice the state", find_peak(lambda at: kept[at]))
    if gradients := report["gradient_bytes"]:
        there = live_bytes[Category.GRADIENT]
        largest = max(s.nbytes for s in graph.storages if s.category is Category.GRADIENT)
        text = "gradients are kept from step to step: zero_grad(set_to_none=False)"
        # One is added to what is kept when the next is made.
        yield Cause(
            text, find_peak(lambda at: max(gradients - there[at], 0) + min(there[at], largest))
        )
    if parameters:
        text = "a second copy of the parameters is on the GPU: an average, a teacher, a state dict"
        yield Cause(text, peak_bytes + parameters)
        yield Cause("parameters have a copy in half their precision", peak_bytes + parameters // 2)
        yield Cause("parameters have a copy in twice their precision", peak_bytes + 2 * parameters)
    outputs = [each for each in graph.storages if each.name == "output" and each.born >= 0]
    held_bytes = sum(each.nbytes for each in outputs)
    born = max((each.born for each in outputs), default=0)
    text = "the model's output is held until the next step's is there"
    yield Cause(text, find_peak(lambda at: held_bytes if at <= born else 0))
    moving = [sum(live_bytes[each][at] for each in _MOVING) for at in range(len(graph.operations))]
    text = "activations are half as large: batch, length or precision"
    yield Cause(text, find_peak(lambda at: -moving[at] / 2))
    text = "activations are twice as large: batch, length or precision"
    yield Cause(text, find_peak(lambda at: moving[at]))
    saved = live_bytes[Category.ACTIVATION]
    text = "activations are computed again: checkpoints"
    yield Cause(text, find_peak(lambda at: -saved[at]))
