"""A model of PyTorch's caching allocator for CUDA: what it hands out and what it holds for a series of requests.

    memory = CachingAllocator(parse_settings("expandable_segments:True"), capacity_bytes=24 << 30)
    block = memory.allocate(25_000_000)
    memory.free(block)
    memory.allocated_bytes, memory.reserved_bytes       # 0, 41943040: what was freed is kept for the next request

Memory is taken from the card in *segments*, and segments are cut into *blocks*. A request is rounded up, gets the
smallest free block of its stream and pool that is large enough, and gives the rest of that block back if the rest is
worth keeping. `allocated` counts the blocks that are handed out, `reserved` the segments. The rules are those of torch
2.13 (`c10/cuda/CUDACachingAllocator.cpp`), written anew from their description; `tests/data/allocator_series.json`
holds what PyTorch's own allocator did for some thousand requests, and the model does the same, block by block.

Not modelled: pools of CUDA graphs and of `torch.cuda.MemPool`, and `backend:cudaMallocAsync`.
"""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Literal

from memscale._decide.allocator.blocks import (
    Block,
    Pool,
    SegmentState,
    State,
    chained,
    has_room,
    skip_growing,
    stretch_from,
    whole_segments,
)
from memscale._decide.allocator.settings import NUM_DIVISIONS, AllocatorSettings
from memscale._errors import ConfigError, MemScaleError
from memscale._units import MIB, round_up, show_bytes

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""The largest request that is served from the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
PACKED_BYTES = 10 * MIB
"""Requests of the large pool below this share segments; others get one of their own size."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
ADDRESS_SPACE_BYTES = 1 << 46
"""The address space of an expandable segment where the size of the card is not known."""


class OutOfMemoryError(MemScaleError):
    """The modelled card has no room for a request, even after all that was cached has been given back."""


Movement = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
"""What is done with memory of the card, in the words of PyTorch's snapshots."""


class CachingAllocator:
    """The model. Its counters are plain attributes: read them, and change them only through its methods.

    Args:
        settings: as PyTorch is configured; None: as it comes.
        capacity_bytes: what the card has for PyTorch; None: as much as is asked for.
        total_bytes: the size of the card, of which `memory_fraction` is a share; None: `capacity_bytes`.
        event_lag: how many requests the host is ahead of the device: an event that was recorded when a block was freed
            is found done that many requests later. None: never, unless the host waits for it.
        on_memory: is told of memory that is taken from the card and given back: what, at which address, how many bytes.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
        *,
        total_bytes: int | None = None,
        event_lag: int | None = 0,
        on_memory: Callable[[Movement, int, int], None] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        """The sum of the blocks that are handed out."""
        self.requested_bytes = 0
        """What was asked for, of blocks that are handed out or wait for events."""
        self.reserved_bytes = 0
        """The sum of the segments."""
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        """How often all that was cached had to be given back for a request."""
        self._total_bytes = total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self._address_space_bytes = ADDRESS_SPACE_BYTES if total_bytes is None else total_bytes + total_bytes // 8
        self._next_address = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._first_blocks: dict[int, Block] = {}
        """The first block of every segment, by address. See NOTE [first blocks stay]."""
        self._expandable_bases: set[int] = set()
        """The addresses of segments that grow page by page."""
        self._events: dict[int, collections.deque[tuple[int, Block]]] = {}
        """Events by stream, oldest first: the request before which each was recorded, and the block that waits."""
        self._event_lag = event_lag
        self._on_memory = on_memory or _ignore
        self._num_requests = 0
        self._num_searches = {True: 0, False: 0}
        self.configure(settings or AllocatorSettings())

    def configure(self, settings: AllocatorSettings) -> None:
        """Follow these settings from here on. Segments that exist stay what they are: with expandable segments their
        free blocks are used on; without, those of expandable ones are left alone."""
        self.settings = settings
        self._allowed_bytes = _allowed_bytes(settings, self._total_bytes)
        self._is_expandable = settings.expandable_segments
        self._max_split_bytes: float = settings.max_split_bytes or float("inf")
        self._slack_bytes = settings.max_non_split_rounding_bytes or settings.large_segment_bytes
        self._divides = any(settings.roundup_power2_divisions)
        self._collects = settings.garbage_collection_threshold > 0 and self._allowed_bytes is not None
        for pool in self._pools.values():
            if not pool.is_small and not pool.unmapped:  # an expandable segment keeps the pages that it began with
                pool.page_bytes = settings.large_segment_bytes

    # ---- requests

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least this many bytes, at least one; raises `OutOfMemoryError`."""
        if num_bytes <= 0:
            raise ValueError(
                f"a block of {num_bytes} bytes was asked for; PyTorch asks for none where nothing is needed"
            )
        if self._events:
            self._process_events()
        self._num_requests += 1
        size_bytes = self._rounded(num_bytes)
        is_small = size_bytes <= SMALL_BYTES
        pool = self._pool(stream, is_small)
        block = self._best_fit(pool, size_bytes) or self._reserve(pool, size_bytes)
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes and self._splits(is_small, size_bytes, rest_bytes):
            self._cut(block, size_bytes)
        block.state = "allocated"
        block.requested_bytes = num_bytes
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += num_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back; one that other streams use becomes available when they are done with it."""
        if block.state != "allocated":
            raise ValueError(f"{block} is not handed out: it was freed before")
        self.allocated_bytes -= block.size_bytes
        if not block.user_streams:
            self._make_free(block)
            return
        block.state = "awaiting events"
        for stream in sorted(block.user_streams):
            self._events.setdefault(stream, collections.deque()).append((self._num_requests, block))
            block.num_events += 1
        block.user_streams = None

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream uses the block, too: what it does until the block is freed comes before the block's reuse."""
        if block.state != "allocated":
            raise ValueError(f"{block} is not handed out: no stream may use it")
        if stream != block.pool.stream:
            if block.user_streams is None:
                block.user_streams = set()
            block.user_streams.add(stream)

    def empty_cache(self) -> None:
        """Wait for all events, and give back every segment and page that is free as a whole."""
        for queue in self._events.values():
            for _, block in queue:
                self._finish_event(block)
        self._events.clear()
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.is_small, pool.stream)):
            for _, _, block in list(pool.free):
                if block.base in self._expandable_bases:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Peaks are counted from what there is now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> tuple[SegmentState, ...]:
        """All segments and their blocks, by address."""
        found = []
        for address in sorted(self._first_blocks):
            block: Block | None = self._first_blocks[address]
            while block is not None:
                if block.state == "unmapped":
                    block = block.next
                    continue
                segment, block = stretch_from(block, is_expandable=address in self._expandable_bases)
                found.append(segment)
        return tuple(found)

    # ---- what is there already

    def adopt(self, segments: Iterable[SegmentState]) -> dict[int, Block]:
        """Take over segments that an allocator has made, oldest first; their blocks, by the addresses they had there.

        A block that waits for events is taken for free. Of an expandable segment stretches are known and not its
        beginning, so it begins with the first of them.
        """
        found: dict[int, Block] = {}
        growing: dict[tuple[int, bool], list[SegmentState]] = {}
        for segment in segments:
            if segment.is_expandable:
                growing.setdefault((segment.stream, segment.is_small), []).append(segment)
                continue
            pool = self._pool(segment.stream, segment.is_small)
            first = self._new_segment(pool, segment.size_bytes, "free")
            blocks = chained(segment, pool, first.base, first.address, None)
            self._first_blocks[first.address] = blocks[0]
            self._settle(segment, blocks, found)
        for (stream, is_small), stretches in growing.items():
            self._adopt_growing(self._pool(stream, is_small), sorted(stretches, key=lambda one: one.address), found)
        self.reset_peaks()
        return found

    def _adopt_growing(self, pool: Pool, stretches: list[SegmentState], found: dict[int, Block]) -> None:
        start, last = stretches[0].address, stretches[-1]
        span_bytes = last.address + last.size_bytes - start
        space_bytes = round_up(max(self._address_space_bytes, span_bytes + pool.page_bytes), pool.page_bytes)
        base = self._new_segment(pool, space_bytes, "unmapped").base
        self._expandable_bases.add(base)
        before: Block | None = None
        position = 0
        for stretch in stretches:
            before = self._leave_unmapped(pool, base, position, stretch.address - start, before)
            blocks = chained(stretch, pool, base, base + stretch.address - start, before)
            if before is None:
                self._first_blocks[base] = blocks[0]
            self._settle(stretch, blocks, found)
            before, position = blocks[-1], stretch.address - start + stretch.size_bytes
        self._leave_unmapped(pool, base, position, space_bytes, before)

    def _leave_unmapped(self, pool: Pool, base: int, start: int, end: int, before: Block | None) -> Block | None:
        """The last block, where an expandable segment has room between these distances from its base."""
        if start == end or before is None:
            return before
        room = Block(pool, base, base + start, end - start, "unmapped")
        before.insert_after(room)
        pool.add_unmapped(room)
        return room

    def _settle(self, segment: SegmentState, blocks: list[Block], found: dict[int, Block]) -> None:
        """Count adopted blocks, and put the free ones into their pool."""
        self.reserved_bytes += segment.size_bytes
        address = segment.address
        for block in blocks:
            found[address] = block
            address += block.size_bytes
            if block.state == "allocated":
                self.allocated_bytes += block.size_bytes
                self.requested_bytes += block.requested_bytes
            else:
                self._add_free(block)

    # ---- which block

    def _rounded(self, num_bytes: int) -> int:
        if num_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        if self._divides:
            index = min(max(num_bytes.bit_length() - MIB.bit_length(), 0), NUM_DIVISIONS - 1)
            divisions = self.settings.roundup_power2_divisions[index]
            if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
                return round_up(num_bytes, (1 << num_bytes.bit_length() - 1) // divisions)
        return (num_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES

    def _pool(self, stream: int, is_small: bool) -> Pool:
        found = self._pools.get((stream, is_small))
        if found is not None:
            return found
        page_bytes = SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes
        pool = self._pools[stream, is_small] = Pool(stream, is_small, page_bytes)
        return pool

    def _best_fit(self, pool: Pool, size_bytes: int) -> Block | None:
        """The smallest free block that is large enough, taken out of its pool; of equal ones the first."""
        if self._collects:
            self._num_searches[pool.is_small] += 1
        free = pool.free
        index = bisect_left(free, (size_bytes,))
        if self._expandable_bases and not self._is_expandable:
            index = self._skip_expandable(free, index)
        if index == len(free):
            return None
        if self._is_expandable:
            index = skip_growing(free, index)
        found_bytes, _, block = free[index]
        if size_bytes < self._max_split_bytes:
            if found_bytes >= self._max_split_bytes:
                return None
        elif found_bytes >= size_bytes + self._slack_bytes:
            return None
        del free[index]
        return block

    def _skip_expandable(self, free: list[tuple[int, int, Block]], index: int) -> int:
        """They have been switched off, and nothing more is placed in those that are left."""
        while index < len(free) and free[index][2].base in self._expandable_bases:
            index += 1
        return index

    def _splits(self, is_small: bool, size_bytes: int, rest_bytes: int) -> bool:
        if is_small or self._is_expandable:
            return rest_bytes >= MIN_BLOCK_BYTES
        return size_bytes < self._max_split_bytes and rest_bytes > SMALL_BYTES

    def _cut(self, block: Block, size_bytes: int) -> None:
        """Keep the front; the rest is free."""
        rest = self._cut_off(block, size_bytes, "free")
        self._add_free(rest)

    def _cut_off(self, block: Block, size_bytes: int, state: State) -> Block:
        rest = Block(block.pool, block.base, block.address + size_bytes, block.size_bytes - size_bytes, state)
        block.size_bytes = size_bytes
        block.insert_after(rest)
        return rest

    # ---- blocks come back

    def _make_free(self, block: Block) -> None:
        """Merge it with its free neighbours, and put the whole into its pool."""
        self.requested_bytes -= block.requested_bytes
        block.requested_bytes = 0
        block.state = "free"
        self._merge(block)

    def _merge(self, block: Block) -> None:
        self._add_free(block.absorb_neighbours(block.pool.remove))

    def _add_free(self, block: Block) -> None:
        block.freed_at = self._num_searches[block.pool.is_small]
        block.pool.add(block)

    def _process_events(self) -> None:
        """Take back blocks whose events are done; of each stream in order, up to the first that is not."""
        if self._event_lag is None:
            return
        until = self._num_requests - self._event_lag
        for stream, queue in list(self._events.items()):
            while queue and queue[0][0] <= until:
                self._finish_event(queue.popleft()[1])
            if not queue:
                del self._events[stream]

    def _finish_event(self, block: Block) -> None:
        block.num_events -= 1
        if block.num_events == 0:
            self._make_free(block)

    # ---- segments

    def _reserve(self, pool: Pool, size_bytes: int) -> Block:
        """A free block of new memory; for want of it, all that is cached goes back first."""
        if self._collects:
            self._collect_garbage()
        block = self._new_memory(pool, size_bytes)
        if block is None and self._release_oversize(pool, size_bytes):
            block = self._new_memory(pool, size_bytes)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._new_memory(pool, size_bytes)
        if block is None:
            raise OutOfMemoryError(self._refusal(size_bytes))
        return block

    def _refusal(self, size_bytes: int) -> str:
        limits = [limit for limit in (self.capacity_bytes, self._allowed_bytes) if limit is not None]
        return (
            f"The modelled card has no room for a block of {show_bytes(size_bytes)}: of {show_bytes(min(limits))}, "
            f"{show_bytes(self.reserved_bytes)} are reserved and {show_bytes(self.allocated_bytes)} allocated. "
            "Lower the batch size or give it more memory."
        )

    def _new_memory(self, pool: Pool, size_bytes: int) -> Block | None:
        segment_bytes = self._segment_bytes(size_bytes)
        if self._allowed_bytes is not None and self.reserved_bytes + segment_bytes > self._allowed_bytes:
            return None
        if self._is_expandable:
            return self._grow(pool, size_bytes)
        if not self._take(segment_bytes):
            return None
        self._on_memory("segment_alloc", self._next_address, segment_bytes)
        return self._new_segment(pool, segment_bytes, "free")

    def _segment_bytes(self, size_bytes: int) -> int:
        if size_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size_bytes < PACKED_BYTES:
            return self.settings.large_segment_bytes
        return round_up(size_bytes, SEGMENT_ROUNDING_BYTES)

    def _new_segment(self, pool: Pool, num_bytes: int, state: State) -> Block:
        address = self._next_address
        self._next_address += num_bytes
        block = self._first_blocks[address] = Block(pool, address, address, num_bytes, state)
        return block

    def _take(self, num_bytes: int) -> bool:
        """Memory of the card, if there is as much."""
        if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release(self, block: Block) -> None:
        """Give a segment back that is one free block."""
        block.pool.remove(block)
        del self._first_blocks[block.address]
        self.reserved_bytes -= block.size_bytes
        self._on_memory("segment_free", block.address, block.size_bytes)

    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Give blocks back that are too large to be split: one that suffices, or the largest until they do."""
        if self.settings.max_split_bytes is None or self._is_expandable:
            return False
        needed_bytes = max(size_bytes, self.settings.max_split_bytes)
        index = bisect_left(pool.free, (needed_bytes,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released_bytes = 0
        while released_bytes < needed_bytes and pool.free and pool.free[-1][0] >= self.settings.max_split_bytes:
            released_bytes += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released_bytes >= needed_bytes

    def _collect_garbage(self) -> None:
        """Give unused segments of the large pools back, those that are older than the average first."""
        assert self._allowed_bytes is not None
        excess_bytes = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed_bytes)
        while excess_bytes > 0:
            unused = [block for pool in self._pools.values() for block in whole_segments(pool)]
            ages = [self._num_searches[False] - block.freed_at for block in unused]
            if not ages or self._is_expandable:
                return
            # The mean is that of the blocks that were left at the beginning of a round, as in PyTorch.
            for block, age in zip(unused, ages, strict=True):
                if age >= sum(ages) / len(ages):
                    excess_bytes -= block.size_bytes
                    self._release(block)

    # ---- expandable segments

    def _grow(self, pool: Pool, size_bytes: int) -> Block | None:
        """Map pages behind or between blocks, at the lowest address where this gives enough in one piece."""
        block = self._room_for(pool, size_bytes)
        if block.state == "unmapped":
            mapped = self._map(block, min(block.size_bytes, size_bytes))
            if mapped is None:
                return None
            block = mapped
        while block.size_bytes < size_bytes:
            assert block.next is not None
            mapped = self._map(block.next, min(size_bytes - block.size_bytes, block.next.size_bytes))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _room_for(self, pool: Pool, size_bytes: int) -> Block:
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            start = before if before is not None and before.state == "free" else unmapped
            if has_room(start, size_bytes):
                return start
        space_bytes = round_up(max(self._address_space_bytes, size_bytes), pool.page_bytes)
        segment = self._new_segment(pool, space_bytes, "unmapped")
        self._expandable_bases.add(segment.base)
        pool.add_unmapped(segment)
        return segment

    def _map(self, block: Block, num_bytes: int) -> Block | None:
        """Map pages at the front of an unmapped block; the free block that they are part of afterwards."""
        num_bytes = round_up(num_bytes, block.pool.page_bytes)
        if not self._take(num_bytes):
            return None
        self._on_memory("segment_map", block.address, num_bytes)
        block.pool.remove_unmapped(block)
        if num_bytes < block.size_bytes:
            block.pool.add_unmapped(self._cut_off(block, num_bytes, "unmapped"))
        before = block.prev if block.prev is not None and block.prev.state == "free" else None
        block.state = "free"
        self._merge(block)
        return before or block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block."""
        pool, page_bytes = block.pool, block.pool.page_bytes
        base = block.base
        start = base + round_up(block.address - base, page_bytes)
        end = base + (block.address + block.size_bytes - base) // page_bytes * page_bytes
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            front, block = block, self._cut_off(block, start - block.address, "free")
            self._add_free(front)
        if end < block.address + block.size_bytes:
            self._add_free(self._cut_off(block, end - block.address, "free"))
        self.reserved_bytes -= block.size_bytes
        self._on_memory("segment_unmap", block.address, block.size_bytes)
        block.state = "unmapped"
        self._merge_unmapped(block)

    def _merge_unmapped(self, block: Block) -> None:
        block = block.absorb_neighbours(block.pool.remove_unmapped)
        if block.prev is None and block.next is None:
            del self._first_blocks[block.address]
            self._expandable_bases.discard(block.address)
        else:
            block.pool.add_unmapped(block)


def _ignore(what: Movement, address: int, num_bytes: int) -> None:
    """Nobody wants to be told."""


def _allowed_bytes(settings: AllocatorSettings, total_bytes: int | None) -> int | None:
    if settings.memory_fraction is None:
        return None
    if total_bytes is None:
        raise ConfigError(
            f"memory_fraction={settings.memory_fraction} is a share of the card: say how large that is by total_bytes"
        )
    return int(settings.memory_fraction * total_bytes)
