"""The nodes and storages of a step as plans look them up."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Save


@dataclass(frozen=True, slots=True)
class Activation:
    """A storage that forward made."""

    index: int  # index of the storage
    nbytes: int
    born: int  # index of the operation that made it
    node: int  # index of that operation's node
    # indices of the nodes that read it, without its own; ascending. None of a cast that
    # autocast keeps: nobody hands it to them.
    readers: tuple[int, ...]
    # the operation after which its own node frees it; where forward's frames are the user's,
    # the operation after which they do
    local_end: int
    saves: tuple[Save, ...]  # each time that autograd keeps it
    # index of the operation to which something else than autograd and forward's own frames
    # holds it; None where nothing does
    held_to: int | None
    is_output: bool  # whether it outlives the step
    # whether a recomputation holds it to its end: a weight's cast, which autocast keeps until
    # it exits, or a number's tensor, which no checkpoint sees autograd keep
    fills_run: bool
    # calls of modules that are given it, each as its first and its last node, where modules
    # are wrapped: a checkpoint of one holds all arguments, used or not
    consumers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A step as plans see it."""

    graph: MemoryGraph
    first_operation: tuple[int, ...]  # by node, the index of its first operation of forward
    end_operation: tuple[int, ...]  # by node, the index after its last
    made: tuple[Activation, ...]  # the storages that forward made in nodes, by birth
    saves_by_node: tuple[tuple[Save, ...], ...]
    nodes: int  # the number of forward's nodes; loss comes after
    # by node, the indices of the buffers that its batch normalisation updates
    statistics: tuple[tuple[int, ...], ...]
    # by node, the other buffers that it changes, as spectral normalisation does: a
    # recomputation must begin with what they were
    states: tuple[tuple[int, ...], ...]
    makers: Mapping[int, Activation]  # ``made`` by the index of the storage
    # operations of forward, each with a weight's cast that it reads and autocast keeps;
    # ascending
    casts: tuple[tuple[int, int], ...]
    # whether forward stays the user's own code, whose variables hold values as they did in
    # the step; else a rewritten graph's, each of which goes after its last use
    keeps_frames: bool

    def find_activations(self, first: int, stop: int) -> range:
        """Finds the positions in ``made`` of what operations make."""
        born = attrgetter("born")
        at = bisect_left(self.made, first, key=born)
        return range(at, bisect_left(self.made, stop, lo=at, key=born))

    def list_activations(self, first: int, stop: int) -> tuple[Activation, ...]:
        positions = self.find_activations(first, stop)
        return self.made[positions.start : positions.stop]

    def list_operations(self, start: int, stop: int) -> tuple[Operation, ...]:
        """Lists the operations of forward of the nodes from ``start`` up to ``stop``."""
        end = self.end_operation[stop - 1] if stop > start else self.first_operation[start]
        return self.graph.operations[self.first_operation[start] : end]

    def find_node(self, operation: int) -> int:
        """Finds the node of forward that an operation belongs to."""
        return bisect_left(self.end_operation, operation + 1)


def build_index(graph: MemoryGraph, *, keeps_frames: bool = False) -> StepIndex:
    """Builds the index of a step, for plans that leave forward the user's own code or do not."""
    first, end = _find_ranges(graph)
    nodes = sum(node.phase is Phase.FORWARD for node in graph.nodes)
    owners = {at: node for node in range(nodes) for at in range(first[node], end[node])}
    saves_by_node: list[list[Save]] = [[] for _ in graph.nodes]
    for save in graph.saves:
        if save.node is not None:
            saves_by_node[save.node].append(save)
    made = _list_made(graph, owners, first, end, keeps_frames)
    cached = {storage.index for storage in graph.storages if storage.cast_until is not None}
    operations = [graph.operations[first[node] : end[node]] for node in range(nodes)]
    changed = [_find_changed_buffers(graph, ran) for ran in operations]
    return StepIndex(
        graph=graph,
        first_operation=first,
        end_operation=end,
        made=tuple(made),
        saves_by_node=tuple(map(tuple, saves_by_node)),
        nodes=nodes,
        statistics=tuple(statistics for statistics, _ in changed),
        states=tuple(states for _, states in changed),
        makers={activation.index: activation for activation in made},
        casts=tuple(
            (at, index) for at in owners for index in graph.operations[at].reads if index in cached
        ),
        keeps_frames=keeps_frames,
    )


def _find_ranges(graph: MemoryGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds, by node, its operations in forward; one between two nodes goes to the earlier."""
    phases = (Phase.FORWARD, Phase.LOSS)
    operations = graph.operations
    stop = next((o.index for o in operations if o.phase not in phases), len(operations))
    starts: dict[int, int] = {}
    for operation in operations:
        if operation.node is not None and operation.phase in phases:
            starts.setdefault(operation.node, operation.index)
    first: list[int] = []
    for node in reversed(range(len(graph.nodes))):
        first.append(starts.get(node, first[-1] if first else stop))
    first.reverse()
    return tuple(first), (*first[1:], stop)


def _list_made(
    graph: MemoryGraph,
    owners: Mapping[int, int],
    first: Sequence[int],
    end: Sequence[int],
    keeps_frames: bool,
) -> list[Activation]:
    """Lists the storages that forward's nodes make, by birth; ``owners`` by operation."""
    readers: dict[int, dict[int, int]] = {}  # by storage, each node's last operation that reads it
    for at, node in owners.items():
        for index in (*graph.operations[at].reads, *graph.operations[at].writes):
            readers.setdefault(index, {})[node] = at
    for consumer in graph.nodes:
        if consumer.phase is Phase.FORWARD and first[consumer.index] == end[consumer.index]:
            # It hands on what it takes, as nn.Identity does.
            for index in (i for source in consumer.inputs for i in graph.nodes[source].results):
                readers.setdefault(index, {})[consumer.index] = end[consumer.index] - 1
    saves: dict[int, list[Save]] = {}
    for save in graph.saves:
        saves.setdefault(save.storage, []).append(save)
    consumers: dict[int, list[tuple[int, int]]] = {}
    for call in graph.calls if keeps_frames else ():
        for index in call.inputs if call.stop > call.start else ():
            consumers.setdefault(index, []).append((call.start, call.stop - 1))
    made = []
    for storage in sorted(graph.storages, key=attrgetter("born")):
        if storage.born not in owners:
            continue
        index, node = storage.index, owners[storage.born]
        kept, given = tuple(saves.get(index, ())), tuple(consumers.get(index, ()))
        is_cached = storage.cast_until is not None
        others = () if is_cached else tuple(sorted(readers.get(index, {}).keys() - {node}))
        local_end = end[node] - 1
        if index not in graph.nodes[node].results:
            if storage.died is not None and storage.died <= local_end:
                local_end = storage.died  # C++ holds temporaries to the end of their expression
            else:
                local_end = max(storage.born, readers.get(index, {}).get(node, 0))
        if keeps_frames:
            let_go = graph.let_go[index] if graph.let_go else None
            if let_go is None:
                users = (*others, *(start for start, _ in given))
                let_go = max([storage.born, *(end[user] - 1 for user in users)])
            local_end = max(local_end, let_go)
        held_to = storage.cast_until
        if storage.died is not None and graph.operations[storage.died].phase is not Phase.FORWARD:
            # What backward never comes to, as of a sort whose values nobody uses, goes with the
            # rest.
            released = max((s.released for s in kept if s.released is not None), default=-1)
            held_to = storage.cast_until if storage.died <= released else storage.died
        made.append(
            Activation(
                index=index,
                nbytes=storage.nbytes,
                born=storage.born,
                node=node,
                readers=others,
                local_end=local_end,
                saves=kept,
                held_to=held_to,
                is_output=storage.died is None,
                fills_run=is_cached or any(save.node is None for save in kept),
                consumers=given,
            )
        )
    return made


def is_batch_norm(operation: Operation) -> bool:
    """Returns whether an operator is a batch normalisation, which updates running statistics."""
    return "batch_norm" in operation.name


def _find_changed_buffers(
    graph: MemoryGraph, operations: Iterable[Operation]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds the statistics of a node's batch normalisation, or the other states it changes."""
    is_norm = any(map(is_batch_norm, operations))
    touched = dict.fromkeys(
        index for o in operations for index in (*(o.reads if is_norm else ()), *o.writes)
    )
    buffers = [i for i in touched if graph.storages[i].category is Category.BUFFER]
    if is_norm:
        return tuple(buffers), ()
    names = {i: graph.storages[i].name for i in buffers if graph.storages[i].born == RESIDENT}
    # A buffer that a module holds under a name.
    return (), tuple(i for i, name in names.items() if re.fullmatch(r"[\w.]+", name))
