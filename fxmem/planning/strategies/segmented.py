"""What to save and what to recompute in a step that is cut into segments: an integer program.

Forward runs the segments one after the other. Backward comes to them from the last to the first;
there it computes at once all that the segment needs and that was not saved, then goes through the
segment. With ``s[v]`` and ``r[v]`` for "saved" and "recomputed", and ``w``, ``c`` for bytes and
cost of a value, the cheapest choice is the least ``sum c[v] r[v]`` such that

- ``s[v] + r[v] >= 1`` for what the backward of its own segment needs, ``s[v] = 1`` for what that
  of a later one does, which comes before ``v`` could be computed again;
- ``r[v] <= s[u] + r[u]`` for what ``v`` is computed from in the same segment, ``r[v] <= s[u]``
  for what comes from an earlier one, and ``r[v] = 0`` where computing it again is not the same;
- in forward of segment ``k``, ``P[k] + forward_peak_bytes <= budget``, where ``P[k]`` are the bytes
  saved in segments up to ``k``;
- in its backward, ``P[k-1] + F[k] + U[k] + backward_peak_bytes <= budget``, where ``F[k]`` are the
  bytes of the segment that its backward needs, however they came to be there, and ``U[k]`` those
  that are saved in it for other uses.

Given ``s``, the least ``r`` is a closure and whole by itself, so only ``s`` is declared integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import highspy
import numpy as np

DEFAULT_TIME_LIMIT_S = 10.0
"""Seconds for one budget."""

DEFAULT_GAP = 1e-3
"""How far the cost may be above the lower bound, as a part of the cost."""

MARGINS = (0.0, 1e-8, 1e-6, 1e-4)
"""Parts of the budget to leave, one after the other, until what is found fits to the byte: rows
hold but for the solver's tolerances, which let a few bytes in a hundred GiB pass."""

LARGEST_COEFFICIENT = 1e4
"""Bytes are divided so that no bound is above this; solvers are exact to digits, not to bytes."""


@dataclass(frozen=True, slots=True)
class Value:
    """A storage that forward makes.

    Attributes:
        segment: Index of the segment that makes it.
        nbytes: Its size.
        cost: Of computing it again, in seconds or FLOPs.
        parents: Indices of the values it is computed from, each less than its own; not those that
            live through the whole step, as parameters and inputs do.
        needed_by: The segments whose backward reads it: its own, or later ones.
        can_recompute: Whether computing it again gives the same and changes nothing else.
    """

    segment: int
    nbytes: int
    cost: float
    parents: tuple[int, ...] = ()
    needed_by: tuple[int, ...] = ()
    can_recompute: bool = True

    @property
    def is_needed(self) -> bool:
        """Whether the backward of its own segment reads it."""
        return self.segment in self.needed_by

    @property
    def must_save(self) -> bool:
        """Whether the backward of a later segment reads it."""
        return any(segment > self.segment for segment in self.needed_by)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of operators.

    Attributes:
        forward_peak_bytes: What its forward holds beside all that is saved by its end.
        backward_peak_bytes: What recomputing and backward hold beside what was saved, and the
            values that its backward needs: gradients, transients, what the user holds.
    """

    forward_peak_bytes: int
    backward_peak_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentedStep:
    """Forward, cut into segments.

    Attributes:
        segments: In the order of forward.
        values: What they make, in that order.
    """

    segments: tuple[Segment, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class SegmentedSolution:
    """What to save within a budget.

    Attributes:
        saved: Indices of the values to save; backward makes do with them and ``recomputed``.
        recomputed: Indices of the values to compute again.
        peak_bytes: The most that is live.
        cost: Of what is computed again.
        lower_bound_cost: No choice within the budget costs less.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    peak_bytes: int
    cost: float
    lower_bound_cost: float


@dataclass(slots=True)
class _Rows:
    """Rows of a sparse matrix, and their bounds."""

    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """Adds ``lower <= sum of factor * column <= upper``."""
        self.columns += [column for column, _ in terms]
        self.factors += [factor for _, factor in terms]
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)


def solve_segmented(
    step: SegmentedStep,
    budget: int,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    gap: float = DEFAULT_GAP,
) -> SegmentedSolution | None:
    """The cheapest choice under a budget in bytes.

    None where nothing fits, or where nothing that does was found in time.

    >>> first = (Value(0, 10, 1.0, (), (0,)), Value(0, 8, 2.0, (0,), (0,)))
    >>> step = SegmentedStep((Segment(1, 1), Segment(1, 9)), (*first, Value(1, 5, 1.0, (1,), (1,))))
    >>> for budget in (32, 26, 19):
    ...     solve_segmented(step, budget).recomputed
    ()
    (0,)
    (0, 1)
    >>> solve_segmented(step, 18) is None
    True
    """
    deadline_s = monotonic() + time_limit_s
    bound = 0.0
    for margin in MARGINS:
        program = _build_program(step, budget * (1 - margin))
        highs = _run_solver(program, max(0.0, deadline_s - monotonic()), gap)
        found = highs.getInfo()
        if found.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        if not margin:
            # Minus infinity where time was up before there was any.
            bound = max(0.0, found.mip_dual_bound * _find_cost_unit(step))
        chosen = highs.getSolution().col_value[: len(step.values)]
        saved = tuple(index for index, value in enumerate(chosen) if value > 0.5)
        peak, recomputed = measure_peak(step, saved), find_recomputed(step, saved)
        if recomputed is not None and peak <= budget:
            cost = sum((step.values[index].cost for index in recomputed), 0.0)
            return SegmentedSolution(saved, recomputed, peak, cost, min(bound, cost))
    return None


def bound_segmented(
    step: SegmentedStep, budget: int, time_limit_s: float = DEFAULT_TIME_LIMIT_S
) -> float:
    """What any choice under a budget in bytes costs at the least; infinity where none fits.

    It is lower than it could be where time is up.

    >>> step = SegmentedStep((Segment(0, 0),), (Value(0, 8, 2.0, (), (0,)),))
    >>> bound_segmented(step, 8), bound_segmented(step, 7)
    (0.0, inf)
    """
    highs = _run_solver(_build_program(step, budget), time_limit_s, DEFAULT_GAP)
    if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return math.inf
    # Minus infinity where time was up before there was any.
    return max(0.0, highs.getInfo().mip_dual_bound * _find_cost_unit(step))


def _run_solver(program: highspy.HighsLp, time_limit_s: float, gap: float) -> highspy.Highs:
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", time_limit_s)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.passModel(program)
    highs.run()
    return highs


def find_recomputed(step: SegmentedStep, saved: Sequence[int]) -> tuple[int, ...] | None:
    """What has to be computed again where only some values are saved; None where it cannot be."""
    kept = set(saved)
    again: set[int] = set()
    for index in reversed(range(len(step.values))):
        value = step.values[index]
        if index in kept or not (value.needed_by or index in again):
            continue
        if value.must_save or not value.can_recompute:
            return None
        again.add(index)
        for parent in value.parents:
            if step.values[parent].segment == value.segment:
                again.add(parent)
            elif parent not in kept:
                return None
    return tuple(sorted(again - kept))


def measure_peak(step: SegmentedStep, saved: Sequence[int]) -> int:
    """The most bytes that are live where some values are saved."""
    made = [0] * len(step.segments)
    beside = [segment.backward_peak_bytes for segment in step.segments]
    kept = set(saved)
    for index, value in enumerate(step.values):
        made[value.segment] += value.nbytes if index in kept else 0
        if value.is_needed or index in kept:
            beside[value.segment] += value.nbytes
    peak = before = 0
    for segment, size, backward in zip(step.segments, made, beside, strict=True):
        peak = max(peak, before + size + segment.forward_peak_bytes, before + backward)
        before += size
    return peak


def _find_cost_unit(step: SegmentedStep) -> float:
    """What costs are divided by, so that seconds are not lost below the solver's tolerances."""
    return max((value.cost for value in step.values), default=0.0) or 1.0


def _build_program(step: SegmentedStep, limit_bytes: float) -> highspy.HighsLp:
    """The program in columns ``s``, ``r``, ``P``."""
    values, segments = step.values, step.segments
    count = len(values)
    unit = max(1.0, limit_bytes / LARGEST_COEFFICIENT)
    limit = limit_bytes / unit
    inside = [0] * len(segments)
    members: list[list[int]] = [[] for _ in segments]
    for index, value in enumerate(values):
        members[value.segment].append(index)
        inside[value.segment] += value.nbytes if value.is_needed else 0
    forward = [limit - segment.forward_peak_bytes / unit for segment in segments]
    backward = [
        limit - (segment.backward_peak_bytes + size) / unit
        for segment, size in zip(segments, inside, strict=True)
    ]
    rows = _Rows()
    for index, value in enumerate(values):
        if value.is_needed:
            rows.add([(index, 1.0), (count + index, 1.0)], 1.0, highspy.kHighsInf)
        for parent in value.parents:
            sources = [(parent, 1.0)]
            if values[parent].segment == value.segment:
                sources.append((count + parent, 1.0))
            rows.add([*sources, (count + index, -1.0)], 0.0, highspy.kHighsInf)
    for k, indices in enumerate(members):
        before = [(2 * count + k - 1, 1.0)] if k else []
        sizes = [(i, values[i].nbytes / unit) for i in indices]
        rows.add([*before, *sizes, (2 * count + k, -1.0)], 0.0, 0.0)
        unused = [(i, size) for i, size in sizes if not values[i].is_needed]
        rows.add([*before, *unused], 0.0, backward[k])
    can = [float(value.can_recompute) for value in values]
    lower = [*(float(v.must_save) for v in values), *[0.0] * (count + len(segments))]
    unit_cost = _find_cost_unit(step)
    costs = [value.cost / unit_cost for value in values]
    return _make_lp(
        rows,
        costs=[*[0.0] * count, *costs, *[0.0] * len(segments)],
        bounds=(lower, [*[1.0] * count, *can, *forward]),
        integers=count,
    )


def _make_lp(
    rows: _Rows, costs: list[float], bounds: tuple[list[float], list[float]], integers: int
) -> highspy.HighsLp:
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(costs), len(rows.lower)
    program.col_cost_ = np.array(costs)
    program.col_lower_, program.col_upper_ = np.array(bounds[0]), np.array(bounds[1])
    program.row_lower_, program.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.array(rows.starts)
    program.a_matrix_.index_ = np.array(rows.columns)
    program.a_matrix_.value_ = np.array(rows.factors)
    kinds = highspy.HighsVarType
    program.integrality_ = [kinds.kInteger] * integers + [kinds.kContinuous] * (
        len(costs) - integers
    )
    return program
