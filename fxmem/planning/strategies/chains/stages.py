"""A step as a chain of stages, each with several ways to run it, for the chain's solver.

Boundaries lie where little crosses. The ways to run a stage differ in what is recomputed inside it
(``option_fronts``); what each then holds is not estimated but read off the simulated step
(``segment_memory``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.strategies.chains.chain import Chain, Kept, Schedule, Stage, StageOption
from fxmem.planning.strategies.chains.option_fronts import list_stage_options
from fxmem.planning.strategies.chains.segment_memory import measure_edges, measure_options

_STAGES = (48, 32, 20, 12, 8)
"""How many stages there may be, in one cut after the other."""
_LEVELS = (1, 2, 3)
"""How many numbers of a module's name make a block."""
_MOST_STAGES = 200
_NEVER = 1e9
"""Seconds: what must not be computed again."""


@dataclass(frozen=True, slots=True)
class StageRange:
    """A stage by its nodes.

    Attributes:
        start: Its first node.
        stop: The node after its last.
        options: For each way to run it, the segments in it.
    """

    start: int
    stop: int
    options: tuple[tuple[SegmentRange, ...], ...]


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

    def list_segments(self, schedule: Schedule) -> tuple[SegmentRange, ...]:
        """The segments that run a schedule."""
        segments: list[SegmentRange] = []
        for entry in schedule:
            if isinstance(entry, Kept):
                segments += self.ranges[entry.stage].options[entry.option]
                continue
            start, stop = self.ranges[entry.start].start, self.ranges[entry.stop - 1].stop
            inner = self.list_segments(entry.body)
            if any((child.start, child.stop) == (start, stop) for child in inner):
                segments += inner
            else:
                segments.append(SegmentRange(start, stop, inner))
        return tuple(segments)


def measure_frontiers(step: StepIndex) -> list[int]:
    """For each position between nodes, the bytes that cross it: made before, used after.

    What the model returns is held anyway and does not count.

    Args:
        step: The step.

    Returns:
        At index ``n``, what crosses between the nodes ``n - 1`` and ``n``.
    """
    deltas = [0] * (step.nodes + 2)
    for made in step.made:
        used = [*made.readers, *(s.node for s in made.saves if s.node is not None)]
        last = min(max(used, default=made.node), step.nodes)
        if last > made.node and not made.is_output:
            deltas[made.node + 1] += made.nbytes
            deltas[last + 1] -= made.nbytes
    crossing, at = [], 0
    for delta in deltas[: step.nodes + 1]:
        at += delta
        crossing.append(at)
    return crossing


def list_cuts(step: StepIndex, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """The first nodes of stages, for several ways to cut the step, each once."""
    cuts = [find_blocks(step, limits, level) for level in _LEVELS]
    cuts += [find_boundaries(step, limits, most) for most in _STAGES]
    return tuple(cut for cut in dict.fromkeys(map(tuple, cuts)) if len(cut) <= _MOST_STAGES)


def find_boundaries(step: StepIndex, limits: Limits, most: int) -> list[int]:
    """Where stages begin: positions that less crosses than others near them.

    Args:
        step: The step.
        limits: Where no segment may begin.
        most: How many stages there may be.

    Returns:
        Ascending; the first is the first node that is no placeholder.
    """
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
    """Where stages begin: at modules that are counted, such as ``layer1.0`` or ``denselayer3``.

    Args:
        step: The step.
        limits: Where no segment may begin.
        level: How many numbers of a module's name count.

    Returns:
        Ascending; the first is the first node that is no placeholder.
    """
    nodes = step.graph.nodes[: step.nodes]
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
    step: StepIndex, limits: Limits, costs: Sequence[float], starts: Sequence[int]
) -> StagedStep:
    """Cuts a step into stages with their options.

    Args:
        step: The step.
        limits: What may not be computed again.
        costs: Of each operation, by its index.
        starts: The first node of each stage, ascending.
    """
    bounds = [*zip(starts, [*starts[1:], step.nodes], strict=True)]
    sweeps = list_stage_options(step, limits, costs, bounds)
    levels = max(map(len, sweeps))
    found: list[dict[tuple[SegmentRange, ...], StageOption]] = [{} for _ in bounds]
    plain = simulate_segments(step, ())
    edges = measure_edges(step, bounds, plain)
    for level in range(levels):
        chosen = [sweep[min(level, len(sweep) - 1)] for sweep in sweeps]
        simulation = simulate_segments(
            step, [segment for segments in chosen for segment in segments]
        )
        measured = measure_options(step, bounds, simulation, costs, edges)
        for known, segments, option in zip(found, chosen, measured, strict=True):
            known.setdefault(segments, option)
    ranges = tuple(
        StageRange(start, stop, tuple(known))
        for (start, stop), known in zip(bounds, found, strict=True)
    )
    base = min(edges.held)
    crossing = measure_frontiers(step)
    stages = tuple(
        Stage(
            input_bytes=0 if index == 0 else crossing[start],
            gradient_bytes=edges.gradients[index],
            cost=_price_nodes(step, limits, costs, start, stop),
            options=tuple(known.values()),
            forward_peak_bytes=edges.forward_peaks[index],
            held_bytes=edges.held[index] - base,
        )
        for index, ((start, stop), known) in enumerate(zip(bounds, found, strict=True))
    )
    return StagedStep(ranges, Chain(stages), base)


def _price_nodes(
    step: StepIndex, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> float:
    if any(node in limits.fixed for node in range(start, stop)):
        return _NEVER
    return sum(costs[o.index] for o in step.list_operations(start, stop))
