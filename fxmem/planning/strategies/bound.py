"""What any plan with a given peak must compute again, at the least.

At the moment when the plain step holds most, a plan that holds less keeps only some of what
forward made. Whatever else backward still needs is computed after that moment, from what is kept
or computed after it as well. The cheapest choice of what to keep, an integer program, is a bound
for every plan that computes again, in whatever order: only one moment of it is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxmem.graph import Phase
from fxmem.planning.model.index import Activation, StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.strategies.segmented import Segment, SegmentedStep, Value, bound_segmented

_HERE, _LATER = 0, 1
"""What is kept or computed after the moment; what cannot be gone at it."""


def bound_cost(
    recorded: StepIndex,
    limits: Limits,
    costs: Sequence[float],
    peak_bytes: int,
    time_limit_s: float = 2.0,
) -> float:
    """The least cost of any plan with a peak.

    Args:
        recorded: The step.
        limits: What may not be computed again.
        costs: Of each operation, by its index.
        peak_bytes: The peak of the step with the plan.
        time_limit_s: When the program is given up; the bound is then lower than it could be.

    Returns:
        A cost in the unit of ``costs``; 0 where the plain step has no higher peak, and infinity
        where no plan has that peak.
    """
    plain = simulate_segments(recorded, ())
    backward = [o.index for o in recorded.graph.operations if o.phase is Phase.BACKWARD]
    at = max(backward, key=plain.live_bytes.__getitem__, default=None)
    if at is None or plain.live_bytes[at] <= peak_bytes:
        return 0.0
    made = [storage for storage in recorded.made if not storage.is_output]
    alive = {
        life.storage
        for life in plain.lives
        if life.born <= at and (life.died is None or life.died >= at)
    }
    held_bytes = sum(storage.nbytes for storage in made if storage.index in alive)
    values = _list_values(recorded, limits, costs, made, alive, at)
    free = -sum(value.nbytes for value in values)  # the moment's own transients are in live_bytes
    step = SegmentedStep((Segment(0, free), Segment(0, free)), values)
    budget = peak_bytes - (plain.live_bytes[at] - held_bytes)
    return bound_segmented(step, budget, time_limit_s) if budget > 0 else math.inf


def _list_values(
    recorded: StepIndex,
    limits: Limits,
    costs: Sequence[float],
    made: Sequence[Activation],
    alive: set[int],
    at: int,
) -> tuple[Value, ...]:
    positions = {storage.index: position for position, storage in enumerate(made)}
    largest = {m.born: m.index for m in sorted(made, key=lambda m: m.nbytes)}
    values = []
    for position, storage in enumerate(made):
        reads = recorded.graph.operations[storage.born].reads
        taken = any(
            save.unpacked is not None and save.unpacked <= at <= (save.returned or at)
            for save in storage.saves
        )
        is_held = storage.held_to is not None and storage.held_to >= at
        held = storage.index in alive and (taken or is_held)
        later = any(save.unpacked is not None and save.unpacked > at for save in storage.saves)
        values.append(
            Value(
                segment=_HERE,
                nbytes=storage.nbytes,
                # One operator's results are computed together.
                cost=costs[storage.born] if largest[storage.born] == storage.index else 0.0,
                parents=tuple(
                    positions[index]
                    for index in dict.fromkeys(reads)
                    if positions.get(index, position) < position
                ),
                needed_by=(*([_HERE] if later or held else []), *([_LATER] if held else [])),
                can_recompute=storage.node not in limits.fixed,
            )
        )
    return tuple(values)
