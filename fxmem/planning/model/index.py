"""What a plan's simulation asks of a memory graph again and again, looked up once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fxmem.graph import MemoryGraph, Operation, Phase, Save, Storage
from fxmem.planning.model.module_state import find_states, find_statistics, may_draw


@dataclass(frozen=True, slots=True)
class Activation:
    """A storage that forward made.

    Attributes:
        index: Index of the storage.
        nbytes: Its size.
        born: Index of the operation that made it.
        node: Index of the node that operation belongs to.
        readers: Indices of the nodes that read it, without its own; ascending. None of a cast that
            autocast keeps: nobody hands it to them.
        consumers: Calls of modules that are given it, each as its first and its last node, where
            modules are wrapped: a checkpoint of one holds all arguments, used or not.
        local_end: The operation after which its own node lets go of it; where forward's frames
            are the user's, that after which they do.
        saves: Each time that autograd keeps it.
        held_to: Index of the operation to which something else than autograd and forward's own
            frames holds it; None where nothing does.
        is_output: Whether it outlives the step.
        is_cached: Whether it is a weight's cast that autocast keeps until it exits.
        fills_run: Whether a segment's run holds it to its end: such a cast, or a number's tensor,
            which no checkpoint sees autograd keep.
    """

    index: int
    nbytes: int
    born: int
    node: int
    readers: tuple[int, ...]
    local_end: int
    saves: tuple[Save, ...]
    held_to: int | None
    is_output: bool
    is_cached: bool = False
    fills_run: bool = False
    consumers: tuple[tuple[int, int], ...] = ()

    def comes_into(self, nodes: range) -> bool:
        """Tells whether nodes in a row, all later than its own, are given it."""
        return any(node in nodes for node in self.readers) or any(
            first in nodes and last in nodes for first, last in self.consumers
        )


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A step as plans see it.

    Attributes:
        graph: The step as it was recorded.
        first_operation: By node, the index of its first operation of forward.
        end_operation: By node, the index after its last; the same where it runs none.
        made: The storages that forward made in nodes.
        saves_by_node: By node, what autograd keeps of it.
        casts: Operations of forward, each with a weight's cast that it reads and autocast keeps;
            ascending.
        nodes: How many nodes of forward there are; loss comes after.
        statistics: By node, the indices of the buffers that its batch normalisation updates.
        states: By node, those of what else of its modules it changes, as spectral normalisation
            does: computed again, it must begin with what they were.
        draws: By node, whether it may draw random numbers: operators that do, and dropout modules,
            whose share may be set later.
        makers: ``made`` by the index of the storage.
        births: When each of ``made`` is born; ascending.
        keeps_frames: Whether forward stays the user's own code, whose variables hold values as
            they did in the step; else a rewritten graph's, each of which goes after its last use.
    """

    graph: MemoryGraph
    first_operation: tuple[int, ...]
    end_operation: tuple[int, ...]
    made: tuple[Activation, ...]
    saves_by_node: tuple[tuple[Save, ...], ...]
    nodes: int
    statistics: tuple[tuple[int, ...], ...]
    states: tuple[tuple[int, ...], ...]
    draws: tuple[bool, ...]
    makers: Mapping[int, Activation]
    births: tuple[int, ...]
    casts: tuple[tuple[int, int], ...] = ()
    keeps_frames: bool = False

    def find_activations(self, first: int, stop: int) -> range:
        """Positions in ``made`` of what operations from one to another make; that is left out."""
        return range(bisect_left(self.births, first), bisect_left(self.births, stop))

    def list_activations(self, first: int, stop: int) -> tuple[Activation, ...]:
        """The storages made by the operations from one to another, which is left out."""
        positions = self.find_activations(first, stop)
        return self.made[positions.start : positions.stop]

    def list_operations(self, start: int, stop: int) -> tuple[Operation, ...]:
        """The operations of forward of the nodes from one to another, which is left out."""
        end = self.end_operation[stop - 1] if stop > start else self.first_operation[start]
        return self.graph.operations[self.first_operation[start] : end]


def build_index(
    graph: MemoryGraph,
    *,
    keeps_frames: bool = False,
) -> StepIndex:
    """Looks up what plans ask of a step.

    Args:
        graph: A step as it was recorded, without accumulation of gradients.
        keeps_frames: Whether plans leave forward the user's own code.
    """
    forward = _find_forward(graph)
    first, end = forward.first, forward.end
    readers = _find_readers(graph, forward)
    saves, saves_by_node = _group_saves(graph)
    made = sorted(
        (
            _describe_made(graph, forward, storage, readers.get(storage.index, {}), saves)
            for storage in graph.storages
            if storage.born in forward.owner
        ),
        key=lambda storage: storage.born,
    )
    if keeps_frames:
        consumers = _find_takers(graph)
        made = [_hold_in_frames(graph, m, tuple(consumers.get(m.index, ())), end) for m in made]
    operations = [graph.operations[first[node] : end[node]] for node in range(forward.nodes)]
    return StepIndex(
        graph=graph,
        first_operation=first,
        end_operation=end,
        made=tuple(made),
        saves_by_node=saves_by_node,
        nodes=forward.nodes,
        statistics=tuple(find_statistics(graph, ran) for ran in operations),
        states=tuple(find_states(graph, ran) for ran in operations),
        draws=tuple(map(may_draw, graph.nodes, operations)),
        makers={storage.index: storage for storage in made},
        births=tuple(storage.born for storage in made),
        casts=tuple(_find_casts(graph, forward)),
        keeps_frames=keeps_frames,
    )


def find_node(step: StepIndex, operation: int) -> int:
    """The node of forward that an operation belongs to."""
    return bisect_left(step.end_operation, operation + 1)


@dataclass(frozen=True, slots=True)
class _Forward:
    """Which operations are whose.

    Attributes:
        first: By node, the index of its first operation of forward.
        end: By node, the index after its last.
        nodes: How many nodes of forward there are.
        owner: By the index of an operation of theirs, the node.
    """

    first: tuple[int, ...]
    end: tuple[int, ...]
    nodes: int
    owner: Mapping[int, int]


def _find_forward(graph: MemoryGraph) -> _Forward:
    first, end = _find_ranges(graph)
    nodes = sum(node.phase is Phase.FORWARD for node in graph.nodes)
    owner = {index: node for node in range(nodes) for index in range(first[node], end[node])}
    return _Forward(first, end, nodes, owner)


def _find_ranges(graph: MemoryGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By node, its operations in forward; what runs between nodes goes to the one before it."""
    starts = [
        (operation.index, operation.node)
        for operation in graph.operations
        if operation.node is not None and operation.phase in (Phase.FORWARD, Phase.LOSS)
    ]
    stop = next(
        (o.index for o in graph.operations if o.phase not in (Phase.FORWARD, Phase.LOSS)),
        len(graph.operations),
    )
    first: list[int] = []
    by_node: dict[int, int] = {}
    for index, node in starts:
        by_node.setdefault(node, index)
    at = stop
    for node in reversed(range(len(graph.nodes))):
        at = by_node.get(node, at)
        first.append(at)
    first.reverse()
    return tuple(first), (*first[1:], stop)


def _find_readers(graph: MemoryGraph, forward: _Forward) -> dict[int, dict[int, int]]:
    """By storage, the nodes that read it, each with its last operation that does."""
    first, end, owner = forward.first, forward.end, forward.owner
    readers: dict[int, dict[int, int]] = {}
    for operation in graph.operations:
        if operation.index in owner:
            for index in (*operation.reads, *operation.writes):
                readers.setdefault(index, {})[owner[operation.index]] = operation.index
    for taker in graph.nodes[: forward.nodes]:
        if first[taker.index] == end[taker.index]:  # it hands on what it takes, as nn.Identity does
            for index in (i for source in taker.inputs for i in graph.nodes[source].results):
                readers.setdefault(index, {})[taker.index] = end[taker.index] - 1
    return readers


def _find_takers(graph: MemoryGraph) -> dict[int, list[tuple[int, int]]]:
    """By storage, the calls of modules that are given it."""
    consumers: dict[int, list[tuple[int, int]]] = {}
    for call in graph.calls:
        for index in call.inputs if call.stop > call.start else ():
            consumers.setdefault(index, []).append((call.start, call.stop - 1))
    return consumers


def _find_casts(graph: MemoryGraph, forward: _Forward) -> Iterator[tuple[int, int]]:
    """Operations of forward, each with a cast in autocast's cache that it reads."""
    kept = {storage.index for storage in graph.storages if storage.cast_until is not None}
    for operation in graph.operations if kept else ():
        if operation.index in forward.owner:
            yield from ((operation.index, index) for index in operation.reads if index in kept)


def _group_saves(
    graph: MemoryGraph,
) -> tuple[Mapping[int, list[Save]], tuple[tuple[Save, ...], ...]]:
    """What autograd keeps: by storage, and by node."""
    by_storage: dict[int, list[Save]] = {}
    by_node: list[list[Save]] = [[] for _ in graph.nodes]
    for save in graph.saves:
        by_storage.setdefault(save.storage, []).append(save)
        if save.node is not None:
            by_node[save.node].append(save)
    return by_storage, tuple(map(tuple, by_node))


def _describe_made(
    graph: MemoryGraph,
    forward: _Forward,
    storage: Storage,
    readers: Mapping[int, int],
    saves: Mapping[int, Sequence[Save]],
) -> Activation:
    """A storage as a rewritten graph without autocast has it."""
    node = forward.owner[storage.born]
    own_end = forward.end[node] - 1
    if storage.index not in graph.nodes[node].results:
        if storage.died is not None and storage.died <= own_end:
            own_end = storage.died  # C++ holds temporaries to the end of their expression
        else:
            own_end = max(storage.born, readers.get(node, 0))
    kept = tuple(saves.get(storage.index, ()))
    return Activation(
        index=storage.index,
        nbytes=storage.nbytes,
        born=storage.born,
        node=node,
        readers=tuple(sorted(readers.keys() - {node})) if storage.cast_until is None else (),
        local_end=own_end,
        saves=kept,
        held_to=_find_other_holder(graph, storage, kept),
        is_output=storage.died is None,
        is_cached=storage.cast_until is not None,
        fills_run=storage.cast_until is not None or any(save.node is None for save in kept),
    )


def _hold_in_frames(
    graph: MemoryGraph, made: Activation, consumers: tuple[tuple[int, int], ...], end: Sequence[int]
) -> Activation:
    """The same where the user's variables hold it."""
    let_go = graph.let_go[made.index] if graph.let_go else None
    if let_go is None:
        readers = (*made.readers, *(first for first, _ in consumers))
        let_go = max([made.born, *(end[node] - 1 for node in readers)])
    return replace(made, local_end=max(made.local_end, let_go), consumers=consumers)


def _find_other_holder(graph: MemoryGraph, storage: Storage, saves: tuple[Save, ...]) -> int | None:
    died = storage.died
    if died is None or graph.operations[died].phase is Phase.FORWARD:
        return storage.cast_until
    # What backward never comes to, as of a sort whose values nobody uses, went with those.
    released = [save.released for save in saves if save.released is not None]
    return storage.cast_until if died <= max(released, default=-1) else died
