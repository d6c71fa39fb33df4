from __future__ import annotations

from hand_made import MIB, make_graph, memory_graphs
from hypothesis import given

from fxmem.graph import (
    NEXT_RESULT,
    RESIDENT,
    Category,
    MemoryGraph,
    Operation,
    Phase,
    Storage,
    measure_blocks,
)
from fxmem.memory.timeline import Action, build_timeline


def count_live_bytes(graph: MemoryGraph, step: int) -> int:
    """The oracle: asks each storage whether it is there, and adds the kernel's workspace."""
    total = graph.operations[step].workspace_bytes
    for storage in graph.storages:
        born_by_then = storage.born in range(RESIDENT, step + 1)
        gone_before = storage.died is not None and storage.died in range(RESIDENT, step)
        total += storage.nbytes if born_by_then and not gone_before else 0
    return total


def test_the_hand_made_step_has_the_live_bytes_of_its_table() -> None:
    live_bytes = build_timeline(make_graph()).profile()
    assert [round(n / MIB) for n in live_bytes] == [13, 17, 21, 18, 18, 30, 29, 19]


@given(memory_graphs())
def test_any_step_is_allocated_and_freed_in_order(graph: MemoryGraph) -> None:
    timeline = build_timeline(graph)
    events = timeline.events
    steps = range(len(graph.operations))
    assert timeline.profile() == tuple(count_live_bytes(graph, step) for step in steps)
    for action, expected in (
        (Action.ALLOC, [s.index for s in graph.storages if s.born != RESIDENT]),
        (Action.FREE, sorted(s.index for s in graph.storages if s.died is not None)),
    ):
        moved = [e.storage for e in events if e.action is action and e.storage is not None]
        assert sorted(moved) == expected
    left = sum(s.nbytes for s in graph.storages if s.died is None)
    assert (timeline.live_bytes() or (timeline.resident_bytes,))[-1] == left
    assert min(timeline.live_bytes(), default=0) >= 0
    assert [e.step for e in events] == sorted(e.step for e in events)
    assert all(e.phase is graph.operations[e.step].phase for e in events)
    frees = [
        (event.step, graph.storages[event.storage].death_rank)
        for event in events
        if event.action is Action.FREE and event.storage is not None
    ]
    assert frees == sorted(frees)


@given(memory_graphs())
def test_every_workspace_is_gone_when_its_kernel_returns(graph: MemoryGraph) -> None:
    held: dict[tuple[int, int], int] = {}
    for event in build_timeline(graph).events:
        if event.storage is None:
            key = event.step, event.block
            held[key] = held.get(key, 0) + event.delta_bytes
            assert held[key] in (0, event.nbytes)
    assert not any(held.values())


def test_a_kernel_may_take_several_blocks_around_its_results() -> None:
    # Of two results the second comes after a block that is freed by then; the first, which the
    # blocks do not name, before everything else.
    blocks = ((0, 30), (0, -30), (NEXT_RESULT, 0), (1, 20), (2, 5), (1, -20), (2, -5))
    storages = tuple(
        Storage(i, nbytes, Category.TEMPORARY, "", (), "uint8", 1, None)
        for i, nbytes in enumerate((100, 10))
    )
    operations = (
        Operation(0, "step.begin", Phase.FORWARD),
        Operation(1, "op", Phase.FORWARD, workspace_bytes=25, blocks=blocks),
    )
    timeline = build_timeline(MemoryGraph((), storages, operations, ()))
    assert [(e.storage, e.block, e.delta_bytes) for e in timeline.events] == [
        (0, 0, 100),
        (None, 0, 30),
        (None, 0, -30),
        (1, 0, 10),
        (None, 1, 20),
        (None, 2, 5),
        (None, 1, -20),
        (None, 2, -5),
    ]
    assert timeline.profile() == (0, 135)
    assert measure_blocks(blocks, (100, 10)) == 25
    assert measure_blocks(blocks[:3], (100, 10)) == 20  # 130 bytes before, 110 after
