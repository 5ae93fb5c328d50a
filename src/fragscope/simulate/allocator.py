"""A caching allocator on a card, in simulated bytes: size classes, segments, splits, and no compaction.

The rules are PyTorch's published ones (native, non-expandable): sizes in multiples of 512 bytes; up to
1 MiB from segments of 2 MiB, below 10 MiB from segments of 20 MiB, above that a segment of its own in
steps of 2 MiB; best fit; a block is split if what remains is worth it; neighbours merge only inside
their segment; when the card refuses, wholly free segments go back and the request is tried once more.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

MIB = 2**20
GIB = 2**30
_ROUND = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB
_MIDDLE_SEGMENT = 20 * MIB
_LARGE_STEP = 2 * MIB


class Device:
    """The memory of one card: who asks gets it while there is room."""

    __slots__ = ("external_bytes", "peak_bytes", "total_bytes", "used_bytes")

    def __init__(self, total_bytes: int, idle_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = idle_bytes
        self.peak_bytes = idle_bytes
        self.external_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What the driver would still hand out."""
        return self.total_bytes - self.used_bytes

    def take(self, size: int) -> bool:
        """Memory from the driver; False if there is not enough."""
        if self.used_bytes + size > self.total_bytes:
            return False
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def give(self, size: int) -> None:
        """Memory back to the driver."""
        self.used_bytes -= size


class OutOfMemoryError(Exception):
    """The allocator gave up; the figures are those its message prints, in bytes."""

    def __init__(self, tried: int, allocator: "CachingAllocator") -> None:
        super().__init__(f"tried {tried} bytes")
        self.tried_bytes = tried
        self.free_bytes = allocator.device.free_bytes
        self.total_bytes = allocator.device.total_bytes
        self.allocated_bytes = allocator.allocated_bytes
        self.reserved_bytes = allocator.reserved_bytes

    @property
    def stranded_bytes(self) -> int:
        """Reserved and not allocated: what compaction could have used."""
        return self.reserved_bytes - self.allocated_bytes


class Block:
    """A stretch of one segment; its neighbours are those of the same segment."""

    __slots__ = ("after", "before", "free", "number", "size", "small")

    def __init__(self, size: int, number: int, *, small: bool) -> None:
        self.size = size
        self.number = number
        self.small = small
        self.free = False
        self.before: Block | None = None
        self.after: Block | None = None


class CachingAllocator:
    """One worker's allocator on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.retries_total = 0
        self.ooms_total = 0
        self._number = 0
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._blocks: dict[int, Block] = {}

    def alloc(self, wanted: int) -> Block:
        """A block of at least `wanted` bytes. Raises OutOfMemoryError."""
        size = -(-wanted // _ROUND) * _ROUND
        small = size <= _SMALL
        block = self._best_fit(size, small=small) or self._new_segment(size, small=small)
        rest = block.size - size
        if rest > _SMALL or (small and rest >= _ROUND):
            self._split(block, size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """The block is cached again, merged with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            self._withdraw(before)
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._withdraw(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._offer(block)

    def empty_cache(self) -> int:
        """Gives wholly free segments back to the device; returns their bytes."""
        released = 0
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._withdraw(block)
                released += block.size
        self.device.give(released)
        self.reserved_bytes -= released
        return released

    def inactive_split_bytes(self) -> int:
        """Free memory that a live neighbour keeps from going back."""
        return sum(block.size for block in self._split_blocks())

    def largest_free_bytes(self) -> int:
        """The largest cached block."""
        return max((rows[-1][0] for rows in self._free if rows), default=0)

    def _split_blocks(self) -> Iterator[Block]:
        return (b for b in self._blocks.values() if b.before is not None or b.after is not None)

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        rows = self._free[small]
        at = bisect_left(rows, (size, 0))
        if at == len(rows):
            return None
        block = self._blocks.pop(rows.pop(at)[1])
        block.free = False
        return block

    def _new_segment(self, size: int, *, small: bool) -> Block:
        if small:
            segment = _SMALL_SEGMENT
        elif size < _MIDDLE:
            segment = _MIDDLE_SEGMENT
        else:
            segment = -(-size // _LARGE_STEP) * _LARGE_STEP
        if not self.device.take(segment):
            self.empty_cache()
            self.retries_total += 1
            if not self.device.take(segment):
                self.ooms_total += 1
                raise OutOfMemoryError(segment, self)
        self.reserved_bytes += segment
        return self._make(segment, small=small)

    def _make(self, size: int, *, small: bool) -> Block:
        self._number += 1
        return Block(size, self._number, small=small)

    def _split(self, block: Block, size: int) -> None:
        rest = self._make(block.size - size, small=block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._offer(rest)

    def _offer(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number))
        self._blocks[block.number] = block

    def _withdraw(self, block: Block) -> None:
        rows = self._free[block.small]
        del rows[bisect_left(rows, (block.size, block.number))]
        del self._blocks[block.number]
        block.free = False


class ExpandableAllocator(CachingAllocator):
    """The same with expandable segments: pages move, so only true exhaustion fails and nothing is split off."""

    def alloc(self, wanted: int) -> Block:
        """A block of at least `wanted` bytes. Raises OutOfMemoryError."""
        size = -(-wanted // _ROUND) * _ROUND
        pages = -(-size // _LARGE_STEP) * _LARGE_STEP
        lacking = self.allocated_bytes + pages - self.reserved_bytes
        if lacking > 0:
            self._map(lacking, size)
        self.allocated_bytes += size
        return self._make(size, small=size <= _SMALL)

    def free(self, block: Block) -> None:
        """The pages stay mapped until somebody needs them."""
        self.allocated_bytes -= block.size

    def empty_cache(self) -> int:
        """Unmaps what no tensor uses, in whole pages; returns the bytes."""
        kept = -(-self.allocated_bytes // _LARGE_STEP) * _LARGE_STEP
        released = max(0, self.reserved_bytes - kept)
        self.reserved_bytes -= released
        self.device.give(released)
        return released

    def inactive_split_bytes(self) -> int:
        """Always 0, as on the real thing."""
        return 0

    def largest_free_bytes(self) -> int:
        """Whatever is mapped and unused serves one tensor."""
        return self.reserved_bytes - self.allocated_bytes

    def _map(self, lacking: int, size: int) -> None:
        lacking = -(-lacking // _LARGE_STEP) * _LARGE_STEP
        if not self.device.take(lacking):
            self.retries_total += 1
            if not self.device.take(lacking):
                self.ooms_total += 1
                raise OutOfMemoryError(size, self)
        self.reserved_bytes += lacking
