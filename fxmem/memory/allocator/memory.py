"""The memory of a device, as the driver hands it out to the caching allocator."""

from __future__ import annotations

_PAGE_BYTES = 2 * 1024**2
_FIRST_ADDRESS = 0x7F00_0000_0000
_UNBOUNDED_ADDRESS_SPACE_BYTES = 1 << 40


class DeviceMemory:
    """Physical memory that can run out, and addresses that cannot.

    Addresses only ever grow, in steps of the driver's 2 MiB pages; a real driver hands freed
    ones out again, and in an order of its own. An address decides nothing but which of two cached
    blocks of one size is taken first.

    Args:
        capacity_bytes: Total memory of the device; None has no end.
        context_bytes: What the CUDA context and other processes hold of it.

    Attributes:
        used_bytes: What is handed out, ``context_bytes`` apart.

    >>> memory = DeviceMemory(capacity_bytes=3 * 2**20)
    >>> memory.allocate(2 * 2**20) == 0x7F0000000000, memory.allocate(2 * 2**20)
    (True, None)
    """

    __slots__ = ("_next_address", "capacity_bytes", "context_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int | None = None, context_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.context_bytes = context_bytes
        self.used_bytes = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def free_bytes(self) -> int | None:
        """What is left; None without a capacity."""
        if self.capacity_bytes is None:
            return None
        return max(self.capacity_bytes - self.context_bytes - self.used_bytes, 0)

    def allocate(self, nbytes: int) -> int | None:
        """``cudaMalloc``: an address, or None where so much is not left."""
        return self.reserve_addresses(nbytes) if self.take(nbytes) else None

    def take(self, nbytes: int) -> bool:
        """``cuMemCreate``: physical memory for addresses that are reserved already."""
        free_bytes = self.free_bytes
        if free_bytes is not None and nbytes > free_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """``cudaFree`` and ``cuMemRelease``."""
        self.used_bytes -= nbytes

    def reserve_addresses(self, nbytes: int) -> int:
        """``cuMemAddressReserve``: the first of so many addresses, without memory behind them."""
        address = self._next_address
        self._next_address += (nbytes + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
        return address

    @property
    def expandable_bytes(self) -> int:
        """Addresses that an expandable segment reserves: 9/8 of the device's memory.

        Source: the constructor of ``ExpandableSegment`` in ``CUDACachingAllocator.cpp``.
        """
        if self.capacity_bytes is None:
            return _UNBOUNDED_ADDRESS_SPACE_BYTES
        return self.capacity_bytes + self.capacity_bytes // 8
