"""Peaks of a compiled step by the share of its activations that the compiler may keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_again
from fxmem.errors import UsageError
from fxmem.planning.prepared_step import price_change
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_share, write_subject
from fxmem.setup import Setup
from fxmem.training.options import resolve_compilation
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
_COLUMNS = ("activation_memory_budget", "peak", "of the step's", "saved for backward")
_COSTS = ("added time", "added FLOPs")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A compiled step under one ``torch._functorch.config.activation_memory_budget``.

    Attributes:
        activation_memory_budget: The share, from 0 to 1.
        peak_bytes: The peak of the step.
        saved_bytes: Kept for backward, without parameters and inputs.
        overhead: Added time by the roofline of the device, as a share of the step's at budget 1.
        overhead_flops: Added FLOPs, as a share.
    """

    activation_memory_budget: float
    peak_bytes: int
    saved_bytes: int
    overhead: float
    overhead_flops: float


@dataclass(frozen=True, slots=True)
class MemoryBudgets(Result):
    """A compiled step under several budgets, the largest first.

    Attributes:
        points: One for each budget, the first for 1.
        setup: Of the step.
    """

    points: tuple[MemoryBudget, ...]
    setup: Setup

    def list_blocks(self) -> list[Block]:
        whole_bytes = self.points[0].peak_bytes
        rows: list[Sequence[Cell]] = [
            (
                f"{point.activation_memory_budget:g}",
                Bytes(point.peak_bytes),
                write_share(point.peak_bytes / (whole_bytes or 1)),
                Bytes(point.saved_bytes),
                write_share(point.overhead),
                write_share(point.overhead_flops),
            )
            for point in self.points
        ]
        least = format_bytes(min(point.peak_bytes for point in self.points))
        headline = f"Peak {format_bytes(whole_bytes)} compiled, with recomputation down to {least}"
        advice = "Choose a row by torch._functorch.config.activation_memory_budget = SHARE."
        return [
            Heading(headline, [write_subject(self.setup)]),
            Table([*_COLUMNS, *_COSTS], rows, right=(*_COLUMNS, *_COSTS)),
            Paragraph([*self.setup.notes]),
            Paragraph([advice]),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.setup.model,
            "inputs": [*self.setup.inputs],
            "gpu": self.setup.gpu,
            "points": [asdict(point) for point in self.points],
        }


def memory_budgets(analysis: Analysis, budgets: Sequence[float] = BUDGETS) -> MemoryBudgets:
    """Compiles an analysed step under several activation memory budgets.

    PyTorch's partitioner decides what is saved for backward (``choose_saved_values_set`` in
    ``torch/_functorch/partitioners.py``).

    Args:
        analysis: Of a step that is compiled.
        budgets: Shares of the activations that the compiler keeps by default, from 0 to 1; 1 is
            compiled too, for the others to be compared with.

    Raises:
        UsageError: The step is not compiled, or a budget is not such a share.
    """
    if analysis.setup.compile != "compiled":
        raise UsageError("activation memory budgets are for compiled code", hint="compile=True")
    if analysis.setup.mode != "train":
        raise UsageError("inference keeps no activations", hint="mode='train'")
    whole, points = _record(analysis, 1.0), list[MemoryBudget]()
    for budget in sorted({1.0, *budgets}, reverse=True):
        step = whole if budget == 1 else _record(analysis, budget)
        overheads = price_change(whole, step)
        points.append(MemoryBudget(budget, step.peak_bytes, step.saved_bytes, *overheads))
    return MemoryBudgets(tuple(points), analysis.setup)


def _record(analysis: Analysis, budget: float) -> Analysis:
    compilation = analysis.blueprint.options.compilation
    assert compilation is not None
    return analyze_again(analysis, compilation=resolve_compilation(compilation.model, budget))
