"""`Extents` knows which parts of a stretch of memory, or of a file, are free."""

from __future__ import annotations

import bisect

from memscale._units import round_up


class Extents:
    """First fit with coalescing over `[0, num_bytes)`, in multiples of `alignment` bytes."""

    def __init__(self, alignment: int, num_bytes: int = 0) -> None:
        self.alignment = alignment
        self.num_bytes = 0
        self.free_bytes = 0
        self._gaps: list[tuple[int, int]] = []  # (offset, length), sorted, never touching
        if num_bytes:
            self.grow(num_bytes)

    def rounded(self, num_bytes: int) -> int:
        return round_up(num_bytes, self.alignment)

    def grow(self, num_bytes: int) -> None:
        """Add free space at the end."""
        assert num_bytes % self.alignment == 0
        offset, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        self.give(offset, num_bytes)

    def take(self, num_bytes: int) -> int | None:
        """Take a free stretch of this length and return its offset; None if there is none."""
        num_bytes = self.rounded(num_bytes)
        for index, (offset, length) in enumerate(self._gaps):
            if length >= num_bytes:
                self._gaps[index : index + 1] = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
                self.free_bytes -= num_bytes
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Free a stretch that was taken."""
        num_bytes = self.rounded(num_bytes)
        self.free_bytes += num_bytes
        index = bisect.bisect(self._gaps, (offset, 0))
        end = offset + num_bytes
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == offset:
            index -= 1
            offset = self._gaps.pop(index)[0]
        self._gaps.insert(index, (offset, end - offset))

    @property
    def largest_gap(self) -> int:
        return max((length for _, length in self._gaps), default=0)

    @property
    def tail_gap(self) -> int:
        """Return the free bytes at the very end, which growing need not add."""
        if self._gaps and sum(self._gaps[-1]) == self.num_bytes:
            return self._gaps[-1][1]
        return 0
