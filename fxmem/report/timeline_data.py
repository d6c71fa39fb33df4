"""What a plot of a timeline draws, before it is drawn: moments, phases, lines over the areas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from fxmem.analysis import Analysis
from fxmem.graph import Operation, Phase
from fxmem.planning.plan import Plan

COLUMNS = 200
"""How many moments are drawn at most; of those between, the one with the most bytes."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What is drawn over the areas: the peak, and the step with the plan.

    Attributes:
        peak: Where on the axis the peak is.
        level: The peak with the plan; None without one.
        xs: Where on the axis the line of the step with the plan goes.
        ys: How high it is there.
    """

    peak: float
    level: float | None = None
    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()

    def split(
        self, across: tuple[float, float], heights: tuple[float, float]
    ) -> Iterator[tuple[float, float]]:
        """The free heights of a window of the plot, over and under the lines.

        Args:
            across: Where the window begins and ends.
            heights: From where to where there is room in it without the lines.

        >>> [*Lines(peak=9, level=4, xs=(1, 2), ys=(2, 3)).split((0, 5), (0, 8))]
        [(0, 2), (3, 4), (4, 8)]
        >>> [*Lines(peak=3).split((0, 5), (0, 8))]
        []
        """
        (start, stop), (low, high) = across, heights
        if start <= self.peak <= stop:
            return
        bars = [(self.level, self.level)] if self.level is not None else []
        inside = [y for x, y in zip(self.xs, self.ys, strict=True) if start <= x <= stop]
        if inside:
            bars.append((min(inside), max(inside)))
        for bottom, top in sorted(bars):
            yield low, min(high, bottom)
            low = max(low, top)
        yield low, high


def find_lines(analysis: Analysis, plan: Plan | None, planned: Analysis | None, unit: int) -> Lines:
    """The lines of a plot.

    Args:
        analysis: Of the step.
        plan: A plan of it, or None.
        planned: The step with the plan; None where that is not known.
        unit: The bytes that are 1 on the axis.
    """
    peak = analysis.peak.step + 0.5
    if plan is None or planned is None:
        return Lines(peak, None if plan is None else plan.peak_bytes / unit)
    positions = fit_phases(planned.graph.operations, analysis.graph.operations)
    live = planned.profile.live_bytes
    moments = choose_moments(live, COLUMNS)
    return Lines(
        peak,
        plan.peak_bytes / unit,
        tuple(positions[moment] for moment in moments),
        tuple(live[moment] / unit for moment in moments),
    )


def choose_moments(live_bytes: Sequence[int], columns: int) -> tuple[int, ...]:
    """Operations that stand for all: of each of some runs of them, that with the most bytes.

    Args:
        live_bytes: Of each operation.
        columns: How many runs there are at most.

    >>> choose_moments((1, 5, 2, 2), 2), choose_moments((1, 2), 4)
    ((1, 2), (0, 1))
    """
    steps = len(live_bytes)
    columns = min(columns, steps)
    edges = [column * steps // columns for column in range(columns + 1)]
    return tuple(
        max(range(start, stop), key=live_bytes.__getitem__) for start, stop in pairwise(edges)
    )


def fit_phases(operations: Sequence[Operation], others: Sequence[Operation]) -> tuple[float, ...]:
    """Where operations lie on the axis of others, so that each phase begins where theirs does.

    Args:
        operations: Of a step.
        others: Of the same step with more or fewer operations in its phases.

    >>> from fxmem.graph import Operation, Phase
    >>> step = [Operation(0, "a", Phase.FORWARD), Operation(1, "b", Phase.BACKWARD)]
    >>> fit_phases([*step, Operation(2, "c", Phase.BACKWARD)], step)
    (0.5, 1.25, 1.75)
    """
    wanted = dict(list_runs(others))
    positions: list[float] = []
    for key, run in list_runs(operations):
        there = wanted.get(key, [])
        start = there[0].index if there else positions[-1] if positions else 0.0
        positions += [start + len(there) * (at + 0.5) / len(run) for at in range(len(run))]
    return tuple(positions)


def list_runs(
    operations: Sequence[Operation],
) -> Iterator[tuple[tuple[Phase, int], list[Operation]]]:
    """Runs of operations of one phase, by the phase and how many of its runs came before."""
    seen = Counter[Phase]()
    for phase, group in groupby(operations, key=lambda operation: operation.phase):
        yield (phase, seen[phase]), [*group]
        seen[phase] += 1
