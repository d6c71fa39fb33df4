"""A step as a chain of stages, each with several ways to run it, for the chain's solver.

Boundaries lie where little crosses. The ways to run a stage differ in what is recomputed inside
it; what each then holds is not estimated but read off the simulated step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import numpy as np

from fxmem.graph import RESIDENT, Category, Phase
from fxmem.memory.timeline import sum_lives
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.recomputation import SegmentRange, Segments
from fxmem.planning.model.simulate import Simulation, simulate_segments
from fxmem.planning.strategies.chain import Chain, Kept, Schedule, Stage, StageOption

_STAGES = (48, 32, 20, 12, 8)  # at most, in one cut after the other
_LEVELS = (1, 2, 3)  # numbers of a module's name that make a block
_MOST_STAGES = 200
_NEVER = 1e9  # the price of what may not be recomputed
_MAX_NODES = 80
"""Runs of nodes within a stage are compared in pairs; longer stages are swept coarsely."""
_PRICES = 10
_Run = tuple[int, int, int, float]
"""A segment's first node, the node after its last, the bytes it frees, what it costs."""
_Bounds = Sequence[tuple[int, int]]
"""By stage, its first node and the node after its last."""
_Life = tuple[int, int, int | None]
"""Bytes of a storage, and the first and the last operation while it is live."""


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step cut into stages."""

    bounds: tuple[tuple[int, int], ...]  # by stage, its first node and the node after its last
    options: tuple[tuple[Segments, ...], ...]  # by stage, the segments of each way to run it
    chain: Chain  # what the stages hold and cost, without what is taken all the time

    def list_segments(self, schedule: Schedule) -> Segments:
        """Lists the segments that run a schedule."""
        segments: list[SegmentRange] = []
        for entry in schedule:
            if isinstance(entry, Kept):
                segments += self.options[entry.stage][entry.option]
                continue
            start, stop = self.bounds[entry.start][0], self.bounds[entry.stop - 1][1]
            inner = self.list_segments(entry.body)
            if any((child.start, child.stop) == (start, stop) for child in inner):
                segments += inner
            else:
                segments.append(SegmentRange(start, stop, inner))
        return tuple(segments)


def measure_frontiers(step: StepIndex) -> list[int]:
    """Measures the bytes that cross from the nodes before each index to those from it on.

    What the model returns is held anyway and does not count.
    """
    lives = []
    for made in step.made:
        used = [*made.readers, *(s.node for s in made.saves if s.node is not None)]
        last = min(max(used, default=made.node), step.nodes)
        if last > made.node and not made.is_output:
            lives.append((made.nbytes, made.node + 1, last))
    return sum_lives(lives, step.nodes + 1)


def list_cuts(step: StepIndex, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Lists ways to cut the step, each once, as the first nodes of its stages."""
    cuts = [find_blocks(step, limits, level) for level in _LEVELS]
    cuts += [find_boundaries(step, limits, most) for most in _STAGES]
    return tuple(cut for cut in dict.fromkeys(map(tuple, cuts)) if len(cut) <= _MOST_STAGES)


def find_boundaries(step: StepIndex, limits: Limits, most: int) -> list[int]:
    """Finds the first nodes of at most so many stages, where less crosses than near them."""
    first = sum(node.op == "placeholder" for node in step.graph.nodes)
    crossing = np.full(step.nodes, np.inf)
    crossing[first + 1 :] = measure_frontiers(step)[first + 1 : step.nodes]
    crossing[[node for node in limits.starts if node < step.nodes]] = np.inf
    allowed = np.isfinite(crossing)
    least, window = crossing, 1
    while True:
        # The least within a window more on both sides.
        padded = np.pad(least, 1, constant_values=np.inf)
        least = np.minimum(least, np.minimum(padded[:-2], padded[2:]))
        chosen = [first]
        for node in np.flatnonzero(allowed & (crossing == least)).tolist():
            if node - chosen[-1] >= window:
                chosen.append(node)
        if len(chosen) <= most:
            return chosen
        window += 1


def find_blocks(step: StepIndex, limits: Limits, level: int) -> list[int]:
    """Finds the first nodes of blocks: modules that are counted, as ``layer1.0``, ``denselayer3``.

    So many numbers of a module's name count as the level says.
    """

    def find_block(fqn: str) -> str:
        parts = fqn.split(".")
        numbers = [at for at, part in enumerate(parts) if part[-1:].isdigit()]
        return ".".join(parts[: numbers[min(level, len(numbers)) - 1] + 1]) if numbers else ""

    nodes = step.graph.nodes[: step.nodes]
    first = sum(node.op == "placeholder" for node in nodes)
    starts, block = [first], find_block(nodes[first].fqn)
    for node in nodes[first + 1 :]:
        other = find_block(node.fqn)
        if other != block and node.index not in limits.starts:
            starts.append(node.index)
            block = other
    return starts


def list_options(
    step: StepIndex, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> tuple[Segments, ...]:
    """Lists ways to run a stage, each once, from recomputing nothing to everything.

    For one price of a byte after the other, each run of nodes is weighed by what it would free
    against what its inputs take: the convex hull of the trade-off, as by minimum cuts.
    """
    runs = _list_runs(step, limits, costs, start, stop)
    found: dict[Segments, None] = {(): None}
    rates = [cost / nbytes for _, _, nbytes, cost in runs if nbytes > 0 and cost]
    if rates:
        for price in np.geomspace(min(rates) / 4, max(rates) * 4, _PRICES):
            found.setdefault(_choose_segments(runs, start, stop, float(price)))
    return tuple(found)


def _choose_segments(runs: Sequence[_Run], start: int, stop: int, price: float) -> Segments:
    """Chooses the segments that are worth most, where a byte is worth ``price``."""
    ending: dict[int, list[_Run]] = {}
    for run in runs:
        ending.setdefault(run[1], []).append(run)
    best: dict[int, float] = {start: 0.0}
    via: dict[int, _Run | None] = {}
    for node in range(start + 1, stop + 1):
        best[node], via[node] = best[node - 1], None
        for run in ending.get(node, ()):
            cost = best[run[0]] + run[3] - price * run[2]
            if cost < best[node]:
                best[node], via[node] = cost, run
    segments: list[SegmentRange] = []
    node = stop
    while node > start:
        last = via[node]
        if last is not None:
            segments.append(SegmentRange(last[0], last[1]))
        node = node - 1 if last is None else last[0]
    return tuple(reversed(segments))


def _list_runs(
    step: StepIndex, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> list[_Run]:
    """Lists the runs of nodes in a stage that may be a segment, and would free something.

    A segment frees what only its own nodes save, and holds its inputs for that.
    """
    first = step.first_operation
    base, end = first[start], step.end_operation[stop - 1]
    until = [0.0, *accumulate(costs[base:end])]
    stride = max(1, (stop - start) // _MAX_NODES)
    values = []  # the node that makes each, its bytes, readers, and the first node that saves it
    freed_at: dict[int, list[tuple[int, int]]] = {}  # by the last node that saves it
    for made in step.list_activations(base, end):
        if not made.is_output:
            savers = [stop if s.node is None else min(s.node, stop) for s in made.saves]
            values.append((made.node, made.nbytes, made.readers, min(savers, default=stop)))
            if savers:
                freed_at.setdefault(max(savers), []).append((min(savers), made.nbytes))
    runs: list[_Run] = []
    for head in range(start, stop, stride):
        if head in limits.starts or head in limits.fixed:
            continue
        taken: dict[int, int] = {}  # by the first node of a run from here that reads it
        for maker, nbytes, readers, saver in values:
            if maker < head <= saver:
                reader = next((node for node in readers if node >= head), stop)
                taken[reader] = taken.get(reader, 0) + nbytes
        freed, last = 0, first[head]
        for node in range(head, stop):
            if node in limits.fixed:
                break
            freed -= taken.get(node, 0)
            freed += sum(nbytes for saver, nbytes in freed_at.get(node, ()) if saver >= head)
            positions = (s.position for s in step.saves_by_node[node] if s.unpacked is not None)
            last = max([last, *positions])  # all that is saved is made once this has run
            if freed > 0 and ((node - start + 1) % stride == 0 or node + 1 == stop):
                runs.append((head, node + 1, freed, until[last - base] - until[first[head] - base]))
    return runs


def cut_step(
    step: StepIndex, limits: Limits, costs: Sequence[float], starts: Sequence[int]
) -> StagedStep:
    """Cuts a step before some nodes, in order, into stages with their options."""
    bounds = tuple(zip(starts, [*starts[1:], step.nodes], strict=True))
    ways = [list_options(step, limits, costs, start, stop) for start, stop in bounds]
    simulation = simulate_segments(step, ())
    edges = _measure_edges(step, bounds, simulation)
    found: list[dict[Segments, StageOption]] = [{} for _ in bounds]
    for level in range(max(map(len, ways))):  # at the first nothing is recomputed
        chosen = [options[min(level, len(options) - 1)] for options in ways]
        if level:
            simulation = simulate_segments(step, [s for segments in chosen for s in segments])
        measured = _measure_options(step, bounds, simulation, costs, edges)
        for known, segments, option in zip(found, chosen, measured, strict=True):
            known.setdefault(segments, option)
    crossing, base_bytes, stages = measure_frontiers(step), min(edges.held), []
    for index, (start, stop) in enumerate(bounds):
        is_fixed = any(node in limits.fixed for node in range(start, stop))
        stages.append(
            Stage(
                input_bytes=0 if index == 0 else crossing[start],
                gradient_bytes=edges.gradients[index],
                cost=_NEVER
                if is_fixed
                else sum(costs[o.index] for o in step.list_operations(start, stop)),
                options=tuple(found[index].values()),
                forward_peak_bytes=edges.forward_peaks[index],
                held_bytes=edges.held[index] - base_bytes,
            )
        )
    return StagedStep(bounds, tuple(map(tuple, found)), Chain(tuple(stages)))


@dataclass(frozen=True, slots=True)
class _Edges:
    gradients: tuple[int, ...]  # of its input
    held: tuple[int, ...]  # while backward stands there
    forward_peaks: tuple[int, ...]  # of a forward that saves nothing, above its input and output


def _measure_edges(step: StepIndex, bounds: _Bounds, simulation: Simulation) -> _Edges:
    """Measures what lies around stages in the step without a plan."""
    _, _, backward = _find_spans(step, bounds, simulation)
    made = {m.index for m in step.made if not m.is_output}
    passing, others = list[_Life](), list[_Life]()
    for life in simulation.lives:
        if life.storage in made:
            continue
        storage = step.graph.storages[life.storage]
        passes = life.born != RESIDENT and storage.category is not Category.GRADIENT
        passes = passes and step.graph.operations[storage.born].phase is Phase.BACKWARD
        (passing if passes else others).append((storage.nbytes, life.born, life.died))
    gradients, held = (sum_lives(each, len(simulation.order) + 1) for each in (passing, others))
    ends = [max(last, 0) for _, last in backward]
    return _Edges(
        gradients=(0, *(int(gradients[end + 1]) for end in ends[1:])),
        held=(*(int(held[end]) for end in ends[1:]), int(held[0])),
        forward_peaks=tuple(_measure_forward(step, start, stop) for start, stop in bounds),
    )


def _find_spans(
    step: StepIndex, bounds: _Bounds, simulation: Simulation
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
    lives, output = list[_Life](), 0
    for made in step.list_activations(first, end):
        last = max([made.local_end, *(step.end_operation[node] - 1 for node in made.readers)])
        lives.append((made.nbytes, made.born - first, last - first if last < end else None))
        output += made.nbytes if last >= end and not made.is_output else 0
    workspaces = [o.workspace_bytes for o in step.graph.operations[first:end]]
    live_bytes = map(add, sum_lives(lives, end - first), workspaces)
    return max(live_bytes, default=0) - output


def _measure_options(
    step: StepIndex, bounds: _Bounds, simulation: Simulation, costs: Sequence[float], edges: _Edges
) -> list[StageOption]:
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
