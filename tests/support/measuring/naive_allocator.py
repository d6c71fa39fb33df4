"""The CUDA caching allocator once more, as naively as its rules can be put: lists, searched whole.

It shares no code with :mod:`fxmem.memory.allocator` and keeps nothing that can be computed: what
is free, reserved or oldest is found by looking at every block of every segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import dropwhile, pairwise

from fxmem.memory.allocator.settings import AllocatorSettings

MIB = 1024**2
PAGE = 2 * MIB
FIRST_ADDRESS = 0x7F00_0000_0000


@dataclass(eq=False)
class Piece:
    """A block: ``name`` is None where it is free; ``hole`` where no memory lies behind it."""

    address: int
    size: int
    name: str | None = None
    hole: bool = False


@dataclass(eq=False)
class Segment:
    """Pieces in the order of their addresses."""

    stream: int
    small: bool
    page: int = 0  # of an expandable segment, else 0
    pieces: list[Piece] = field(default_factory=list)


class NaiveAllocator:
    """Allocate and free by name; None from :meth:`allocate` means out of memory."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.settings = settings
        self.capacity = capacity
        self.segments: list[Segment] = []
        self.next_address = FIRST_ADDRESS

    @property
    def reserved(self) -> int:
        return sum(p.size for s in self.segments for p in s.pieces if not p.hole)

    @property
    def allocated(self) -> int:
        return sum(p.size for s in self.segments for p in s.pieces if p.name is not None)

    @property
    def allowed(self) -> int | None:
        if self.capacity is None or self.settings.memory_fraction >= 1:
            return None
        return int(self.settings.memory_fraction * self.capacity)

    def layout(self) -> list[tuple[bool, list[tuple[int, int, bool]]]]:
        """Each piece of memory without a hole: its pool, and (address, size, in use)."""
        found = []
        for segment in self.segments:
            run: list[tuple[int, int, bool]] = []
            for piece in [*segment.pieces, Piece(0, 0, hole=True)]:
                if not piece.hole:
                    run.append((piece.address, piece.size, piece.name is not None))
                elif run:
                    found.append((segment.small, run))
                    run = []
        return sorted(found, key=lambda item: item[1][0][0])

    # What is asked of it.

    def allocate(self, name: str, nbytes: int, stream: int) -> bool:
        size = self.round(nbytes)
        small = size <= MIB
        found = self.search(small, stream, size) or self.acquire(small, stream, size)
        if found is None:
            return False
        segment, piece = found
        rest = piece.size - size
        if small or self.settings.expandable_segments:
            splits = rest >= 512
        else:
            splits = size < self.settings.max_split_bytes and rest > MIB
        if splits:
            at = segment.pieces.index(piece)
            free = Piece(piece.address + size, rest)
            segment.pieces.insert(at + 1, free)
            piece.size = size
        piece.name = name
        return True

    def free(self, name: str) -> None:
        for segment in self.segments:
            for piece in segment.pieces:
                if piece.name == name:
                    piece.name = None
                    self.join(segment, piece)
                    return

    def release(self) -> None:
        for segment in sorted(self.segments, key=lambda segment: segment.small):
            if segment.page:
                self.unmap(segment)
            elif len(segment.pieces) == 1 and segment.pieces[0].name is None:
                self.segments.remove(segment)

    # How it finds room.

    def round(self, nbytes: int) -> int:
        divisions = 0
        for interval in range(16):
            if interval == 0 or nbytes >= MIB * 2**interval:
                divisions = self.settings.power2_divisions[interval]
        if divisions > 1 and nbytes > 512 * divisions:
            power = 1
            while power * 2 <= nbytes:
                power *= 2
            step, size = power // divisions, power
            while size < nbytes:
                size += step
            return size
        return max((nbytes + 511) // 512, 1) * 512

    def free_pieces(self, small: bool, stream: int) -> list[tuple[Segment, Piece]]:
        """By size, then by address."""
        pieces = [
            (segment, piece)
            for segment in self.segments
            if segment.small == small and segment.stream == stream
            for piece in segment.pieces
            if piece.name is None and not piece.hole
        ]
        return sorted(pieces, key=lambda item: (item[1].size, item[1].address))

    def search(self, small: bool, stream: int, size: int) -> tuple[Segment, Piece] | None:
        fitting = [item for item in self.free_pieces(small, stream) if item[1].size >= size]
        if not self.settings.expandable_segments:
            fitting = list(dropwhile(lambda item: item[0].page, fitting))
        if not fitting:
            return None
        chosen = fitting[0]
        for candidate in fitting[1:]:
            if not chosen[0].page or self.reach(*candidate) >= self.reach(*chosen):
                break
            chosen = candidate
        limit, have = self.settings.max_split_bytes, chosen[1].size
        if size < limit <= have:
            return None
        if size >= limit and have >= size + self.settings.max_non_split_rounding_bytes:
            return None
        return chosen

    def reach(self, segment: Segment, piece: Piece) -> int:
        behind = segment.pieces[segment.pieces.index(piece) + 1 :][:1]
        return piece.size + sum(p.size for p in behind if p.hole)

    def acquire(self, small: bool, stream: int, size: int) -> tuple[Segment, Piece] | None:
        found = self.ask(small, stream, size)
        if found is None and self.release_oversize(small, stream, size):
            found = self.ask(small, stream, size)
        if found is None:
            self.release()
            found = self.ask(small, stream, size)
        return found

    def ask(self, small: bool, stream: int, size: int) -> tuple[Segment, Piece] | None:
        if small:
            segment_size = 2 * MIB
        elif size < 10 * MIB:
            segment_size = self.settings.large_segment_bytes
        else:
            segment_size = (size + PAGE - 1) // PAGE * PAGE
        if self.allowed is not None and self.reserved + segment_size > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self.expand(small, stream, size)
        if self.capacity is not None and self.reserved + segment_size > self.capacity:
            return None
        segment = Segment(stream, small)
        segment.pieces = [Piece(self.take_addresses(segment_size), segment_size)]
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def take_addresses(self, size: int) -> int:
        address = self.next_address
        self.next_address += (size + PAGE - 1) // PAGE * PAGE
        return address

    # Expandable segments.

    def expand(self, small: bool, stream: int, size: int) -> tuple[Segment, Piece] | None:
        segment, piece = self.find_room(small, stream, size)
        if piece.hole and not self.map(segment, piece, size):
            return None
        while piece.size < size:
            behind = segment.pieces[segment.pieces.index(piece) + 1 :][:1]
            if not behind or not self.map(segment, behind[0], size - piece.size):
                return None
            piece = behind[0]
        return segment, piece

    def find_room(self, small: bool, stream: int, size: int) -> tuple[Segment, Piece]:
        for segment in sorted(self.segments, key=lambda s: s.pieces[0].address):
            if segment.small != small or segment.stream != stream or not segment.page:
                continue
            for at, hole in enumerate(segment.pieces):
                if not hole.hole:
                    continue
                start = at - 1 if at > 0 and segment.pieces[at - 1].name is None else at
                room = 0
                for piece in segment.pieces[start:]:
                    if piece.name is not None or room >= size:
                        break
                    room += piece.size
                if room >= size:
                    return segment, segment.pieces[start]
        page = 2 * MIB if small else self.settings.large_segment_bytes
        total = 2**40 if self.capacity is None else self.capacity + self.capacity // 8
        length = (total + page - 1) // page * page
        segment = Segment(stream, small, page)
        segment.pieces = [Piece(self.take_addresses(length), length, hole=True)]
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def map(self, segment: Segment, hole: Piece, size: int) -> bool:
        """Pages behind the first bytes of a hole, which joins what is free around it."""
        mapped = (min(size, hole.size) + segment.page - 1) // segment.page * segment.page
        if self.capacity is not None and self.reserved + mapped > self.capacity:
            return False
        if mapped < hole.size:
            rest = Piece(hole.address + mapped, hole.size - mapped, hole=True)
            segment.pieces.insert(segment.pieces.index(hole) + 1, rest)
            hole.size = mapped
        hole.hole = False
        self.join(segment, hole)
        return True

    def unmap(self, segment: Segment) -> None:
        base = segment.pieces[0].address
        free = [p for p in segment.pieces if p.name is None and not p.hole]
        for piece in sorted(free, key=lambda p: (p.size, p.address)):
            first = -((base - piece.address) // segment.page) * segment.page + base
            last = (piece.address + piece.size - base) // segment.page * segment.page + base
            if first >= last:
                continue
            edges = [piece.address, first, last, piece.address + piece.size]
            parts = [
                Piece(start, end - start, hole=start == first)
                for start, end in pairwise(edges)
                if end > start
            ]
            at = segment.pieces.index(piece)
            segment.pieces[at : at + 1] = parts
            self.join(segment, next(p for p in parts if p.hole))
        if all(piece.hole for piece in segment.pieces) and free:
            self.segments.remove(segment)

    def join(self, segment: Segment, piece: Piece) -> None:
        """A free piece and the free pieces around it become one."""
        for step in (-1, 1):
            at = segment.pieces.index(piece) + step
            if 0 <= at < len(segment.pieces):
                other = segment.pieces[at]
                if other.name is None and other.hole == piece.hole:
                    piece.address = min(piece.address, other.address)
                    piece.size += other.size
                    segment.pieces.remove(other)

    # What it gives back.

    def release_oversize(self, small: bool, stream: int, size: int) -> bool:
        limit = self.settings.max_split_bytes
        if limit == 2**64 - 1:
            return False
        wanted = max(size, limit)
        free = self.free_pieces(small, stream)
        at = len([1 for _, piece in free if piece.size < wanted])
        if at < len(free) and not free[at][0].page:
            self.segments.remove(free[at][0])
            return True
        released = 0
        for segment, piece in reversed(free[:at]):
            if released >= wanted or piece.size < limit:
                break
            if not segment.page:
                released += piece.size
                self.segments.remove(segment)
        return released >= wanted
