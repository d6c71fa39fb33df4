"""Known answers: PyTorch's own tests of its allocator, and traces recorded on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory
from fxmem.memory.allocator.heap import Block, DeviceMemory
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings

MIB = 1024**2
BY_SIZE = (
    "garbage_collection_threshold:0.5,roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"
)


@pytest.mark.parametrize(
    ("settings", "nbytes", "allocated_bytes"),
    [
        # test_cuda.py, test_allocator_settings: 21 and 100 Mi floats.
        ("", 84 * MIB, 84 * MIB),
        ("roundup_power2_divisions:4", 84 * MIB, 96 * MIB),
        ("garbage_collection_threshold:0.5,max_split_size_mb:40", 84 * MIB, 84 * MIB),
        (BY_SIZE, 84 * MIB, 88 * MIB),
        (BY_SIZE, 400 * MIB, 512 * MIB),
        ("release_lock_on_cudamalloc:True", 84 * MIB, 84 * MIB),
    ],
)
def test_sizes_are_rounded_as_by_pytorch(settings: str, nbytes: int, allocated_bytes: int) -> None:
    allocator = CachingAllocator(parse_settings(settings))
    allocator.allocate(nbytes)
    assert allocator.allocated_bytes == allocated_bytes
    assert allocator.requested_bytes == nbytes


@pytest.mark.parametrize(("expandable", "segments"), [(False, 4), (True, 2)])
def test_freed_blocks_serve_the_next_iteration(expandable: bool, segments: int) -> None:
    """test_cuda.py, test_allocate_in_thread_to_pool: 20 MiB three times, ten times over."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable))
    allocator.free(allocator.allocate(16))
    for _ in range(10):
        blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
    assert len(allocator.snapshot()) == segments


def test_expandable_blocks_are_not_in_the_way_of_the_split_limit() -> None:
    """test_cuda.py, test_max_split_expandable: 120 MiB allowed, and settings that change."""
    fixed = replace(parse_settings("max_split_size_mb:40"), memory_fraction=0.5)
    expandable = replace(fixed, expandable_segments=True)
    allocator = CachingAllocator(fixed, DeviceMemory(240 * MIB))
    blocks = []
    for settings in (fixed, expandable, fixed):
        allocator.settings = settings
        blocks.append(allocator.allocate(40 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.allocate(40 * MIB)
    for block in blocks:
        allocator.free(block)
    allocator.allocate(120 * MIB)
    assert allocator.reserved_bytes == 120 * MIB


class FallingMemory(DeviceMemory):
    """A driver whose addresses fall, as in both traces."""

    def reserve_addresses(self, nbytes: int) -> int:
        return 2**47 - super().reserve_addresses(nbytes) - nbytes


# Each allocation is its size, the segment it came to lie in and its offset there; -3 frees the
# fourth one. Three forwards of Linear(10_000, 50_000) on a batch of 5_000.
LINEAR = (
    [2000683008, 2097152, 201326592, 1000341504, 33554432, 201326592, 1000341504],
    "2000000000@0+0 200000@1+0 200000000@2+0 1000000000@3+0 1048576@1+200192 33554432@4+0 -4 "
    "200000000@5+0 1000000000@6+0 1048576@1+200192 -8 -2 -3 200000000@2+0 1000000000@3+0 "
    "1048576@1+200192 -11 -6 -7",
)
# Forward and backward of attention, written out.
ATTENTION = (
    [20971520, 536870912, 536870912, 2097152, *[536870912] * 5],
    "2097152@0+0 2097152@0+2097152 2097152@0+4194304 536870912@1+0 8519680@0+6291456 "
    "536870912@2+0 -3 131072@3+0 262144@3+131072 536870912@1+0 536870912@4+0 -8 131072@3+393216 "
    "536870912@1+0 -6 2097152@0+14811136 -5 4@3+0 256@3+512 4@3+1024 -15 -14 4@3+512 "
    "2097152@0+16908288 2097152@2+0 8519680@2+2097152 -18 536870912@5+0 2097152@2+0 -21 -11 "
    "536870912@1+0 536870912@6+0 536870912@7+0 536870912@8+0 -24 -23 -22 536870912@7+0 "
    "131072@3+524288 -25 -20 -10 -27 536870912@8+0 -26 -9 536870912@7+0 131072@3+393216 -29 "
    "536870912@7+0 -30 -7 -31 536870912@7+0 -28 2097152@2+0 2097152@2+10616832 -32 "
    "2097152@2+12713984 -33 -16",
)


def run_trace(allocator: CachingAllocator, trace: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """All blocks, in order; and each one's address and the place it had on the GPU."""
    blocks: list[Block] = []
    places: list[tuple[int, str]] = []
    for word in trace.split():
        if word.startswith("-"):
            allocator.free(blocks[int(word[1:])])
            continue
        size, _, place = word.partition("@")
        block = allocator.allocate(int(size))
        assert block is not None
        blocks.append(block)
        places.append((block.address, place))
    return blocks, places


@pytest.mark.parametrize(("segments", "trace"), [LINEAR, ATTENTION])
def test_every_block_lies_where_it_lay_on_a_gpu(segments: list[int], trace: str) -> None:
    taken: list[int] = []
    allocator = CachingAllocator(
        memory=FallingMemory(),
        trace=lambda event: (
            taken.append(event.address) if event.action.value == "segment_alloc" else None
        ),
    )
    _, places = run_trace(allocator, trace)
    assert [segment.size for segment in reversed(allocator.snapshot())] == segments
    for address, place in places:
        segment, _, offset = place.partition("+")
        assert address == taken[int(segment)] + int(offset)


@pytest.mark.parametrize(("segments", "trace"), [LINEAR, ATTENTION])
def test_the_order_of_addresses_does_not_change_what_is_reserved(
    segments: list[int], trace: str
) -> None:
    allocator = CachingAllocator()
    run_trace(allocator, trace)
    assert [segment.size for segment in allocator.snapshot()] == segments
