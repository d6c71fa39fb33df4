"""Live intervals, the peak of a step, and what is alive there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxmem.graph import (
    Category,
    MemoryGraph,
    Node,
    Operation,
    Phase,
    SourceLocation,
    Storage,
)
from fxmem.memory.timeline import Timeline, sum_lives

_OF_PARAMETERS = (Category.GRADIENT, Category.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most live bytes.

    Attributes:
        nbytes: Live bytes there, workspace included.
        operation: The operator that was running.
        node: The node that it belongs to; in backward, the node it is the backward of.
        live: The storages alive, largest first, then in order of allocation.
        workspace_bytes: Scratch memory inside that operator's kernel.
        parameters: Names of those whose update it is part of; empty outside the optimizer.
    """

    nbytes: int
    operation: Operation
    node: Node | None
    live: tuple[Storage, ...]
    workspace_bytes: int
    parameters: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Index of the operation in the step."""
        return self.operation.index

    @property
    def phase(self) -> Phase:
        """The part of the step in which the peak lies."""
        return self.operation.phase

    @property
    def source(self) -> SourceLocation | None:
        """The user's own line."""
        return self.node.source if self.node else None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The live bytes of a step and its peak.

    Attributes:
        live_bytes: For each operation, the most bytes that are live while it runs.
        peak: The first moment with the most bytes.
    """

    live_bytes: tuple[int, ...]
    peak: Peak

    @property
    def breakdown(self) -> Mapping[Category, int]:
        """Bytes by category at the peak; they sum to ``peak.nbytes``."""
        totals = dict.fromkeys(Category, 0)
        for storage in self.peak.live:
            totals[storage.category] += storage.nbytes
        totals[Category.WORKSPACE] += self.peak.workspace_bytes
        return totals


def build_profile(graph: MemoryGraph, timeline: Timeline) -> MemoryProfile:
    """The live bytes of every operation, the peak, and its live set.

    Args:
        graph: The memory graph of the step.
        timeline: That graph's timeline.
    """
    live_bytes = timeline.profile()
    step = live_bytes.index(max(live_bytes))
    operation = graph.operations[step]
    live = sorted(find_live(graph, step), key=lambda s: (-s.nbytes, s.index))
    peak = Peak(
        nbytes=live_bytes[step],
        operation=operation,
        node=None if operation.node is None else graph.nodes[operation.node],
        live=tuple(live),
        workspace_bytes=operation.workspace_bytes,
        parameters=find_updated(graph, operation),
    )
    return MemoryProfile(live_bytes, peak)


def list_category_bytes(graph: MemoryGraph) -> Mapping[Category, tuple[int, ...]]:
    """The live bytes of each category while each operation runs, its workspace included.

    They sum to :attr:`MemoryProfile.live_bytes`.

    Args:
        graph: The memory graph of the step.
    """
    lives: dict[Category, list[tuple[int, int, int | None]]] = {c: [] for c in Category}
    for storage in graph.storages:
        lives[storage.category].append((storage.nbytes, storage.born, storage.died))
    lives[Category.WORKSPACE] += ((o.workspace_bytes, o.index, o.index) for o in graph.operations)
    steps = len(graph.operations)
    return {category: tuple(sum_lives(each, steps)) for category, each in lives.items()}


def find_live(graph: MemoryGraph, step: int) -> tuple[Storage, ...]:
    """The storages that are alive while an operation runs, its own results included."""
    return tuple(s for s in graph.storages if s.born <= step and (s.died is None or s.died >= step))


def find_updated(graph: MemoryGraph, operation: Operation) -> tuple[str, ...]:
    """Finds the parameters whose update an operation of the optimizer is part of.

    The parameters whose value, gradient or state the operation reads; where it reads none, the
    parameters that its arguments were computed from.

    Args:
        graph: The memory graph of the step.
        operation: One of its operations.

    Returns:
        Their names, in the order of reading; empty outside the optimizer.
    """
    if operation.phase is not Phase.OPTIMIZER:
        return ()
    seen: set[int] = set()
    reads = list(operation.reads)
    while reads:
        storages = [graph.storages[index] for index in reads if index not in seen]
        seen.update(reads)
        owners = dict.fromkeys(filter(None, map(_find_owner, storages)))
        if owners:
            return tuple(owners)
        made_by = [graph.operations[s.born] for s in storages if s.born > 0]
        reads = [i for o in made_by if o.phase is Phase.OPTIMIZER for i in o.reads]
    return ()


def _find_owner(storage: Storage) -> str:
    if storage.category is Category.PARAMETER:
        return storage.name
    # "fc.weight.grad", "fc.weight.exp_avg"
    return storage.name.rpartition(".")[0] if storage.category in _OF_PARAMETERS else ""
