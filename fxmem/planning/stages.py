"""A step as a chain of stages, each with several ways to run it, for the chain's solver.

Boundaries lie where little crosses. The ways to run a stage differ in what is computed again
inside it (:mod:`fxmem.planning.sweeps`); what each then holds is not estimated but read off the
simulated step (:mod:`fxmem.planning.holdings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.planning.chain import Chain, Kept, Schedule, Stage, StageOption
from fxmem.planning.facts import StepFacts
from fxmem.planning.holdings import measure_edges, measure_options
from fxmem.planning.limits import Limits
from fxmem.planning.regions import Region
from fxmem.planning.simulation import simulate_regions
from fxmem.planning.sweeps import sweep_stages

MAX_STAGES = 48
_NEVER = 1e9
"""Seconds: what must not be computed again."""


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
    crossing = np.full(facts.nodes, np.inf)
    crossing[first + 1 :] = measure_frontiers(facts)[first + 1 : facts.nodes]
    crossing[[node for node in limits.starts if node < facts.nodes]] = np.inf
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
    sweeps = sweep_stages(facts, limits, costs, bounds)
    levels = max(map(len, sweeps))
    found: list[dict[tuple[Region, ...], StageOption]] = [{} for _ in bounds]
    plain = simulate_regions(facts, ())
    edges = measure_edges(facts, bounds, plain)
    for level in range(levels):
        chosen = [sweep[min(level, len(sweep) - 1)] for sweep in sweeps]
        simulation = simulate_regions(facts, [region for regions in chosen for region in regions])
        measured = measure_options(facts, bounds, simulation, costs, edges)
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


def _price_nodes(
    facts: StepFacts, limits: Limits, costs: Sequence[float], start: int, stop: int
) -> float:
    if any(node in limits.fixed for node in range(start, stop)):
        return _NEVER
    return sum(costs[o.index] for o in facts.list_operations(start, stop))
