"""The simulated caching allocator against a naive one, and against what must hold of any.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measuring.naive_allocator import NaiveAllocator
from trials import try_examples

from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory
from fxmem.memory.allocator.heap import Block, DeviceMemory, SegmentState, TraceAction, TraceEvent
from fxmem.memory.allocator.settings import AllocatorSettings

MIB = 1024**2
RUNS = try_examples(120)

# Around every limit that a rule has, and anything between.
LIMITS = [1, 512, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 20 * MIB, 24 * MIB, 40 * MIB, 64 * MIB]
OFFSETS = [-MIB, -512, -1, 0, 0, 0, 1, 512, MIB, MIB + 512]
SIZES = st.one_of(
    st.builds(lambda limit, off: max(limit + off, 1), *map(st.sampled_from, (LIMITS, OFFSETS))),
    st.integers(1, 70 * MIB),
    st.integers(1, 8192),
)
POWERS = st.sampled_from([0, 1, 2, 4, 8])
SETTINGS = st.builds(
    AllocatorSettings,
    max_split_bytes=st.sampled_from([2**64 - 1, 20 * MIB, 30 * MIB]),
    max_non_split_rounding_bytes=st.sampled_from([20 * MIB, 24 * MIB]),
    large_segment_bytes=st.sampled_from([20 * MIB, 12 * MIB]),
    power2_divisions=st.one_of(st.just((0,) * 16), st.tuples(*[POWERS] * 16)),
    expandable_segments=st.booleans(),
    memory_fraction=st.sampled_from([1.0, 0.5]),
)


@dataclass(frozen=True)
class Program:
    """The requests to an allocator.

    Few sizes, so that blocks are found again; a code for each operation, which ``decode`` reads.
    """

    settings: AllocatorSettings
    capacity_bytes: int
    sizes: tuple[int, ...]
    codes: tuple[int, ...]
    flushes: bool
    toggles: bool

    def decode(self) -> Iterator[tuple[str, int, int]]:
        """The operations: what to do, a number, and a stream."""
        for code in self.codes:
            kind, rest = code % 24, code // 24
            if kind < 12:
                yield "allocate", self.sizes[rest % len(self.sizes)], int(kind == 11)
            elif kind == 22 and self.flushes:
                yield "flush", 0, 0
            elif kind == 23 and self.toggles:
                yield "toggle", 0, 0
            else:
                yield "free", rest, 0


PROGRAMS = st.builds(
    Program,
    settings=SETTINGS,
    capacity_bytes=st.sampled_from([80 * MIB, 120 * MIB, 200 * MIB, 400 * MIB, 10**12]),
    sizes=st.lists(SIZES, min_size=1, max_size=6).map(tuple),
    codes=st.lists(st.integers(0, 24 * 64 - 1), min_size=20, max_size=120).map(tuple),
    flushes=st.booleans(),
    toggles=st.sampled_from([False, False, True]),
)


def toggle(chosen: AllocatorSettings) -> AllocatorSettings:
    return replace(chosen, expandable_segments=not chosen.expandable_segments)


def list_layout(
    segments: tuple[SegmentState, ...],
) -> list[tuple[bool, list[tuple[int, int, bool]]]]:
    return [
        (
            segment.is_small,
            [(block.address, block.size, block.allocated) for block in segment.blocks],
        )
        for segment in segments
    ]


@RUNS
@given(PROGRAMS)
def test_it_agrees_with_a_naive_one(program: Program) -> None:
    fast = CachingAllocator(program.settings, DeviceMemory(program.capacity_bytes))
    naive = NaiveAllocator(program.settings, program.capacity_bytes)
    live: list[tuple[str, Block]] = []
    for position, (action, number, stream) in enumerate(program.decode()):
        if action == "flush":
            fast.empty_cache()
            naive.release()
        elif action == "toggle":
            fast.settings = naive.settings = toggle(fast.settings)
        elif action == "free" and live:
            name, block = live.pop(number % len(live))
            fast.free(block)
            naive.free(name)
        elif action == "allocate":
            if naive.allocate(str(position), number, stream):
                block = fast.allocate(number, stream=stream)
                assert block is not None and block.requested_bytes == number <= block.size
                live.append((str(position), block))
            else:
                with pytest.raises(OutOfMemory):
                    fast.allocate(number, stream=stream)
        assert list_layout(fast.snapshot()) == naive.layout()
        assert fast.reserved_bytes == naive.reserved
        assert fast.allocated_bytes == naive.allocated


def run_alone(program: Program) -> Iterator[tuple[CachingAllocator, list[Block], list[TraceEvent]]]:
    """The allocator, what is live, and its trace, after each operation."""
    trace: list[TraceEvent] = []
    memory = DeviceMemory(program.capacity_bytes)
    allocator = CachingAllocator(program.settings, memory, trace.append)
    live: list[Block] = []
    for action, number, stream in program.decode():
        if action == "flush":
            allocator.empty_cache()
        elif action == "toggle":
            allocator.settings = toggle(allocator.settings)
        elif action == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif action == "allocate":
            with suppress(OutOfMemory):
                block = allocator.allocate(number, stream=stream)
                assert block is not None
                live.append(block)
        yield allocator, live, trace


def check_invariants(allocator: CachingAllocator, live: list[Block]) -> None:
    segments = allocator.snapshot()
    blocks = [block for segment in segments for block in segment.blocks]
    for segment in segments:
        at = segment.address
        for block in segment.blocks:
            assert block.address == at and block.size > 0 and block.size % 512 == 0
            at += block.size
        assert at == segment.address + segment.size
        for one, other in pairwise(segment.blocks):
            assert one.allocated or other.allocated, "two free blocks side by side"
    for one, other in pairwise(segments):
        assert one.address + one.size <= other.address
    assert {(block.address, block.size) for block in live} == {
        (block.address, block.size) for block in blocks if block.allocated
    }
    assert allocator.reserved_bytes == sum(block.size for block in blocks)
    assert allocator.allocated_bytes == sum(block.size for block in live)
    assert allocator.requested_bytes == sum(block.requested_bytes for block in live)


@RUNS
@given(PROGRAMS)
def test_blocks_tile_their_segments_and_the_trace_accounts_for_them(program: Program) -> None:
    for allocator, live, trace in run_alone(program):  # noqa: B007
        check_invariants(allocator, live)
    reserved_bytes, at = 0, {}
    for event in trace:
        if event.action in (TraceAction.SEGMENT_ALLOC, TraceAction.SEGMENT_MAP):
            reserved_bytes += event.nbytes
        elif event.action in (TraceAction.SEGMENT_FREE, TraceAction.SEGMENT_UNMAP):
            reserved_bytes -= event.nbytes
        elif event.action is TraceAction.ALLOC:
            assert event.address not in at
            at[event.address] = event.nbytes
        elif event.action is TraceAction.FREE:
            assert at.pop(event.address) == event.nbytes
    assert reserved_bytes == allocator.reserved_bytes
    assert at == {block.address: block.requested_bytes for block in live}
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.requested_bytes == allocator.reserved_bytes == 0
    assert allocator.snapshot() == ()


@RUNS
@given(PROGRAMS)
def test_it_runs_out_only_where_an_empty_cache_does_not_help(program: Program) -> None:
    chosen = replace(program.settings, expandable_segments=False)
    allocator = CachingAllocator(chosen, DeviceMemory(program.capacity_bytes))
    limit_bytes = int(program.capacity_bytes * chosen.memory_fraction)
    live: list[Block] = []
    for action, number, stream in program.decode():
        if action == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif action == "allocate":
            try:
                block = allocator.allocate(number, stream=stream)
                assert block is not None
                live.append(block)
            except OutOfMemory as error:
                shortage = error.shortage
                assert shortage.reserved_bytes + shortage.segment_bytes > limit_bytes
                allocator.empty_cache()
                assert allocator.reserved_bytes == shortage.reserved_bytes
