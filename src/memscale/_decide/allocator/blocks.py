"""What the model of the allocator is made of: blocks, the pools of free ones, and how both are shown.

NOTE [addresses are ages]: of free blocks of one size PyTorch takes that in the oldest segment, and in a segment that at
the lowest address. Here each segment lies behind all that were made before it, so that the address says both.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Literal

State = Literal["free", "allocated", "awaiting events", "unmapped"]


class Block:
    """A piece of a segment. `CachingAllocator.allocate` returns one; it is valid until it is freed."""

    __slots__ = (
        "address",
        "base",
        "freed_at",
        "next",
        "num_events",
        "pool",
        "prev",
        "requested_bytes",
        "size_bytes",
        "state",
        "user_streams",
    )

    def __init__(self, pool: Pool, base: int, address: int, size_bytes: int, state: State) -> None:
        self.pool = pool
        self.base = base
        """The address of its segment."""
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.state: State = state
        self.prev: Block | None = None
        self.next: Block | None = None
        self.user_streams: set[int] | None = None
        """Streams beside its own that use it, by `record_stream`."""
        self.num_events = 0
        self.freed_at = 0
        """How many searches its pool had seen when it became free."""

    def __repr__(self) -> str:
        return f"Block({self.size_bytes} B at {self.address:#x}, {self.state}, stream {self.pool.stream})"

    def insert_after(self, other: Block) -> None:
        other.prev, other.next = self, self.next
        if self.next is not None:
            self.next.prev = other
        self.next = other

    def absorb_neighbours(self, remove: Callable[[Block], None]) -> Block:
        """Make one block of this one and of its neighbours in the same state, each of which is removed from its list
        first."""
        block, after, before = self, self.next, self.prev
        if after is not None and after.state == self.state:
            remove(after)
            self._absorb_next()
        if before is not None and before.state == self.state:
            remove(before)
            before._absorb_next()
            block = before
        return block

    def _absorb_next(self) -> None:
        """NOTE [first blocks stay]: of two blocks that become one, the one at the lower address remains, and of a block
        that is cut the front. So the first block of a segment is the same object as long as the segment exists."""
        gone = self.next
        assert gone is not None
        self.size_bytes += gone.size_bytes
        self.next = gone.next
        if self.next is not None:
            self.next.prev = self
        gone.prev = gone.next = None


class Pool:
    """The free blocks of one stream, small or large, in the order in which they are looked through."""

    __slots__ = ("free", "is_small", "page_bytes", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool, page_bytes: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int, Block]] = []
        """The blocks, by size and then address. See NOTE [addresses are ages]."""
        self.unmapped: list[tuple[int, Block]] = []
        """What expandable segments have room for, by address."""

    def add(self, block: Block) -> None:
        insort(self.free, (block.size_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockState:
    """A block at one moment."""

    size_bytes: int
    requested_bytes: int
    """0 unless it is handed out, or waits for events."""
    state: State


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentState:
    """A segment at one moment; of an expandable one, a stretch of mapped pages."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    blocks: tuple[BlockState, ...]
    is_expandable: bool = False


def skip_growing(free: list[tuple[int, int, Block]], index: int) -> int:
    """A block with unmapped pages behind it counts as all that it could become, so that what cannot grow is used up
    first."""
    size_bytes = possible_bytes(free[index][2])
    while index + 1 < len(free):
        next_bytes = possible_bytes(free[index + 1][2])
        if next_bytes >= size_bytes:
            break
        index, size_bytes = index + 1, next_bytes
    return index


def possible_bytes(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and after.state == "unmapped" else 0)


def has_room(block: Block | None, size_bytes: int) -> bool:
    """Whether free and unmapped blocks from this one on are as large together."""
    found_bytes = 0
    while found_bytes < size_bytes and block is not None and block.state in ("free", "unmapped"):
        found_bytes += block.size_bytes
        block = block.next
    return found_bytes >= size_bytes


def whole_segments(pool: Pool) -> list[Block]:
    """The free blocks of a large pool that are a segment each."""
    if pool.is_small:
        return []
    return [block for _, _, block in pool.free if block.prev is None and block.next is None]


def chained(segment: SegmentState, pool: Pool, base: int, address: int, before: Block | None) -> list[Block]:
    """The blocks of a segment that lies at this address, one behind the other, and behind the one `before` them."""
    blocks = []
    for is_used, group in itertools.groupby(segment.blocks, lambda block: block.state == "allocated"):
        for state in group if is_used else [_one_free(group)]:
            blocks.append(block := Block(pool, base, address, state.size_bytes, state.state))
            block.requested_bytes = state.requested_bytes
            if before is not None:
                before.insert_after(block)
            before, address = block, address + state.size_bytes
    return blocks


def _one_free(blocks: Iterable[BlockState]) -> BlockState:
    """What neighbours are that nobody uses, or nobody will when events have come."""
    return BlockState(sum(block.size_bytes for block in blocks), 0, "free")


def stretch_from(first: Block, *, is_expandable: bool) -> tuple[SegmentState, Block | None]:
    """Mapped blocks from this one on, as a segment; and the block behind them."""
    blocks = []
    block: Block | None = first
    while block is not None and block.state != "unmapped":
        blocks.append(BlockState(block.size_bytes, block.requested_bytes, block.state))
        block = block.next
    size_bytes = sum(each.size_bytes for each in blocks)
    pool = first.pool
    return SegmentState(first.address, size_bytes, pool.stream, pool.is_small, tuple(blocks), is_expandable), block
