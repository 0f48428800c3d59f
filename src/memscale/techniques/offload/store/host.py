"""`HostStore`: tensors wait in host memory, pinned for an accelerator.

NOTE [pinned rounding]: allocators of pinned memory round every block up to a power of two, which costs up to twice the
bytes if each tensor has a block of its own. So memory is taken in segments whose sizes are powers of two, and tensors
share them; a tensor may be split over several segments. As many bytes are allocated as are requested, and a budget
holds.

Tensors of one size seldom fill segments: two buckets of 28 MB leave 11 MB of a segment of 64 MiB, and all segments
together would take a fifth more than is held. So a tensor that fits into no gap begins in the largest ones, unless they
are so small that copies would cost more time than the bytes are worth. Parameters need memory in one piece
(`splits=False`) and take their segments in advance instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch

from memscale._errors import StoreFullError
from memscale._units import show_bytes
from memscale.techniques.offload.pinned import SEGMENT_BYTES, power_of_two_above
from memscale.techniques.offload.store.extents import Extents
from memscale.techniques.offload.store.stores import PART_BYTES, Layout, Store, Ticket

SMALLEST_SEGMENT_BYTES = 64 * 1024
SMALLEST_PIECE_BYTES = 256 * 1024
SMALLEST_PIECE_SHARE = 1 / 32
"""A tensor begins in no smaller gap, and in none of a smaller share of it, unless the budget leaves no other room."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one segment."""

    segment: int
    offset: int
    num_bytes: int


class HostStore(Store):
    """Tensors wait in host memory, up to `budget_bytes`, which is taken as needed and kept for reuse until `close()`.

    `pinned=True` needs an accelerator; copies from and to pageable memory cannot run beside compute.
    """

    name = "host"
    in_memory = True

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        pinned: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        splits: bool = True,
    ) -> None:
        super().__init__(budget_bytes)
        assert segment_bytes == power_of_two_above(segment_bytes)
        self.pinned = pinned
        self.segment_bytes = segment_bytes
        self._splits = splits
        """Whether a tensor may begin in what is left of several segments. See NOTE [pinned rounding]."""
        self._segments: list[torch.Tensor] = []
        self._extents: list[Extents] = []

    def memory_of(self, ticket: Ticket) -> list[torch.Tensor]:
        pieces: list[Piece] = ticket.spot
        return [self._segments[piece.segment].narrow(0, piece.offset, piece.num_bytes) for piece in pieces]

    def write(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> None:
        # See NOTE [memory returns after its event].
        for fence in (ticket.read, ticket.written, self.freed_read, self.freed_written):
            if fence is not None:
                fence.event.synchronize()
        for memory, part in self._laid_over(ticket, parts):
            memory.copy_(part)
        self.counters.bytes_in += ticket.num_bytes

    def read(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> None:
        for memory, part in self._laid_over(ticket, parts):
            part.copy_(memory)
        self.counters.bytes_out += ticket.num_bytes

    def _laid_over(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        memory, offset = self.memory_of(ticket), 0
        for part in parts:
            yield from lay_over(memory, part, offset)
            offset += part.numel()

    def part_of(self, ticket: Ticket, layout: Layout, offset: int) -> Ticket:
        pieces, start, end = [], 0, offset + layout.num_bytes
        for piece in ticket.spot:
            low, high = max(offset, start), min(end, start + piece.num_bytes)
            if low < high:
                pieces.append(Piece(piece.segment, piece.offset + low - start, high - low))
            start += piece.num_bytes
        return ticket.part(layout, offset, pieces)

    def _reserve(self, num_bytes: int, cuts: Sequence[int]) -> list[Piece]:
        pieces: list[Piece] = []
        try:
            while num_bytes:
                piece = self._take(min(num_bytes, self.segment_bytes))
                pieces.append(piece)
                num_bytes -= piece.num_bytes
        except BaseException:
            self._release(pieces, 0)
            raise
        return pieces

    def _take(self, num_bytes: int) -> Piece:
        """Take one piece of at most this length: where it fits, in a new segment, or what the largest gap holds."""
        for index, extents in enumerate(self._extents):
            offset = extents.take(num_bytes)
            if offset is not None:
                return Piece(index, offset, num_bytes)
        gap, index = max(((e.largest_gap, i) for i, e in enumerate(self._extents)), default=(0, -1))
        size = self._next_segment_bytes(num_bytes)
        begins_in_gap = self._splits and gap >= max(SMALLEST_PIECE_BYTES, SMALLEST_PIECE_SHARE * num_bytes)
        if size >= num_bytes and not begins_in_gap:
            self._add_segment(size)
            return self._take(num_bytes)
        if max(gap, size) == 0:
            raise self._full(num_bytes)
        if size > gap and not begins_in_gap:
            self._add_segment(size)
            return self._take(size)
        offset = self._extents[index].take(gap)
        assert offset is not None
        return Piece(index, offset, min(gap, num_bytes))

    def _next_segment_bytes(self, num_bytes: int) -> int:
        """Return a segment size, a power of two, that the budget still allows; 0 if it allows none."""
        wanted = min(power_of_two_above(max(num_bytes, SMALLEST_SEGMENT_BYTES)), self.segment_bytes)
        if self.budget_bytes is None:
            return wanted
        left = self.budget_bytes - self.counters.allocated_bytes
        allowed = 1 << (left.bit_length() - 1) if left > 0 else 0
        return min(wanted, allowed) if allowed >= PART_BYTES else 0

    def _add_segment(self, num_bytes: int) -> None:
        try:
            segment = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
        except RuntimeError as error:
            kind = "pinned " if self.pinned else ""
            raise StoreFullError(
                f"the host gave no {show_bytes(num_bytes)} of {kind}memory, with "
                f"{show_bytes(self.counters.allocated_bytes)} in use by offloading ({error}); set "
                "max_cpu_offload_gb lower and offload_dir, so that the rest goes to disk"
            ) from error
        self._segments.append(segment)
        self._extents.append(Extents(PART_BYTES, num_bytes))
        self.counters.allocate(num_bytes, num_bytes)

    def _release(self, spot: list[Piece], num_bytes: int) -> None:
        for piece in spot:
            self._extents[piece.segment].give(piece.offset, piece.num_bytes)

    def _full(self, num_bytes: int) -> StoreFullError:
        return StoreFullError(
            f"the host store's budget of {show_bytes(self.budget_bytes or 0)} is spent "
            f"({show_bytes(self.counters.held_bytes)} in use) and {show_bytes(num_bytes)} more are needed; "
            "raise max_cpu_offload_gb or set offload_dir"
        )

    def close(self) -> None:
        with self._lock:
            super().close()
            self._segments.clear()
            self._extents.clear()
            self.counters.allocate(-self.counters.requested_bytes, -self.counters.allocated_bytes)
            self.counters.hold(-self.counters.held_bytes)
            self.freed_read = self.freed_written = None
        if self.pinned and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()  # otherwise the allocator keeps what was given back


def lay_over(
    memory: list[torch.Tensor], data: torch.Tensor, offset: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Lay `data` over the pieces, from `offset` on: yield pairs of a stretch of memory and a stretch of data."""
    pairs, start = [], 0
    for piece in memory:
        low, high = max(start, offset), min(start + piece.numel(), offset + data.numel())
        if low < high:
            pairs.append((piece[low - start : high - start], data[low - offset : high - offset]))
        start += piece.numel()
    return pairs
