"""What stages hold, read off the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxmem.graph import RESIDENT, Category, Phase
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.simulate import Simulation
from fxmem.planning.strategies.chains.chain import StageOption

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edges:
    """By stage: gradients of its input, what is held when backward stands there, and its forward
    where nothing is saved."""

    gradients: tuple[int, ...]
    held: tuple[int, ...]
    forward_peaks: tuple[int, ...]


def _find_stages(step: StepIndex, bounds: Sequence[tuple[int, int]]) -> Ints:
    """By node, the index of its stage; loss belongs to the last."""
    stages = np.full(len(step.graph.nodes) + 1, len(bounds) - 1, dtype=np.int64)
    for index, (start, stop) in enumerate(bounds):
        stages[start:stop] = index
    stages[: bounds[0][0]] = 0
    return stages


def _find_spans(
    step: StepIndex, bounds: Sequence[tuple[int, int]], simulation: Simulation
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """By stage, from where to where its operations of forward and of backward lie."""
    stages = _find_stages(step, bounds)
    forward = [(len(simulation.order), -1)] * len(bounds)
    backward = list(forward)
    for place, (index, again) in enumerate(simulation.order):
        operation = step.graph.operations[index]
        if operation.node is None or operation.phase is Phase.OPTIMIZER:
            continue
        stage = int(stages[operation.node])
        spans = backward if again or operation.phase is Phase.BACKWARD else forward
        spans[stage] = min(spans[stage][0], place), max(spans[stage][1], place)
    return forward, backward


def measure_edges(
    step: StepIndex, bounds: Sequence[tuple[int, int]], simulation: Simulation
) -> Edges:
    """Gradients, held bytes and forwards of stages, from the step without a plan."""
    _, backward = _find_spans(step, bounds, simulation)
    made = {m.index for m in step.made if not m.is_output}
    size = len(simulation.order)
    gradients, held = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
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
    ends = [span[1] if span[1] >= 0 else 0 for span in backward]
    return Edges(
        gradients=tuple(0 if i == 0 else int(gradients[ends[i] + 1]) for i in range(len(bounds))),
        held=tuple(
            int(held[ends[i + 1]] if i + 1 < len(bounds) else held[0]) for i in range(len(bounds))
        ),
        forward_peaks=tuple(_measure_forward(step, start, stop) for start, stop in bounds),
    )


def _measure_forward(step: StepIndex, start: int, stop: int) -> int:
    """What a forward that saves nothing holds above its input and output."""
    first, end = step.first_operation[start], step.end_operation[stop - 1]
    deltas = np.zeros(max(1, end - first) + 1, dtype=np.int64)
    output = 0
    for made in step.made:
        if not first <= made.born < end:
            continue
        ends = [step.end_operation[node] - 1 for node in made.readers]
        last = max([made.local_end, *ends])
        deltas[made.born - first] += made.nbytes
        if last < end:
            deltas[last + 1 - first] -= made.nbytes
        elif not made.is_output:
            output += made.nbytes
    workspaces = [o.workspace_bytes for o in step.graph.operations[first:end]] or [0]
    live = np.cumsum(deltas)[: len(workspaces)] + np.array(workspaces)
    return int(live.max()) - output


def measure_options(
    step: StepIndex,
    bounds: Sequence[tuple[int, int]],
    simulation: Simulation,
    costs: Sequence[float],
    edges: Edges,
) -> list[StageOption]:
    """Each stage's way to run in a simulated step, as the chain's solver takes it."""
    forward, backward = _find_spans(step, bounds, simulation)
    stages = _find_stages(step, bounds)
    live = np.array(simulation.live_bytes, dtype=np.int64)
    size = len(simulation.order)
    turn = max(span[1] for span in forward)  # the last of forward
    own = np.zeros((len(bounds), turn + 2), dtype=np.int64)
    saved = [0] * len(bounds)
    makers = {made.index: made for made in step.made}
    for life in simulation.lives:
        made = makers.get(life.storage)
        if made is None or not 0 <= life.born <= turn or made.is_output:
            continue
        stage = int(stages[made.node])
        own[stage, life.born] += made.nbytes
        died = size if life.died is None else life.died
        if died <= turn:
            own[stage, died + 1] -= made.nbytes
        else:
            saved[stage] += made.nbytes
    own = np.cumsum(own, axis=1)
    spent = [0.0] * len(bounds)
    for index in simulation.recomputed:
        node = step.graph.operations[index].node
        spent[int(stages[node if node is not None else 0])] += costs[index]
    options = []
    for stage in range(len(bounds)):
        (head, tail), (first, last) = forward[stage], backward[stage]
        workspaces = [
            step.graph.operations[simulation.order[p][0]].workspace_bytes
            for p in range(head, tail + 1)
        ] or [0]
        rise = own[stage, head : tail + 1] + np.array(workspaces) if tail >= head else np.zeros(1)
        before = int(live[first - 1]) if 0 < first <= last else 0
        most = int(live[first : last + 1].max()) if first <= last else 0
        options.append(
            StageOption(
                saved_bytes=saved[stage],
                cost=spent[stage],
                forward_peak_bytes=max(0, int(rise.max()) - saved[stage]),
                backward_peak_bytes=most - before - edges.gradients[stage],
            )
        )
    return options
