"""The caching allocator against sequences worked out by hand from its rules.

A program is a line of words: ``a=600`` allocates, ``-a`` frees, ``flush`` empties the cache and
``b@1=600`` allocates on stream 1; sizes are in bytes, or end in K or M. A layout lists the segments
by address, ``|`` between them: ``S`` from the small pool, ``L`` from the large one, ``+`` where it
is expandable; then its blocks, free ones without a name.
"""

from __future__ import annotations

import re

import pytest

from fxmem.errors import UsageError
from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.memory.allocator.heap import Block, DeviceMemory, TraceAction, TraceEvent
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings

MIB = 1024**2
SPLIT = "max_split_size_mb:20"
EXPANDABLE = "expandable_segments:True"
UNITS = {"": 1, "K": 1024, "M": MIB}


def parse_size(text: str) -> int:
    number, unit = re.fullmatch(r"([0-9.]+)([KM]?)", text).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS[unit])


def format_size(nbytes: int) -> str:
    for unit in "MK":
        if nbytes % (UNITS[unit] // 2) == 0:
            return f"{nbytes / UNITS[unit]:g}{unit}"
    return str(nbytes)


class Bench:
    """An allocator and the names of its blocks."""

    def __init__(self, settings: str = "", capacity: str | None = None, context: str = "0") -> None:
        self.trace: list[TraceEvent] = []
        total = None if capacity is None else parse_size(capacity)
        memory = DeviceMemory(total, parse_size(context))
        self.allocator = CachingAllocator(parse_settings(settings), memory, self.trace.append)
        self.blocks: dict[str, Block] = {}

    def run(self, program: str) -> Bench:
        for word in program.split():
            name, _, size = word.partition("=")
            if word == "flush":
                self.allocator.empty_cache()
            elif word.startswith("-"):
                self.allocator.free(self.blocks.pop(word[1:]))
            else:
                name, _, stream = name.partition("@")
                block = self.allocator.allocate(parse_size(size), stream=int(stream or 0))
                if block is not None:
                    self.blocks[name] = block
        return self

    def layout(self) -> str:
        names = {block.address: name for name, block in self.blocks.items()}
        return " | ".join(
            " ".join(
                [("S" if segment.is_small else "L") + "+" * segment.is_expandable]
                + [
                    names.get(b.address, "") * b.allocated + format_size(b.size)
                    for b in segment.blocks
                ]
            )
            for segment in self.allocator.snapshot()
        )

    def held(self) -> str:
        """The allocated and the reserved bytes."""
        allocator = self.allocator
        return f"{format_size(allocator.allocated_bytes)} {format_size(allocator.reserved_bytes)}"


CASES = [
    # Sizes are rounded up to 512 bytes, and a small block is cut from a segment of 2 MiB.
    ("", "a=513", "S a1K 2047K", "1K 2M"),
    # No bytes, no block, no segment.
    ("", "a=0", "", "0M 0M"),
    # A segment is its stream's alone (BlockComparatorSize, get_free_block).
    ("", "a@1=30M -a b=30M c@1=30M", "L c30M | L b30M", "60M 60M"),
    # Up to 1 MiB is small; one byte more is large, and is cut from 20 MiB.
    ("", "a=1M b=1M c=1M", "S a1M b1M | S c1M 1M", "3M 4M"),
    ("", "a=1048577", "L a1024.5K 19455.5K", "1024.5K 20M"),
    # From 10 MiB on, a segment of its own, rounded to 2 MiB. The rest is cut off if it is more
    # than 1 MiB; up to that it stays with the block, and counts as allocated.
    ("", "a=11533824", "L a11263.5K 1024.5K", "11263.5K 12M"),
    ("", "a=11533825", "L a12M", "12M 12M"),
    # The smallest that fits is taken, wherever it lies; of two of one size, the lower address.
    ("", "a=40M b=24M c=30M -a -b -c d=20M", "L 40M | L d20M 4M | L 30M", "20M 94M"),
    ("", "a=20M b=20M -b -a c=20M", "L c20M | L 20M", "20M 40M"),
    # A freed block joins the free ones beside it; a flush takes whole segments.
    ("", "a=512 b=512 c=512 -a -c -b", "S 2M", "0M 2M"),
    ("", "a=5M b=5M -a flush", "L 5M b5M 10M", "5M 20M"),
    # Sizes are rounded to a division between powers of two: quarters below 64 MiB, say.
    ("roundup_power2_divisions:[32:4,>:1]", "a=33M", "L a40M", "40M 40M"),
    # A block of at least the limit is not split, and not taken by a much smaller request.
    (SPLIT, "a=30M -a b=19M", "L 30M | L b20M", "20M 50M"),
    (SPLIT, "a=41M -a b=23M", "L b42M", "42M 42M"),
    # Expandable segments grow by what is missing, and give whole pages back.
    (EXPANDABLE, "a=2M b=30M", "L+ a2M b30M 8M", "32M 40M"),
    (EXPANDABLE, "a=10M b=50M c=10M -b flush", "L+ a10M 10M | L+ c10M 10M", "20M 40M"),
]
"""What the rules look like; ``tests/property/test_allocator.py`` holds all of them."""


@pytest.mark.parametrize(("settings", "program", "layout", "held"), CASES)
def test_blocks_and_segments(settings: str, program: str, layout: str, held: str) -> None:
    bench = Bench(settings).run(program)
    assert (bench.layout(), bench.held()) == (layout, held)


@pytest.mark.parametrize(
    ("settings", "capacity", "program", "held", "retries"),
    [
        # Whatever is cached and whole is given back when the device has no more.
        ("", "60M", "a=20M b=20M -a -b c=40M", "40M 40M", 1),
        ("", "80M", "a=20M b=20M -a -b c=40M", "40M 80M", 0),
        # Of blocks that are not split, the smallest that is large enough goes before all others.
        (SPLIT, "110M", "a=30M b=60M -a -b c=35M", "36M 66M", 0),
    ],
)
def test_memory_is_made_free(
    settings: str, capacity: str, program: str, held: str, retries: int
) -> None:
    bench = Bench(settings, capacity).run(program)
    assert (bench.held(), bench.allocator.retries) == (held, retries)


HALF = "per_process_memory_fraction:0.5"
# The device and what its CUDA context holds; what fits and what does not; then the segment that
# the device is asked for, what is allocated and reserved, and what the device has left.
OUT_OF_MEMORY = [
    # The device is full: it is asked for a segment, not for the block.
    ("", "30M", "0", "a=20M", "b=2M", "20M 20M 20M 10M"),
    ("", "2M", "0", "", "a=1100K", "20M 0M 0M 2M"),
    # Split blocks help nobody.
    ("", "40M", "0", "a=10M b=5M c=5M d=5M -c", "e=20M", "20M 20M 30M 10M"),
    # What the CUDA context holds is not there.
    ("", "40M", "1K", "a=20M", "b=20M", "20M 20M 20M 20479K"),
    # A share of the memory is the limit, whatever is free.
    (HALF, "100M", "0", "a=50M", "b=1", "2M 50M 50M 50M"),
    # It is held against the whole segment, where a page would do that fits.
    (f"{HALF},{EXPANDABLE}", "120M", "0", "a=30M", "b=21M", "22M 30M 40M 80M"),
    ("per_process_memory_fraction:0", "100M", "0", "", "a=1", "2M 0M 0M 100M"),
]


@pytest.mark.parametrize(
    ("settings", "capacity", "context", "before", "last", "figures"), OUT_OF_MEMORY
)
def test_memory_runs_out(
    settings: str, capacity: str, context: str, before: str, last: str, figures: str
) -> None:
    bench = Bench(settings, capacity, context).run(before)
    with pytest.raises(OutOfMemory) as raised:
        bench.run(last)
    shortage = raised.value.shortage
    asked = last.partition("=")[2]
    assert shortage == Shortage(*map(parse_size, [asked, *figures.split()]))
    assert bench.trace[-1].action is TraceAction.OOM
    assert bench.trace[-1].address == shortage.device_free_bytes


def test_the_error_tells_the_figures_in_one_line() -> None:
    with pytest.raises(OutOfMemory) as raised:
        Bench("", "30M").run("a=5M b=20M")
    assert str(raised.value) == (
        "out of memory: 20.00 MiB more do not fit, with 5.00 MiB allocated, 15.00 MiB reserved but "
        "unallocated and 10.00 MiB free"
    )


def test_pages_that_were_mapped_before_memory_ran_out_are_free() -> None:
    """The hole of 20 MiB is filled; the page behind what is free already is not to be had."""
    bench = Bench(EXPANDABLE, "60M").run("a=20M b=20M c=20M -b flush -c")
    assert bench.layout() == "L+ a20M | L+ 20M"
    bench.trace.clear()
    with pytest.raises(OutOfMemory):
        bench.run("d=50M")
    assert [(event.action.value, event.nbytes // MIB) for event in bench.trace] == [
        ("segment_map", 20),
        ("segment_unmap", 40),
        ("oom", 50),
    ]
    assert bench.layout() == "L+ a20M"


def test_the_trace_has_the_words_and_addresses_of_a_snapshot() -> None:
    bench = Bench().run("a=600 b=11M -a -b flush")
    small, large = 0x7F0000000000, 0x7F0000200000
    assert [(e.action.value, e.address, e.nbytes, e.stream) for e in bench.trace] == [
        ("segment_alloc", small, 2 * MIB, 0),
        ("alloc", small, 600, 0),
        ("segment_alloc", large, 12 * MIB, 0),
        ("alloc", large, 11 * MIB, 0),
        ("free_completed", small, 600, 0),
        ("free_completed", large, 11 * MIB, 0),
        ("segment_free", large, 12 * MIB, 0),
        ("segment_free", small, 2 * MIB, 0),
    ]


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(512)
    allocator.free(block)
    with pytest.raises(ValueError, match="is free already"):
        allocator.free(block)


def test_nothing_is_freed_for_no_bytes() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(0))
    assert allocator.reserved_bytes == 0


def test_a_fraction_needs_a_whole() -> None:
    with pytest.raises(UsageError, match=r"0\.5 needs the memory of a device"):
        CachingAllocator(AllocatorSettings(memory_fraction=0.5))
