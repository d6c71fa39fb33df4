"""What a plan's simulation asks of a memory graph again and again, looked up once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Save, Storage

RANDOM_STATE_BYTES = 5056
"""Of the CPU's generator: ``torch.get_rng_state().nbytes``."""


@dataclass(frozen=True, slots=True)
class Made:
    """A storage that forward made.

    Attributes:
        index: Index of the storage.
        nbytes: Its size.
        born: Index of the operation that made it.
        node: Index of the node that operation belongs to.
        readers: Indices of the nodes that read it, without its own; ascending.
        local_end: The operation after which its own node lets go of it; where forward's frames
            are the user's, that after which they do.
        saves: Each time that autograd keeps it.
        held_to: Index of the operation to which something else than autograd and forward's own
            frames holds it; None where nothing does.
        is_output: Whether it outlives the step.
        is_cached: Whether it is a parameter's cast that autocast keeps until it exits: forward's
            to the end of loss, a region's own to the end of its run.
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


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step as plans see it.

    Attributes:
        graph: The step as it was recorded.
        first_operation: By node, the index of its first operation of forward.
        end_operation: By node, the index after its last; the same where it runs none.
        made: The storages that forward made in nodes.
        saves_by_node: By node, what autograd keeps of it.
        nodes: How many nodes of forward there are; loss comes after.
        statistics: By node, the indices of the buffers that its batch normalisation updates.
        states: By node, those of what else of its modules it changes, as spectral normalisation
            does: computed again, it must begin with what they were.
        draws: By node, whether it may draw random numbers: operators that do, and dropout modules,
            whose share may be set later.
        random_state: The state of the random number generator as a checkpoint keeps it; None
            where it lies in other memory than the step.
        makers: ``made`` by the index of the storage.
        births: When each of ``made`` is born; ascending.
        keeps_frames: Whether forward stays the user's own code, whose variables hold values as
            they did in the step; else a rewritten graph's, each of which goes after its last use.
    """

    graph: MemoryGraph
    first_operation: tuple[int, ...]
    end_operation: tuple[int, ...]
    made: tuple[Made, ...]
    saves_by_node: tuple[tuple[Save, ...], ...]
    nodes: int
    statistics: tuple[tuple[int, ...], ...]
    states: tuple[tuple[int, ...], ...]
    draws: tuple[bool, ...]
    random_state: Storage | None
    makers: Mapping[int, Made]
    births: tuple[int, ...]
    keeps_frames: bool = False

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Those of the step, and what checkpoints add."""
        return (*self.graph.storages, *((self.random_state,) if self.random_state else ()))

    def list_made(self, first: int, stop: int) -> tuple[Made, ...]:
        """The storages made by the operations from one to another, which is left out."""
        return self.made[bisect_left(self.births, first) : bisect_left(self.births, stop)]

    def list_operations(self, start: int, stop: int) -> tuple[Operation, ...]:
        """The operations of forward of the nodes from one to another, which is left out."""
        end = self.end_operation[stop - 1] if stop > start else self.first_operation[start]
        return self.graph.operations[self.first_operation[start] : end]


def gather_facts(
    graph: MemoryGraph,
    *,
    counts_host: bool = False,
    autocast: bool = False,
    keeps_frames: bool = False,
) -> StepFacts:
    """Looks up what plans ask of a step.

    Args:
        graph: A step as it was recorded, without accumulation of gradients.
        counts_host: Whether what lies in the host's memory counts.
        autocast: Whether forward and loss are autocast.
        keeps_frames: Whether plans leave forward the user's own code.
    """
    first, end = _find_ranges(graph)
    nodes = sum(node.phase is Phase.FORWARD for node in graph.nodes)
    owner = {index: node for node in range(nodes) for index in range(first[node], end[node])}
    readers: dict[int, dict[int, int]] = {}  # storage -> node -> its last operation that reads it
    for operation in graph.operations:
        if operation.index in owner:
            for index in (*operation.reads, *operation.writes):
                readers.setdefault(index, {})[owner[operation.index]] = operation.index
    for taker in graph.nodes[:nodes]:
        if first[taker.index] == end[taker.index]:  # it hands on what it takes, as nn.Identity does
            for index in (i for source in taker.inputs for i in graph.nodes[source].results):
                readers.setdefault(index, {})[taker.index] = end[taker.index] - 1
    if keeps_frames:
        for call in graph.calls:  # whose checkpoint would hold all arguments, used or not
            for index in call.inputs if call.stop > call.start else ():
                readers.setdefault(index, {}).setdefault(call.start, end[call.start] - 1)
    saves: dict[int, list[Save]] = {}
    saves_by_node: list[list[Save]] = [[] for _ in graph.nodes]
    for save in graph.saves:
        saves.setdefault(save.storage, []).append(save)
        if save.node is not None:
            saves_by_node[save.node].append(save)
    autocast_exit = end[-1] - 1 if end else 0
    made = []
    for storage in graph.storages:
        if storage.born == RESIDENT or storage.born not in owner:
            continue
        node = owner[storage.born]
        by_node = readers.get(storage.index, {})
        own_end = end[node] - 1
        kept = tuple(saves.get(storage.index, ()))
        if storage.index not in graph.nodes[node].results:
            own_end = max(storage.born, by_node.get(node, 0))
            if storage.died is not None and storage.died <= end[node] - 1:
                own_end = storage.died  # C++ holds temporaries to the end of their expression
        if keeps_frames:
            own_end = max(own_end, _find_frames_end(graph, storage, [*by_node.values()]))
        is_cached = autocast and _is_cast(graph, storage)
        held_to = _find_other_holder(graph, storage.died, kept)
        made.append(
            Made(
                index=storage.index,
                nbytes=storage.nbytes,
                born=storage.born,
                node=node,
                readers=tuple(sorted(by_node.keys() - {node})),
                local_end=own_end,
                saves=kept,
                held_to=max(held_to or 0, autocast_exit) if is_cached else held_to,
                is_output=storage.died is None,
                is_cached=is_cached,
            )
        )
    state = Storage(
        index=len(graph.storages),
        nbytes=RANDOM_STATE_BYTES,
        category=Category.WORKSPACE,
        name="random number generator's state",
        shape=(RANDOM_STATE_BYTES,),
        dtype="uint8",
        born=RESIDENT,
        died=None,
    )
    made.sort(key=lambda storage: storage.born)
    return StepFacts(
        graph=graph,
        first_operation=first,
        end_operation=end,
        made=tuple(made),
        saves_by_node=tuple(map(tuple, saves_by_node)),
        nodes=nodes,
        statistics=tuple(
            _find_statistics(graph, graph.operations[first[node] : end[node]])
            for node in range(nodes)
        ),
        states=tuple(
            _find_states(graph, graph.operations[first[node] : end[node]]) for node in range(nodes)
        ),
        draws=tuple(
            "Dropout" in graph.nodes[node].target
            or any(o.effect is not None for o in graph.operations[first[node] : end[node]])
            for node in range(nodes)
        ),
        random_state=state if counts_host else None,
        makers={storage.index: storage for storage in made},
        births=tuple(storage.born for storage in made),
        keeps_frames=keeps_frames,
    )


def is_batch_norm(operation: Operation) -> bool:
    """Whether an operator is one of the batch normalisations, which update running statistics."""
    return "batch_norm" in operation.name


def _find_statistics(graph: MemoryGraph, operations: tuple[Operation, ...]) -> tuple[int, ...]:
    if not any(is_batch_norm(operation) for operation in operations):
        return ()
    read = (index for o in operations for index in (*o.reads, *o.writes))
    return tuple(
        index for index in dict.fromkeys(read) if graph.storages[index].category is Category.BUFFER
    )


def _find_states(graph: MemoryGraph, operations: tuple[Operation, ...]) -> tuple[int, ...]:
    if any(is_batch_norm(operation) for operation in operations):
        return ()
    written = dict.fromkeys(index for operation in operations for index in operation.writes)
    return tuple(index for index in written if _is_state(graph.storages[index]))


def _is_state(storage: Storage) -> bool:
    """Whether a storage is one that a module holds under a name, and no parameter."""
    return (
        storage.born == RESIDENT
        and storage.category is Category.BUFFER
        and all(part.isidentifier() or part.isdigit() for part in storage.name.split("."))
    )


def _is_cast(graph: MemoryGraph, storage: Storage) -> bool:
    """Whether a storage is a cast of a parameter, which autocast keeps.

    Source: ``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``.
    """
    operation = graph.operations[storage.born]
    return operation.name == "aten._to_copy.default" and all(
        graph.storages[index].category is Category.PARAMETER for index in operation.reads
    )


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


def _find_frames_end(graph: MemoryGraph, storage: Storage, reads: list[int]) -> int:
    """The operation after which the user's variables do not hold a storage."""
    let_go = graph.let_go[storage.index] if graph.let_go else None
    return max([storage.born, *reads]) if let_go is None else let_go


def _find_other_holder(graph: MemoryGraph, died: int | None, saves: tuple[Save, ...]) -> int | None:
    if died is None or graph.operations[died].phase is Phase.FORWARD:
        return None
    # What backward never comes to, as of a sort whose values nobody uses, went with those.
    released = [save.released for save in saves if save.released is not None]
    return None if died <= max(released, default=-1) else died


def find_node(facts: StepFacts, operation: int) -> int:
    """The node of forward that an operation belongs to."""
    return bisect_left(facts.end_operation, operation + 1)
