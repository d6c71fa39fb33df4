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
from fxmem.memory.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    DeviceMemory,
    OutOfMemory,
    Shortage,
    TraceAction,
    TraceEvent,
    parse_settings,
)

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


DEFAULTS = [
    # Sizes are rounded up to 512 bytes, and a small block is cut from a segment of 2 MiB.
    ("a=1", "S a0.5K 2047.5K", "0.5K 2M"),
    ("a=512", "S a0.5K 2047.5K", "0.5K 2M"),
    ("a=513", "S a1K 2047K", "1K 2M"),
    # No bytes, no block, no segment.
    ("a=0", "", "0M 0M"),
    # A free block is its own stream's alone (BlockComparatorSize, get_free_block), small or large,
    # and a segment, too; back on that stream, it serves again.
    ("a@1=30M -a b=30M", "L 30M | L b30M", "30M 60M"),
    ("a@1=30M -a b=30M c@1=30M", "L c30M | L b30M", "60M 60M"),
    ("a@1=1M b=1M c@1=1M", "S a1M c1M | S b1M 1M", "3M 4M"),
    ("a@1=12M b@1=512 -a -b c@2=11M", "L 12M | S 2M | L c12M", "12M 26M"),
    # Up to 1 MiB is small: two fit a segment. One byte more is large.
    ("a=1M b=1M", "S a1M b1M", "2M 2M"),
    ("a=1048577", "L a1024.5K 19455.5K", "1024.5K 20M"),
    # A third does not fit, and there is a second segment (test_cuda.py,
    # test_mempool_with_allocator).
    ("a=1M b=1M c=1M", "S a1M b1M | S c1M 1M", "3M 4M"),
    # A small block is cut to the byte: 512 bytes are left, and are a block.
    ("a=1M b=1048064 c=1", "S a1M b1023.5K c0.5K", "2M 2M"),
    # From 1 to 10 MiB, blocks are cut from 20 MiB.
    ("a=2M b=3M", "L a2M b3M 15M", "5M 20M"),
    ("a=10485248", "L a10239.5K 10240.5K", "10239.5K 20M"),
    # From 10 MiB on, a segment of its own, rounded to 2 MiB. The rest is cut off if it is more
    # than 1 MiB; up to that it stays with the block, and counts as allocated.
    ("a=10M", "L a10M", "10M 10M"),
    ("a=11M", "L a12M", "12M 12M"),
    ("a=11533824", "L a11263.5K 1024.5K", "11263.5K 12M"),
    ("a=11533825", "L a12M", "12M 12M"),
    ("a=10486272", "L a10240.5K 2047.5K", "10240.5K 12M"),
    ("a=12.5M", "L a12.5M 1.5M", "12.5M 14M"),
    # The same in a segment of 20 MiB: up to 1 MiB that is left stays.
    ("a=9.5M b=9.5M", "L a9.5M b10.5M", "20M 20M"),
    ("a=9.5M b=9M", "L a9.5M b9M 1.5M", "18.5M 20M"),
    # Small and large never share.
    ("a=2M b=1M", "L a2M 18M | S b1M 1M", "3M 22M"),
    ("a=20M -a b=1M", "L 20M | S b1M 1M", "1M 22M"),
    # A freed block is kept, and found again.
    ("a=20M -a", "L 20M", "0M 20M"),
    ("a=20M -a b=20M", "L b20M", "20M 20M"),
    ("a=20M -a b=19M", "L b20M", "20M 20M"),
    ("a=20M -a b=18M", "L b18M 2M", "18M 20M"),
    # What is left of a reused block serves the next one.
    ("a=40M -a b=11M c=12M", "L b11M c12M 17M", "23M 40M"),
    # The smallest that fits is taken, wherever it lies.
    ("a=40M b=24M c=30M -a -b -c d=20M", "L 40M | L d20M 4M | L 30M", "20M 94M"),
    ("a=40M b=24M c=30M -a -b -c d=25M", "L 40M | L 24M | L d25M 5M", "25M 94M"),
    # Of two of one size, the lower address.
    ("a=20M b=20M -b -a c=20M", "L c20M | L 20M", "20M 40M"),
    # A freed block joins the free one before it, the one behind it, or both.
    ("a=512 b=512 c=512 -a -b", "S 1K c0.5K 2046.5K", "0.5K 2M"),
    ("a=512 b=512 -b", "S a0.5K 2047.5K", "0.5K 2M"),
    ("a=512 b=512 c=512 -a -c -b", "S 2M", "0M 2M"),
    ("a=512 b=512 c=512 -b", "S a0.5K 0.5K c0.5K 2046.5K", "1K 2M"),
    # Not across segments, though their addresses touch.
    ("a=20M b=20M -a -b c=40M", "L 20M | L 20M | L c40M", "40M 80M"),
    # Fragmentation: 18 MiB are free, and 16 MiB do not fit.
    ("a=5M b=5M c=5M -a -c d=16M", "L 5M b5M 10M | L d16M", "21M 36M"),
    # Streams have blocks of their own.
    ("a=20M -a b@1=20M", "L 20M | L b20M", "20M 40M"),
    ("a@1=512 b=512", "S a0.5K 2047.5K | S b0.5K 2047.5K", "1K 4M"),
    ("a=20M b@1=30M -a -b c@1=20M", "L 20M | L c20M 10M", "20M 50M"),
    # A flush takes whole segments, and leaves those that are partly used.
    ("a=20M b=512 -a flush", "S b0.5K 2047.5K", "0.5K 2M"),
    ("a=5M b=5M -a flush", "L 5M b5M 10M", "5M 20M"),
    ("a=5M b=5M -a -b flush", "", "0M 0M"),
    # After it the same request makes a new segment.
    ("a=20M -a flush b=20M", "L b20M", "20M 20M"),
]


WITH_SETTINGS = [
    # Sizes are rounded to a division between powers of two: 5 MiB to 6 MiB by halves, ...
    ("roundup_power2_divisions:2", "a=5M", "L a6M 14M", "6M 20M"),
    # ... powers of two stay, and so does what has fewer than 512 bytes to a division.
    ("roundup_power2_divisions:2", "a=4M", "L a4M 16M", "4M 20M"),
    ("roundup_power2_divisions:4", "a=1300 b=2100", "S a1.5K b2.5K 2044K", "4K 2M"),
    # By size: quarters below 64 MiB, not at all from there on.
    ("roundup_power2_divisions:[32:4,>:1]", "a=33M", "L a40M", "40M 40M"),
    ("roundup_power2_divisions:[32:4,>:1]", "a=65M", "L a66M", "66M 66M"),
    # Large blocks of up to 10 MiB from a segment of another size.
    ("large_segment_size_mb:32", "a=2M", "L a2M 30M", "2M 32M"),
    ("large_segment_size_mb:32", "a=10M", "L a10M", "10M 10M"),
    # A block of at least the limit is not split for a smaller request, ...
    (SPLIT, "a=30M -a b=19M", "L 30M | L b20M", "20M 50M"),
    (SPLIT, "a=20M -a b=18M", "L 20M | L b18M", "18M 38M"),
    # ... nor for a large one: that takes it whole, ...
    (SPLIT, "a=30M -a b=21M", "L b30M", "30M 30M"),
    (SPLIT, "a=30M -a b=20M", "L b30M", "30M 30M"),
    # ... if it is less than 20 MiB larger.
    (SPLIT, "a=41M -a b=23M", "L b42M", "42M 42M"),
    (SPLIT, "a=42M -a b=22M", "L 42M | L b22M", "22M 64M"),
    (f"{SPLIT},max_non_split_rounding_mb:21", "a=42M -a b=22M", "L b42M", "42M 42M"),
    # Smaller blocks are split as ever; a new segment too, up to the limit.
    (SPLIT, "a=16M -a b=2M", "L b2M 14M", "2M 16M"),
    (SPLIT, "a=18.5M", "L a18.5M 1.5M", "18.5M 20M"),
    (SPLIT, "a=20.5M", "L a22M", "22M 22M"),
]


GROWING = [
    # Pages of 2 MiB for the small pool, of 20 MiB for the large one.
    ("a=512", "S+ a0.5K 2047.5K", "0.5K 2M"),
    ("a=2M", "L+ a2M 18M", "2M 20M"),
    ("a=21M", "L+ a21M 19M", "21M 40M"),
    # A segment grows by what is missing: 18 MiB are free, and one more page makes 38.
    ("a=2M b=30M", "L+ a2M b30M 8M", "32M 40M"),
    ("a=1M b=1M c=1M", "S+ a1M b1M c1M 1M", "3M 4M"),
    # Large blocks are cut to 512 bytes, too.
    ("a=19.5M b=512K", "L+ a19.5M 0.5M | S+ b0.5M 1.5M", "20M 22M"),
    # Freed neighbours join, whatever pages they came in.
    ("a=15M b=15M c=15M -a -b d=30M", "L+ d30M c15M 15M", "45M 60M"),
    # One segment for each stream.
    ("a=2M b@1=2M", "L+ a2M 18M | L+ b2M 18M", "4M 40M"),
    # A flush unmaps whole pages that are free, at the end or between blocks that are in use.
    ("a=2M b=30M -b flush", "L+ a2M 18M", "2M 20M"),
    ("a=10M b=50M c=10M -b flush", "L+ a10M 10M | L+ c10M 10M", "20M 40M"),
    ("a=10M b=29M c=10M -b flush", "L+ a10M 29M c10M 11M", "20M 60M"),
    ("a=30M -a flush", "", "0M 0M"),
    # What was unmapped is filled again from the lowest address, together with the free ends.
    ("a=10M b=50M c=10M -b flush d=45M", "L+ a10M d45M 5M c10M 10M", "65M 80M"),
    ("a=10M b=50M c=10M -b flush d=51M", "L+ a10M 10M | L+ c10M d51M 19M", "71M 100M"),
    # Best fit: 18 MiB that can grow are more than 18 MiB that cannot.
    ("a=2M b=18M c=20M d=18M -b e=9M", "L+ a2M e9M 9M c20M d18M 2M", "49M 60M"),
    ("a=2M b=16M c=4M -b d=15M", "L+ a2M d15M 1M c4M 18M", "21M 40M"),
    # 18 MiB at the end could grow; 19 MiB between two blocks cannot, and fit as well.
    ("a=1.5M b=19M c=1.5M -b", "L+ a1.5M 19M c1.5M 18M", "3M 40M"),
    ("a=1.5M b=19M c=1.5M -b d=17M", "L+ a1.5M d17M 2M c1.5M 18M", "20M 40M"),
]


CASES = [*WITH_SETTINGS, *(("", *c) for c in DEFAULTS), *((EXPANDABLE, *c) for c in GROWING)]


@pytest.mark.parametrize(("settings", "program", "layout", "held"), CASES)
def test_blocks_and_segments(settings: str, program: str, layout: str, held: str) -> None:
    bench = Bench(settings).run(program)
    assert (bench.layout(), bench.held()) == (layout, held)


SHORT_OF_MEMORY = [
    # Whatever is cached and whole is given back when the device has no more.
    ("", "60M", "a=20M b=20M -a -b c=40M", "L c40M", "40M 40M", 1),
    ("", "50M", "a=20M b=512 -a c=40M", "S b0.5K 2047.5K | L c40M", "40960.5K 42M", 1),
    # While it has, nothing is.
    ("", "80M", "a=20M b=20M -a -b c=40M", "L 20M | L 20M | L c40M", "40M 80M", 0),
    # Of blocks that are not split, the smallest that is large enough goes first, ...
    (SPLIT, "110M", "a=30M b=60M -a -b c=35M", "L 30M | L c36M", "36M 66M", 0),
    # ... or several, the largest first, until they are enough; the smallest stays.
    (SPLIT, "120M", "a=24M b=30M c=40M -a -b -c d=64M", "L 24M | L d64M", "64M 88M", 0),
    (SPLIT, "60M", "a=20M b=20M -a -b c=36M", "L c36M", "36M 36M", 0),
    # They are gone even where they were not enough; then everything goes.
    (SPLIT, "100M", "x=50M a=30M b=512 -a -b c=41M", "L x50M | L c42M", "92M 92M", 1),
    # Smaller ones are not looked at.
    (SPLIT, "60M", "a=18M b=18M x=20M -a -b c=24M", "L x20M | L c24M", "44M 44M", 1),
    # Those of other streams are not either.
    (SPLIT, "60M", "a@1=30M b=20M -a -b c=45M", "L c46M", "46M 46M", 1),
    # Expandable segments give their pages back.
    (EXPANDABLE, "60M", "a=20M b@1=20M -b c=40M", "L+ a20M c40M", "60M 60M", 1),
    # A hole is filled no further than to what is free behind it.
    (EXPANDABLE, "80M", "a=20M b=20M c=20M -b flush -a -c d=70M", "L+ d70M 10M", "70M 80M", 0),
]


@pytest.mark.parametrize(
    ("settings", "capacity", "program", "layout", "held", "retries"), SHORT_OF_MEMORY
)
def test_memory_is_made_free(
    settings: str, capacity: str, program: str, layout: str, held: str, retries: int
) -> None:
    bench = Bench(settings, capacity).run(program)
    assert (bench.layout(), bench.held(), bench.allocator.retries) == (layout, held, retries)


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
