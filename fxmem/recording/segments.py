"""Segments of a recording, which can be recorded once more at another place without running.

A segment is what was recorded between two marks: operations, storages, nodes, saves, and the
allocations and frees in their order. Moved elsewhere, each gets the number that it has there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fxmem.graph import Operation
from fxmem.recording.autograd import SaveRecord
from fxmem.recording.ledger import Event, LiveStorage
from fxmem.recording.recorder import NodeRecord, Recorder
from fxmem.tracing.nodes import NodeLog, TracedNode


class Mark(NamedTuple):
    """A place in a recording, by the number of operations and the like before it."""

    operations: int
    storages: int
    nodes: int
    saves: int
    events: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a recording, between two marks.

    Attributes:
        start: The first mark.
        stop: The second.
        operations: Its operations.
        storages: The storages that were made in it, without what happens to them later.
        nodes: Its nodes, each by the name of the first that calls the same.
        records: Measurements of the nodes, by index.
        saves: What autograd saved in it.
        runs: By the number of a function of autograd, the first and last operation of its backward
            and the last before it returned.
        events: Its allocations and frees.
        let_go: By storage, the operation in which the user's code let go of it.
    """

    start: Mark
    stop: Mark
    operations: tuple[Operation, ...]
    storages: tuple[LiveStorage, ...]
    nodes: tuple[TracedNode, ...]
    records: Mapping[int, NodeRecord]
    saves: tuple[SaveRecord, ...]
    runs: Mapping[int, tuple[int, int, int]]
    events: tuple[Event, ...]
    let_go: Mapping[int, int]


class Places(NamedTuple):
    """Numbers of what is recorded elsewhere.

    Attributes:
        operation: Finds the operation with a number.
        storage: Finds the storage.
        node: Finds the node.
        function: Finds the function of autograd.
    """

    operation: Callable[[int], int]
    storage: Callable[[int], int]
    node: Callable[[int], int]
    function: Callable[[int], int]


def read_mark(recorder: Recorder, log: NodeLog) -> Mark:
    """Reads where a recording is."""
    ledger, saves = recorder.ledger, recorder.autograd.saves
    parts = (recorder.operations, ledger.storages, log.nodes, saves, ledger.history)
    return Mark(*[len(part) for part in parts])


def read_segment(
    recorder: Recorder, log: NodeLog, start: Mark, stop: Mark, own: Container[int] = ()
) -> Segment:
    """Reads what was recorded between two marks; storages of `own` may have been made before."""
    ledger, autograd = recorder.ledger, recorder.autograd
    operations = range(start.operations, stop.operations)
    made = range(start.storages, stop.storages)
    others: dict[int, int] = {}
    events = []
    for serial, nbytes in ledger.history[start.events : stop.events]:
        index = None if serial is None else ledger.find_serial(serial)
        died = ledger.storages[index].died if index is not None and nbytes < 0 else None
        if index is None and serial is not None:
            index = others.setdefault(serial, ~len(others))
        events.append((index, nbytes, died))
    nodes = log.nodes[start.nodes : stop.nodes]
    records = recorder.node_records
    return Segment(
        start,
        stop,
        tuple(recorder.operations[start.operations : stop.operations]),
        tuple(
            replace(storage, died=None, death_rank=0, cast_until=None, saved_by=[*storage.saved_by])
            for storage in ledger.storages[start.storages : stop.storages]
        ),
        tuple(replace(node, name=node.first_name) for node in nodes),
        {node.index: records[node.index] for node in nodes if node.index in records},
        tuple(autograd.saves[start.saves : stop.saves]),
        {
            number: (first, last, autograd.returned.get(number, last))
            for number, (first, last) in autograd.ran.items()
            if first in operations
        },
        tuple(events),
        {
            index: at
            for index, at in recorder.user_references.let_go.items()
            if (at in operations or at + 1 == start.operations) and (index in made or index in own)
        },
    )


def move_segment(segment: Segment, start: Mark, places: Places) -> Segment:
    """Returns a segment as it would be recorded elsewhere."""
    operation, storage, node, function = places

    def move_node(index: int | None) -> int | None:
        return None if index is None else node(index)

    def move_storages(indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([storage(index) for index in indices])

    marks = zip(start, segment.start, segment.stop, strict=True)
    return Segment(
        start,
        Mark(*[at + after - before for at, before, after in marks]),
        tuple(
            replace(
                each,
                index=operation(each.index),
                node=move_node(each.node),
                reads=move_storages(each.reads),
                writes=move_storages(each.writes),
                overwritable=move_storages(each.overwritable),
            )
            for each in segment.operations
        ),
        tuple(
            replace(
                each,
                born=operation(each.born),
                node=move_node(each.node),
                saved_by=[*map(node, each.saved_by)],
            )
            for each in segment.storages
        ),
        tuple(
            replace(each, index=node(each.index), inputs=tuple(map(node, each.inputs)))
            for each in segment.nodes
        ),
        {
            node(index): replace(record, results=move_storages(record.results))
            for index, record in segment.records.items()
        },
        tuple(
            replace(
                each,
                storage=storage(each.storage),
                node=move_node(each.node),
                position=operation(each.position),
                sequence=function(each.sequence),
            )
            for each in segment.saves
        ),
        {
            function(number): (operation(first), operation(last), operation(returned))
            for number, (first, last, returned) in segment.runs.items()
        },
        tuple(
            (
                index if index is None or index < 0 else storage(index),
                nbytes,
                None if died is None else operation(died),
            )
            for index, nbytes, died in segment.events
        ),
        {storage(index): operation(at) for index, at in segment.let_go.items()},
    )


def insert_segment(recorder: Recorder, log: NodeLog, segment: Segment) -> None:
    """Records a segment that begins where a recording is."""
    autograd = recorder.autograd
    recorder.operations += segment.operations
    recorder.node_records |= segment.records
    recorder.user_references.let_go |= segment.let_go
    log.repeat(segment.nodes)
    autograd.saves += segment.saves
    for number, (first, last, returned) in segment.runs.items():
        autograd.ran[number], autograd.returned[number] = (first, last), returned
    recorder.ledger.repeat(segment.storages, segment.events)
    for save in segment.saves:
        saved_by = recorder.ledger.storages[save.storage].saved_by
        if save.node is not None and save.node not in saved_by:
            saved_by.append(save.node)
    recorder.ledger.operation = len(recorder.operations) - 1
