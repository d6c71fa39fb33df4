"""A step as a chain of stages, each with several ways to run it, for the chain's solver.

Boundaries lie where little crosses. The ways to run a stage differ in what is computed again
inside it: a sweep over the price of a byte weighs, for each run of nodes, what it would save
against what its inputs take (the convex hull of the trade-off, as by minimum cuts). What each way
then holds is not estimated but read off the simulated step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxmem.graph import RESIDENT, Category, Phase
from fxmem.planning.chain import Chain, Kept, Schedule, Stage, StageOption
from fxmem.planning.facts import StepFacts
from fxmem.planning.limits import Limits
from fxmem.planning.regions import Region
from fxmem.planning.simulation import Simulation, simulate_regions

MAX_STAGES = 48
MAX_STAGE_NODES = 80
"""Runs of nodes within a stage are compared in pairs; longer stages are swept coarsely."""
_PRICES = 10
_NEVER = 1e9
"""Seconds: what must not be computed again."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageRange:
    """A stage by its nodes.

    Attributes:
        start: Its first node.
        stop: The node after its last.
        options: For each way to run it, the regions in it.
    """

    start: int
    stop: int
    options: tuple[tuple[Region, ...], ...]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step cut into stages.

    Attributes:
        ranges: The stages, in order.
        chain: What they hold and cost, without ``base_bytes``.
        base_bytes: What is taken all the time.
    """

    ranges: tuple[StageRange, ...]
    chain: Chain
    base_bytes: int

    def list_regions(self, schedule: Schedule) -> tuple[Region, ...]:
        """The regions that run a schedule."""
        regions: list[Region] = []
        for entry in schedule:
            if isinstance(entry, Kept):
                regions += self.ranges[entry.stage].options[entry.option]
                continue
            start, stop = self.ranges[entry.start].start, self.ranges[entry.stop - 1].stop
            inner = self.list_regions(entry.body)
            if any((child.start, child.stop) == (start, stop) for child in inner):
                regions += inner
            else:
                regions.append(Region(start, stop, inner))
        return tuple(regions)


def measure_frontiers(facts: StepFacts) -> list[int]:
    """For each position between nodes, the bytes that cross it: made before, used after.

    What the model returns is held anyway and does not count.

    Args:
        facts: The step.

    Returns:
        At index ``n``, what crosses between the nodes ``n - 1`` and ``n``.
    """
    deltas = [0] * (facts.nodes + 2)
    for made in facts.made:
        used = [*made.readers, *(s.node for s in made.saves if s.node is not None)]
        last = min(max(used, default=made.node), facts.nodes)
        if last > made.node and not made.is_output:
            deltas[made.node + 1] += made.nbytes
            deltas[last + 1] -= made.nbytes
    crossing, at = [], 0
    for delta in deltas[: facts.nodes + 1]:
        at += delta
        crossing.append(at)
    return crossing


def find_boundaries(facts: StepFacts, limits: Limits, most: int = MAX_STAGES) -> list[int]:
    """Where stages begin: positions that less crosses than others near them.

    Args:
        facts: The step.
        limits: Where no region may begin.
        most: How many stages there may be.

    Returns:
        Ascending; the first is the first node that is no placeholder.
    """
    first = sum(node.op == "placeholder" for node in facts.graph.nodes)
    crossing = measure_frontiers(facts)
    allowed = [n for n in range(first + 1, facts.nodes) if n not in limits.starts]
    window = 1
    while True:
        chosen = [first]
        for node in allowed:
            near = range(max(first + 1, node - window), min(facts.nodes, node + window + 1))
            least = min(crossing[n] for n in near if n not in limits.starts)
            if crossing[node] == least and node - chosen[-1] >= window:
                chosen.append(node)
        if len(chosen) <= most:
            return chosen
        window += 1


def find_blocks(facts: StepFacts, limits: Limits, level: int) -> list[int]:
    """Where stages begin: at modules that are counted, such as ``layer1.0`` or ``denselayer3``.

    Args:
        facts: The step.
        limits: Where no region may begin.
        level: How many numbers of a module's name count.

    Returns:
        Ascending; the first is the first node that is no placeholder.
    """
    nodes = facts.graph.nodes[: facts.nodes]
    first = sum(node.op == "placeholder" for node in nodes)
    starts, block = [first], _find_block(nodes[first].fqn, level)
    for node in nodes[first + 1 :]:
        other = _find_block(node.fqn, level)
        if other != block and node.index not in limits.starts:
            starts.append(node.index)
            block = other
    return starts


def _find_block(fqn: str, level: int) -> str:
    parts = fqn.split(".")
    numbers = [at for at, part in enumerate(parts) if part[-1:].isdigit()]
    return ".".join(parts[: numbers[min(level, len(numbers)) - 1] + 1]) if numbers else ""


def cut_step(
    facts: StepFacts, limits: Limits, costs: Sequence[float], starts: Sequence[int]
) -> StagedStep:
    """Cuts a step into stages with their options.

    Args:
        facts: The step.
        limits: What may not be computed again.
        costs: Of each operation, by its index.
        starts: The first node of each stage, ascending.
    """
    bounds = [*zip(starts, [*starts[1:], facts.nodes], strict=True)]
    sweeps = [sweep_regions(facts, limits, costs, start, stop) for start, stop in bounds]
    levels = max(map(len, sweeps))
    found: list[dict[tuple[Region, ...], StageOption]] = [{} for _ in bounds]
    plain = simulate_regions(facts, ())
    edges = _measure_edges(facts, bounds, plain)
    for level in range(levels):
        chosen = [sweep[min(level, len(sweep) - 1)] for sweep in sweeps]
        simulation = simulate_regions(facts, [region for regions in chosen for region in regions])
        measured = _measure_options(facts, bounds, simulation, costs, chosen, edges)
        for known, regions, option in zip(found, chosen, measured, strict=True):
            known.setdefault(regions, option)
    ranges = tuple(
        StageRange(start, stop, tuple(known))
        for (start, stop), known in zip(bounds, found, strict=True)
    )
    base = min(edges.held)
    crossing = measure_frontiers(facts)
    stages = tuple(
        Stage(
            input_bytes=0 if index == 0 else crossing[start],
            gradient_bytes=edges.gradients[index],
            cost=_price_nodes(facts, limits, costs, start, stop),
            options=tuple(known.values()),
            forward_peak_bytes=edges.forward_peaks[index],
            held_bytes=edges.held[index] - base,
        )
        for index, ((start, stop), known) in enumerate(zip(bounds, found, strict=True))
    )
    return StagedStep(ranges, Chain(stages), base)


# -- the ways to run a stage --------------------------------------------------------------------


def sweep_regions(
    facts: StepFacts, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> tuple[tuple[Region, ...], ...]:
    """Regions among some nodes, for prices of a byte from nothing to everything.

    Args:
        facts: The step.
        limits: What may not be computed again.
        costs: Of each operation.
        start: The first of the nodes.
        stop: The node after the last.

    Returns:
        Each once; the first has no regions.
    """
    runs = _list_runs(facts, limits, costs, start, stop)
    found: dict[tuple[Region, ...], None] = {(): None}
    rates = [cost / nbytes for _, _, nbytes, cost in runs if nbytes > 0 and cost]
    if rates:
        for price in np.geomspace(min(rates) / 4, max(rates) * 4, _PRICES):
            found.setdefault(_choose_regions(runs, start, stop, float(price)), None)
    return tuple(found)


_Run = tuple[int, int, int, float]
"""A region's first node, the node after its last, the bytes it frees, what it costs."""


def _choose_regions(
    runs: Sequence[_Run], start: int, stop: int, price: float
) -> tuple[Region, ...]:
    """The regions that are worth most, where a byte is worth ``price``."""
    ending: dict[int, list[_Run]] = {}
    for run in runs:
        ending.setdefault(run[1], []).append(run)
    best = [0.0]
    back: list[_Run | None] = [None]
    for node in range(start + 1, stop + 1):
        least, via = best[-1], None
        for run in ending.get(node, ()):
            cost = best[run[0] - start] + run[3] - price * run[2]
            if cost < least:
                least, via = cost, run
        best.append(least)
        back.append(via)
    regions = []
    node = stop
    while node > start:
        last = back[node - start]
        if last is not None:
            regions.append(Region(last[0], last[1]))
        node = node - 1 if last is None else last[0]
    return tuple(reversed(regions))


def _list_runs(
    facts: StepFacts, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> list[_Run]:
    """The runs of nodes in a stage that may be a region, and would free something.

    A region frees what only its own nodes save, and holds its inputs for that.
    """
    first = facts.first_operation
    until = np.concatenate(([0.0], np.cumsum(costs)))
    made = [m for m in facts.made if start <= m.node < stop and not m.is_output]
    step = max(1, (stop - start) // MAX_STAGE_NODES)
    saved_last: dict[int, list[tuple[int, int]]] = {}  # by the last node that saves it
    for storage in made:
        savers = [facts.nodes if s.node is None else s.node for s in storage.saves]
        if savers:
            saved_last.setdefault(max(savers), []).append((min(savers), storage.nbytes))
    runs: list[_Run] = []
    for head in range(start, stop, step):
        if head in limits.starts or head in limits.fixed:
            continue
        inputs = {m.index: m for m in made if m.node < head}
        freed, last = 0, first[head]
        for node in range(head, stop):
            if node in limits.fixed:
                break
            for storage in [m for m in inputs.values() if node in m.readers]:
                del inputs[storage.index]
                if not any(s.node is not None and s.node < head for s in storage.saves):
                    freed -= storage.nbytes
            freed += sum(size for saver, size in saved_last.get(node, ()) if saver >= head)
            positions = [s.position for s in facts.saves_by_node[node] if s.unpacked is not None]
            last = max([last, *positions])
            if freed > 0 and ((node + 1 - start) % step == 0 or node + 1 == stop):
                cost = float(until[max(last, first[head])] - until[first[head]])
                runs.append((head, node + 1, freed, cost))
    return runs


def _price_nodes(
    facts: StepFacts, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> float:
    if any(node in limits.fixed for node in range(start, stop)):
        return _NEVER
    return sum(costs[o.index] for o in facts.list_operations(start, stop))


# -- what they hold -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Edges:
    """By stage: gradients of its input, what is held when backward stands there, and its forward
    where nothing is saved."""

    gradients: tuple[int, ...]
    held: tuple[int, ...]
    forward_peaks: tuple[int, ...]


def _find_stages(facts: StepFacts, bounds: Sequence[tuple[int, int]]) -> Ints:
    """By node, the index of its stage; loss belongs to the last."""
    stages = np.full(len(facts.graph.nodes) + 1, len(bounds) - 1, dtype=np.int64)
    for index, (start, stop) in enumerate(bounds):
        stages[start:stop] = index
    stages[: bounds[0][0]] = 0
    return stages


def _find_spans(
    facts: StepFacts, bounds: Sequence[tuple[int, int]], simulation: Simulation
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """By stage, from where to where its operations of forward and of backward lie."""
    stages = _find_stages(facts, bounds)
    forward = [(len(simulation.order), -1)] * len(bounds)
    backward = list(forward)
    for place, (index, again) in enumerate(simulation.order):
        operation = facts.graph.operations[index]
        if operation.node is None or operation.phase is Phase.OPTIMIZER:
            continue
        stage = int(stages[operation.node])
        spans = backward if again or operation.phase is Phase.BACKWARD else forward
        spans[stage] = min(spans[stage][0], place), max(spans[stage][1], place)
    return forward, backward


def _measure_edges(
    facts: StepFacts, bounds: Sequence[tuple[int, int]], simulation: Simulation
) -> _Edges:
    _, backward = _find_spans(facts, bounds, simulation)
    made = {m.index for m in facts.made if not m.is_output}
    size = len(simulation.order)
    gradients, held = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    for life in simulation.lives:
        if life.storage in made:
            continue
        storage = facts.storages[life.storage]
        passes = life.born != RESIDENT and storage.category is not Category.GRADIENT
        passes = passes and facts.graph.operations[storage.born].phase is Phase.BACKWARD
        totals = gradients if passes else held
        totals[max(life.born, 0)] += storage.nbytes
        if life.died is not None:
            totals[life.died + 1] -= storage.nbytes
    gradients, held = np.cumsum(gradients), np.cumsum(held)
    ends = [span[1] if span[1] >= 0 else 0 for span in backward]
    return _Edges(
        gradients=tuple(0 if i == 0 else int(gradients[ends[i] + 1]) for i in range(len(bounds))),
        held=tuple(
            int(held[ends[i + 1]] if i + 1 < len(bounds) else held[0]) for i in range(len(bounds))
        ),
        forward_peaks=tuple(_measure_forward(facts, start, stop) for start, stop in bounds),
    )


def _measure_forward(facts: StepFacts, start: int, stop: int) -> int:
    """What a forward that saves nothing holds above its input and output."""
    first, end = facts.first_operation[start], facts.end_operation[stop - 1]
    deltas = np.zeros(max(1, end - first) + 1, dtype=np.int64)
    output = 0
    for made in facts.made:
        if not first <= made.born < end:
            continue
        ends = [facts.end_operation[node] - 1 for node in made.readers]
        last = max([made.local_end, *ends])
        deltas[made.born - first] += made.nbytes
        if last < end:
            deltas[last + 1 - first] -= made.nbytes
        elif not made.is_output:
            output += made.nbytes
    workspaces = [o.workspace_bytes for o in facts.graph.operations[first:end]] or [0]
    live = np.cumsum(deltas)[: len(workspaces)] + np.array(workspaces)
    return int(live.max()) - output


def _measure_options(
    facts: StepFacts,
    bounds: Sequence[tuple[int, int]],
    simulation: Simulation,
    costs: Sequence[float],
    chosen: Sequence[tuple[Region, ...]],
    edges: _Edges,
) -> list[StageOption]:
    forward, backward = _find_spans(facts, bounds, simulation)
    stages = _find_stages(facts, bounds)
    live = np.array(simulation.live_bytes, dtype=np.int64)
    size = len(simulation.order)
    turn = max(span[1] for span in forward)  # the last of forward
    own = np.zeros((len(bounds), turn + 2), dtype=np.int64)
    saved = [0] * len(bounds)
    makers = {made.index: made for made in facts.made}
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
        node = facts.graph.operations[index].node
        spent[int(stages[node if node is not None else 0])] += costs[index]
    options = []
    for stage in range(len(bounds)):
        (head, tail), (first, last) = forward[stage], backward[stage]
        workspaces = [
            facts.graph.operations[simulation.order[p][0]].workspace_bytes
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
