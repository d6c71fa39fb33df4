"""A step as a chain of stages, each with several ways to run it, for the chain's solver.

Boundaries lie where little crosses. The ways to run a stage differ in what is recomputed inside it
(``options``); what each then holds is not estimated but read off the simulated step
(``stage_memory``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segments import SegmentRange, Segments
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.strategies.chains.chain import Chain, Kept, Schedule, Stage, StageOption
from fxmem.planning.strategies.chains.options import list_options
from fxmem.planning.strategies.chains.stage_memory import measure_edges, measure_options

_STAGES = (48, 32, 20, 12, 8)
"""Most stages, in one cut after the other."""
_LEVELS = (1, 2, 3)
"""Numbers of a module's name that make a block."""
_MOST_STAGES = 200
_NEVER = 1e9
"""The price of what may not be recomputed."""


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step cut into stages.

    Attributes:
        bounds: By stage, its first node and the node after its last.
        options: By stage, the segments of each way to run it.
        chain: What the stages hold and cost, without what is taken all the time.
    """

    bounds: tuple[tuple[int, int], ...]
    options: tuple[tuple[Segments, ...], ...]
    chain: Chain

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

    Args:
        step: The step.
        limits: Where no segment may begin.
        level: How many numbers of a module's name count.
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


def cut_step(
    step: StepIndex, limits: Limits, costs: Sequence[float], starts: Sequence[int]
) -> StagedStep:
    """Cuts a step into stages with their options.

    Args:
        step: The step.
        limits: The nodes that may not be recomputed.
        costs: Of each operation, by its index.
        starts: The first node of each stage, ascending.
    """
    bounds = tuple(zip(starts, [*starts[1:], step.nodes], strict=True))
    ways = [list_options(step, limits, costs, start, stop) for start, stop in bounds]
    simulation = simulate_segments(step, ())
    edges = measure_edges(step, bounds, simulation)
    found: list[dict[Segments, StageOption]] = [{} for _ in bounds]
    for level in range(max(map(len, ways))):  # at the first nothing is recomputed
        chosen = [options[min(level, len(options) - 1)] for options in ways]
        if level:
            simulation = simulate_segments(step, [s for segments in chosen for s in segments])
        measured = measure_options(step, bounds, simulation, costs, edges)
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
