"""What to save and what to compute again, value by value, by the integer program over segments.

Where the chain's solver chooses among ways to run a whole stage, the program decides for each
storage by itself, over all stages at once; it does not nest. What it decides becomes regions: from
a value that is computed again to the node that asks for it and is kept, which the early stop leaves
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxmem.planning.model.index import Activation, StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.strategies.segmented import Segment, SegmentedStep, Value, solve_segmented
from fxmem.planning.strategies.stages import StagedStep

SHARES = (0.3, 0.5, 0.7)
"""Budgets, between what the stages hold when everything is computed again and when nothing is."""
TIME_LIMIT_S = 0.5


def propose_saved(
    recorded: StepIndex, limits: Limits, costs: Sequence[float], staged: StagedStep
) -> Iterator[tuple[SegmentRange, ...]]:
    """Regions for some budgets.

    Args:
        recorded: The step.
        limits: What may not be computed again.
        costs: Of each operation, by its index.
        staged: The step cut into stages, which are the program's segments.
    """
    made = [storage for storage in recorded.made if not storage.is_output]
    step = _build_step(recorded, limits, costs, staged, made)
    kept_bytes = sum(value.nbytes for value in step.values if value.needed_by)
    largest = max(segment.backward_peak_bytes for segment in step.segments)
    for share in SHARES:
        budget = largest + int(share * kept_bytes)
        found = solve_segmented(step, budget, time_limit_s=TIME_LIMIT_S)
        if found is not None:
            again = {made[index].node for index in found.recomputed}
            yield tuple(_list_regions(recorded, limits, staged, again))


def _build_step(
    recorded: StepIndex,
    limits: Limits,
    costs: Sequence[float],
    staged: StagedStep,
    made: Sequence[Activation],
) -> SegmentedStep:
    segments = tuple(
        Segment(
            stage.forward_peak_bytes,
            stage.held_bytes + stage.gradient_bytes + stage.input_bytes + stage.forward_peak_bytes,
        )
        for stage in staged.chain.stages
    )
    owners = {
        node: index
        for index, stage in enumerate(staged.ranges)
        for node in range(stage.start, stage.stop)
    }
    positions = {storage.index: position for position, storage in enumerate(made)}
    largest = {m.born: m.index for m in sorted(made, key=lambda m: m.nbytes)}
    values = tuple(
        Value(
            segment=owners.get(storage.node, 0),
            nbytes=storage.nbytes,
            cost=costs[storage.born] if largest[storage.born] == storage.index else 0.0,
            parents=tuple(
                positions[index]
                for index in dict.fromkeys(recorded.graph.operations[storage.born].reads)
                if positions.get(index, position) < position
            ),
            needed_by=tuple(sorted({owners[s.node] for s in storage.saves if s.node in owners})),
            can_recompute=storage.node not in limits.fixed,
        )
        for position, storage in enumerate(made)
    )
    return SegmentedStep(segments, values)


def _list_regions(
    recorded: StepIndex, limits: Limits, staged: StagedStep, again: set[int]
) -> Iterator[SegmentRange]:
    """Each run of nodes that are computed again, with the node after it that saves of them."""
    for stage in staged.ranges:
        node = stage.start
        while node < stage.stop:
            if node not in again or node in limits.starts:
                node += 1
                continue
            stop = node
            while stop < stage.stop and stop in again:
                stop += 1
            if stop < stage.stop and stop not in limits.fixed and recorded.saves_by_node[stop]:
                stop += 1
            yield SegmentRange(node, stop)
            node = stop
