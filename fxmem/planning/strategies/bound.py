"""Lower bound on the cost of any plan with a given peak.

At the moment when the plain step holds most, a plan that holds less keeps only some of what
forward made. Whatever else backward still needs is recomputed after that moment, from what is kept
or recomputed after it as well. The cheapest choice of what to keep bounds every plan from below, in
whatever order it recomputes: only one moment counts. With ``s[v]`` and ``r[v]`` for
"kept" and "recomputed", ``w`` and ``c`` for bytes and cost of a value, it is the least
``sum c[v] r[v]`` such that

- ``s[v] + r[v] >= 1`` for what backward needs after the moment, ``s[v] = 1`` for what cannot be
  gone at it, and ``r[v] = 0`` for what may not be recomputed;
- ``r[v] <= s[u] + r[u]`` for each ``u`` that ``v`` is computed from;
- ``sum w[v] s[v]`` is at most what the peak leaves for such values.

Given ``s``, the least ``r`` is a closure and whole by itself, so only ``s`` is declared integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from fxmem.graph import Phase
from fxmem.planning.model.index import Activation, StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.simulate import simulate_segments

_MOST_NODES = 100
"""Nodes of the solver's tree, not seconds: the bound is the same on any machine."""
_GAP = 1e-3
"""Share of the least cost by which the solver's bound may lie below it."""
_LARGEST = 1e4
"""Bytes are divided so that no bound is above this: solvers are exact to digits, not to bytes."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A storage that forward made, at the moment of the peak."""

    nbytes: int
    cost: float
    parents: tuple[int, ...]
    is_needed: bool
    is_held: bool
    can_recompute: bool


def bound_cost(step: StepIndex, limits: Limits, costs: Sequence[float], peak_bytes: int) -> float:
    """Bounds the cost of any plan with a peak from below, by the costs of all operations.

    0 where the plain step has no higher peak, and infinity where no plan has that peak.
    """
    plain = simulate_segments(step, ())
    backward = [o.index for o in step.graph.operations if o.phase is Phase.BACKWARD]
    at = max(backward, key=plain.live_bytes.__getitem__, default=None)
    if at is None or plain.live_bytes[at] <= peak_bytes:
        return 0.0
    made = [activation for activation in step.made if not activation.is_output]
    alive = {
        interval.storage
        for interval in plain.lives
        if interval.born <= at and (interval.died is None or interval.died >= at)
    }
    kept_bytes = sum(activation.nbytes for activation in made if activation.index in alive)
    budget = peak_bytes - (plain.live_bytes[at] - kept_bytes)
    values = _list_values(step, limits, costs, made, alive, at)
    return _solve(values, budget) if budget > 0 else math.inf


def _list_values(
    step: StepIndex,
    limits: Limits,
    costs: Sequence[float],
    made: Sequence[Activation],
    alive: set[int],
    at: int,
) -> list[_Value]:
    positions = {activation.index: position for position, activation in enumerate(made)}
    largest = {m.born: m.index for m in sorted(made, key=lambda m: m.nbytes)}
    values = []
    for position, activation in enumerate(made):
        reads = step.graph.operations[activation.born].reads
        unpacked = [save for save in activation.saves if save.unpacked is not None]
        is_taken = any(s.unpacked <= at <= (s.returned or at) for s in unpacked)  # type: ignore[operator]
        is_kept = activation.held_to is not None and activation.held_to >= at
        is_held = activation.index in alive and (is_taken or is_kept)
        values.append(
            _Value(
                nbytes=activation.nbytes,
                # The results of one operator are computed together.
                cost=costs[activation.born] if largest[activation.born] == activation.index else 0,
                parents=tuple(
                    positions[index]
                    for index in dict.fromkeys(reads)
                    if positions.get(index, position) < position
                ),
                is_needed=is_held or any(s.unpacked > at for s in unpacked),  # type: ignore[operator]
                is_held=is_held,
                can_recompute=activation.node not in limits.fixed,
            )
        )
    return values


class _Solver(highspy.Highs):
    """A solver that prints nothing, nor its name when it is made, as 1.16 does."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _solve(values: Sequence[_Value], budget: int) -> float:
    """Solves the program in columns ``s`` and ``r``."""
    count = len(values)
    unit = max(1.0, budget / _LARGEST)
    cost_unit = max((value.cost for value in values), default=0.0) or 1.0
    # Each row is `lower <= sum of factor * column`, all but the first with a factor of 1 or -1.
    rows: list[list[tuple[int, float]]] = [
        [(index, value.nbytes / unit) for index, value in enumerate(values)]
    ]
    lower = [-highspy.kHighsInf]
    for index, value in enumerate(values):
        if value.is_needed:
            rows.append([(index, 1.0), (count + index, 1.0)])
            lower.append(1.0)
        for parent in value.parents:
            rows.append([(parent, 1.0), (count + parent, 1.0), (count + index, -1.0)])
            lower.append(0.0)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = 2 * count, len(rows)
    program.col_cost_ = np.array([*[0.0] * count, *(value.cost / cost_unit for value in values)])
    program.col_lower_ = np.array([*(float(v.is_held) for v in values), *[0.0] * count])
    program.col_upper_ = np.array([*[1.0] * count, *(float(v.can_recompute) for v in values)])
    program.row_lower_ = np.array(lower)
    program.row_upper_ = np.array([budget / unit, *[highspy.kHighsInf] * (len(rows) - 1)])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.cumsum([0, *map(len, rows)])
    program.a_matrix_.index_ = np.array([column for row in rows for column, _ in row])
    program.a_matrix_.value_ = np.array([factor for row in rows for _, factor in row])
    kinds = highspy.HighsVarType
    program.integrality_ = [kinds.kInteger] * count + [kinds.kContinuous] * count
    solver = _Solver()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_max_nodes", _MOST_NODES)
    solver.setOptionValue("mip_rel_gap", _GAP)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return math.inf
    # Minus infinity where nothing was found out.
    return max(0.0, solver.getInfo().mip_dual_bound * cost_unit)
