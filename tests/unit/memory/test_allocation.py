"""Blocks in place of requests, from the rules of the caching allocator, by hand."""

from __future__ import annotations

from dataclasses import replace

from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Storage
from fxmem.memory.allocation import (
    AddressTrace,
    DeviceRun,
    Placement,
    allocate_graph,
    measure_allocation,
    run_on_device,
    trace_blocks,
)
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.timeline import build_timeline

MIB = 1 << 20
SETTINGS = AllocatorSettings()


def make_storage(index: int, nbytes: int, born: int, died: int | None = None) -> Storage:
    return Storage(index, nbytes, Category.TEMPORARY, f"s{index}", (nbytes,), "uint8", born, died)


def make_graph(
    *storages: Storage,
    workspace_bytes: int = 0,
    warmup: tuple[tuple[int | None, int], ...] = (),
) -> MemoryGraph:
    """Three operations after the beginning; the second has the workspace."""
    operations = tuple(
        Operation(i, f"op{i}", Phase.FORWARD, workspace_bytes=workspace_bytes if i == 2 else 0)
        for i in range(4)
    )
    return MemoryGraph((), storages, operations, (), warmup)


def test_small_requests_are_rounded_to_512_bytes() -> None:
    graph = make_graph(make_storage(0, 1, RESIDENT), make_storage(1, 513, 1, 2))
    allocation = allocate_graph(graph, SETTINGS)
    assert [(s.nbytes, s.slack_bytes) for s in allocation.graph.storages] == [
        (512, 511),
        (1024, 511),
    ]
    assert allocation.reserved_bytes == (2 * MIB, 2 * MIB)
    assert allocation.requested_bytes == (514, 1)


def test_a_large_block_that_is_hardly_larger_is_not_split() -> None:
    # A segment of 12 MiB, left by the step before, serves 11.5 MiB: half a MiB more stays unused.
    graph = make_graph(
        make_storage(0, 11 * MIB + MIB // 2, 1), warmup=((-1, 12 * MIB), (-1, -12 * MIB))
    )
    allocation = allocate_graph(graph, SETTINGS)
    (storage,) = allocation.graph.storages
    assert (storage.nbytes, storage.slack_bytes) == (12 * MIB, MIB // 2)
    assert allocation.reserved_bytes == (12 * MIB,)


def test_what_is_resident_keeps_the_block_that_it_got_before() -> None:
    graph = make_graph(
        make_storage(0, 11 * MIB + MIB // 2, RESIDENT),
        warmup=((-1, 12 * MIB), (-1, -12 * MIB), (0, 11 * MIB + MIB // 2)),
    )
    (storage,) = allocate_graph(graph, SETTINGS).graph.storages
    assert storage.nbytes == 12 * MIB


def test_a_workspace_gets_a_block_too() -> None:
    graph = make_graph(make_storage(0, 512, 1), workspace_bytes=1000)
    operations = allocate_graph(graph, SETTINGS).graph.operations
    assert [operation.workspace_bytes for operation in operations] == [0, 0, 1024, 0]


def test_each_block_of_a_workspace_is_rounded() -> None:
    """As of a reduction: 8 MiB in a segment of 20, and 32 bytes in a small one."""
    blocks = ((0, 8 * MIB), (1, 32), (1, -32), (0, -8 * MIB))
    graph = make_graph(make_storage(0, 512, 1), workspace_bytes=8 * MIB + 32)
    operations = list(graph.operations)
    operations[2] = replace(operations[2], blocks=blocks)
    allocation = allocate_graph(replace(graph, operations=tuple(operations)), SETTINGS)
    operation = allocation.graph.operations[2]
    assert operation.workspace_bytes == 8 * MIB + 512
    assert operation.blocks == ((0, 8 * MIB), (1, 512), (1, -512), (0, -8 * MIB))
    assert allocation.reserved_bytes == (2 * MIB, *[22 * MIB] * 4)
    trace = trace_blocks(replace(graph, operations=tuple(operations)), SETTINGS)
    assert [(e.action.value, e.nbytes) for e, _ in trace.events][-4:] == [
        ("alloc", 8 * MIB),
        ("alloc", 32),
        ("free_completed", 32),
        ("free_completed", 8 * MIB),
    ]


def test_a_workspace_of_the_warm_up_is_none_of_the_step_s() -> None:
    graph = make_graph(make_storage(0, 512, 1), warmup=((None, 30 * MIB), (None, -30 * MIB)))
    allocation = allocate_graph(graph, SETTINGS)
    assert not any(operation.workspace_bytes for operation in allocation.graph.operations)
    assert allocation.reserved_bytes == (32 * MIB,)


def test_blocks_are_those_of_their_streams() -> None:
    """By hand: 30 MiB that a side stream freed before the step serve that stream alone."""
    for stream, warmup_stream, held_mib in ((0, 0, 30), (1, 0, 60), (0, 1, 60), (1, 1, 30)):
        graph = make_graph(
            replace(make_storage(0, 30 * MIB, 1, 2), stream=stream),
            warmup=((-1, 30 * MIB), (-1, -30 * MIB)),
        )
        streams = ((-1, warmup_stream),) if warmup_stream else ()
        graph = replace(graph, warmup_streams=streams)
        assert measure_allocation(graph, SETTINGS) == (30 * MIB, held_mib * MIB)
    assert {e.stream for e, _ in trace_blocks(graph, SETTINGS).events} == {1}
    # A resident storage of the side stream leaves its segment's rest to that stream.
    resident = replace(make_storage(0, 2 * MIB, RESIDENT), stream=1)
    graph = make_graph(resident, workspace_bytes=3 * MIB)
    assert measure_allocation(graph, SETTINGS)[1] == 40 * MIB
    operations = tuple(replace(operation, stream=1) for operation in graph.operations)
    assert measure_allocation(replace(graph, operations=operations), SETTINGS)[1] == 20 * MIB


def test_where_memory_runs_out() -> None:
    graph = make_graph(make_storage(0, 20 * MIB, RESIDENT), make_storage(1, 40 * MIB, 3))
    assert run_on_device(graph, SETTINGS, 60 * MIB, 0).exhaustion is None
    for capacity_bytes, context_bytes in ((58 * MIB, 0), (60 * MIB, 2 * MIB)):
        exhaustion = run_on_device(graph, SETTINGS, capacity_bytes, context_bytes).exhaustion
        assert exhaustion is not None and exhaustion.step == 3
        assert exhaustion.cause.startswith("out of memory: 40.00 MiB more do not fit")


def test_memory_may_run_out_before_the_step() -> None:
    graph = make_graph(warmup=((-1, 40 * MIB), (-1, -40 * MIB)))
    exhaustion = run_on_device(graph, SETTINGS, 20 * MIB, 0).exhaustion
    assert exhaustion is not None and exhaustion.step is None


def test_what_the_cache_holds_is_given_back_where_memory_ends() -> None:
    graph = make_graph(make_storage(0, 40 * MIB, 1), warmup=((-1, 30 * MIB), (-1, -30 * MIB)))
    run = run_on_device(graph, SETTINGS, 60 * MIB, 0)
    assert run == DeviceRun(None, reserved_bytes=40 * MIB, retries=1)
    run = run_on_device(graph, SETTINGS, 70 * MIB, 0)
    assert run == DeviceRun(None, reserved_bytes=70 * MIB, retries=0)


def test_sizes_of_a_graph_without_slack_stay() -> None:
    graph = make_graph(make_storage(0, 4096, 1, 2))
    assert allocate_graph(graph, SETTINGS).graph == replace(graph)


def test_the_most_of_both_without_a_graph() -> None:
    """By hand: 12 MiB in a segment of its own; then 3 MiB of another of 20; the workspace's 1 KiB
    in a small one of 2."""
    graph = make_graph(
        make_storage(0, 12 * MIB, RESIDENT), make_storage(1, 3 * MIB, 1, 2), workspace_bytes=1000
    )
    assert measure_allocation(graph, SETTINGS) == (15 * MIB + 1024, 34 * MIB)
    allocation = allocate_graph(graph, SETTINGS)
    assert measure_allocation(graph, SETTINGS) == (
        max(build_timeline(allocation.graph).profile()),
        max(allocation.reserved_bytes),
    )


FIRST = 0x7F00_0000_0000


def list_actions(trace: AddressTrace) -> list[tuple[str, int, int, int]]:
    return [(e.action.value, e.address - FIRST, e.nbytes, index) for e, index in trace.events]


def test_blocks_lie_where_the_caching_allocator_puts_them() -> None:
    # Small blocks of 512 bytes in one segment of 2 MiB; what the warm-up freed is taken again.
    graph = make_graph(
        make_storage(0, 500, RESIDENT),
        make_storage(1, 300, 1, 2),
        make_storage(2, 0, RESIDENT, 2),
        workspace_bytes=3 * MIB,
        warmup=((-1, 512), (0, 500), (-1, -512)),
    )
    trace = trace_blocks(graph, SETTINGS)
    assert trace.residents == (Placement(0, FIRST + 512, 500),)
    assert list_actions(trace) == [
        ("alloc", 0, 300, 0),
        ("segment_alloc", 2 * MIB, 20 * MIB, 1),
        ("alloc", 2 * MIB, 3 * MIB, 1),
        ("free_completed", 2 * MIB, 3 * MIB, 2),
        ("free_completed", 0, 300, 3),
    ]
    small, large = trace.segments
    assert [(b.size, b.requested_bytes) for b in small.blocks] == [
        (512, 0),
        (512, 500),
        (2 * MIB - 1024, 0),
    ]
    assert [(b.size, b.allocated) for b in large.blocks] == [(20 * MIB, False)]


def test_without_a_cache_each_block_is_a_segment_at_an_address_of_its_own() -> None:
    graph = make_graph(
        make_storage(0, 100, RESIDENT),
        make_storage(1, 0, RESIDENT),
        make_storage(2, 30, 1, 1),
        make_storage(3, 0, 1, 2),
        make_storage(4, 30, 2),
    )
    trace = trace_blocks(graph, None)
    assert trace.residents == (Placement(0, FIRST, 100),)
    assert list_actions(trace) == [
        ("segment_alloc", 128, 30, 0),
        ("alloc", 128, 30, 0),
        ("free_completed", 128, 30, 2),
        ("segment_free", 128, 30, 2),
        ("segment_alloc", 192, 30, 3),
        ("alloc", 192, 30, 3),
    ]
    assert [(s.address - FIRST, s.size) for s in trace.segments] == [(0, 100), (192, 30)]
