"""Memory of stages, read off the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.graph import RESIDENT, Category, Phase
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.simulate import Simulation
from fxmem.planning.strategies.chains.chain import StageOption

Bounds = Sequence[tuple[int, int]]
"""By stage, its first node and the node after its last."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Memory around stages, by stage.

    Attributes:
        gradients: Gradients of its input.
        held: What is taken while backward stands there.
        forward_peaks: What a forward that saves nothing holds above its input and output.
    """

    gradients: tuple[int, ...]
    held: tuple[int, ...]
    forward_peaks: tuple[int, ...]


def measure_edges(step: StepIndex, bounds: Bounds, simulation: Simulation) -> Edges:
    """Measures what lies around stages in the step without a plan."""
    _, _, backward = _find_spans(step, bounds, simulation)
    made = {m.index for m in step.made if not m.is_output}
    gradients, held = np.zeros((2, len(simulation.order) + 1), dtype=np.int64)
    for life in simulation.lives:
        if life.storage in made:
            continue
        storage = step.graph.storages[life.storage]
        passes = life.born != RESIDENT and storage.category is not Category.GRADIENT
        passes = passes and step.graph.operations[storage.born].phase is Phase.BACKWARD
        totals = gradients if passes else held
        totals[max(life.born, 0)] += storage.nbytes
        if life.died is not None:
            totals[life.died + 1] -= storage.nbytes
    gradients, held = np.cumsum(gradients), np.cumsum(held)
    ends = [max(last, 0) for _, last in backward]
    return Edges(
        gradients=(0, *(int(gradients[end + 1]) for end in ends[1:])),
        held=(*(int(held[end]) for end in ends[1:]), int(held[0])),
        forward_peaks=tuple(_measure_forward(step, start, stop) for start, stop in bounds),
    )


def _find_spans(
    step: StepIndex, bounds: Bounds, simulation: Simulation
) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, int]]]:
    """By node its stage; by stage, from where to where its forward and its backward run."""
    stages = [0] * bounds[0][0]
    for index, (start, stop) in enumerate(bounds):
        stages += [index] * (stop - start)
    stages += [len(bounds) - 1] * (len(step.graph.nodes) - len(stages))  # loss
    forward = [(len(simulation.order), -1)] * len(bounds)
    backward = list(forward)
    for place, (index, again) in enumerate(simulation.order):
        operation = step.graph.operations[index]
        if operation.node is None or operation.phase is Phase.OPTIMIZER:
            continue
        stage = stages[operation.node]
        spans = backward if again or operation.phase is Phase.BACKWARD else forward
        spans[stage] = min(spans[stage][0], place), max(spans[stage][1], place)
    return stages, forward, backward


def _measure_forward(step: StepIndex, start: int, stop: int) -> int:
    first, end = step.first_operation[start], step.end_operation[stop - 1]
    deltas = np.zeros(max(1, end - first) + 1, dtype=np.int64)
    output = 0
    for made in step.list_activations(first, end):
        last = max([made.local_end, *(step.end_operation[node] - 1 for node in made.readers)])
        deltas[made.born - first] += made.nbytes
        if last < end:
            deltas[last + 1 - first] -= made.nbytes
        elif not made.is_output:
            output += made.nbytes
    workspaces = [o.workspace_bytes for o in step.graph.operations[first:end]] or [0]
    return int((np.cumsum(deltas)[: len(workspaces)] + workspaces).max()) - output


def measure_options(
    step: StepIndex,
    bounds: Bounds,
    simulation: Simulation,
    costs: Sequence[float],
    edges: Edges,
) -> list[StageOption]:
    """Measures each stage's way to run in a simulated step."""
    stages, forward, backward = _find_spans(step, bounds, simulation)
    live = np.array(simulation.live_bytes, dtype=np.int64)
    turn = max(span[1] for span in forward)  # the last of forward
    own = np.zeros((len(bounds), turn + 2), dtype=np.int64)
    saved = [0] * len(bounds)
    for life in simulation.lives:
        made = step.makers.get(life.storage)
        if made is None or not 0 <= life.born <= turn or made.is_output:
            continue
        stage = stages[made.node]
        own[stage, life.born] += made.nbytes
        if life.died is not None and life.died <= turn:
            own[stage, life.died + 1] -= made.nbytes
        else:
            saved[stage] += made.nbytes
    own = np.cumsum(own, axis=1)
    spent = [0.0] * len(bounds)
    for index in simulation.recomputed:
        spent[stages[step.graph.operations[index].node or 0]] += costs[index]
    options = []
    for stage, ((head, tail), (first, last)) in enumerate(zip(forward, backward, strict=True)):
        order = simulation.order[head : tail + 1]
        workspaces = [step.graph.operations[index].workspace_bytes for index, _ in order]
        rise = int((own[stage, head : tail + 1] + workspaces).max()) if workspaces else 0
        before = int(live[first - 1]) if 0 < first <= last else 0
        most = int(live[first : last + 1].max()) if first <= last else 0
        options.append(
            StageOption(
                saved_bytes=saved[stage],
                cost=spent[stage],
                forward_peak_bytes=max(0, rise - saved[stage]),
                backward_peak_bytes=most - before - edges.gradients[stage],
            )
        )
    return options
