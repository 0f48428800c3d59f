"""Block-wise 8-bit numbers: a byte an element, and a 32-bit scale for every block of elements.

The 256 values that a byte can stand for are bitsandbytes' dynamic maps. Its own kernels are used where it has them.
Elsewhere (simgpu, any other device) the same is done in plain tensor operations, a chunk at a time, and gives the bits
that bitsandbytes gives on the CPU.

NOTE [packing twice]: the signed map has 1 but not -1. So the scale of a block whose largest element is negative is not
the largest element of what is unpacked, and packing that again would change every element a little. `_pack_exactly`
looks for the scale that gives the values back bit for bit, and finds it for everything that was unpacked before:
saving, loading, detaching and attaching again change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from memscale._torch import private

CHUNK_ELEMENTS = 1 << 20
"""Plain tensor operations need scratch, and have it for one chunk at a time."""
_GRID = 1 << 16
"""bitsandbytes' CPU kernel rounds to this many values between -1 and 1 before it looks up the nearest in the map."""
_KERNEL_DEVICES = ("cpu", "cuda", "xpu")
"""The devices for which bitsandbytes brings kernels; a plan may be made where it is not installed."""
_NEIGHBOURS = (0, 1, -1, 2, -2)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPacking:
    """How one tensor waits: its bytes, then the scales of its blocks."""

    signed: bool
    block_size: int

    def waiting_bytes(self, num_elements: int) -> int:
        return self._scales_at(num_elements) + 4 * -(-num_elements // self.block_size)

    def scratch_bytes(self, num_elements: int, device_type: str, itemsize: int = 4) -> int:
        """What packing and unpacking take on top, where an unpacked element has `itemsize` bytes."""
        chunk, last = min(num_elements, CHUNK_ELEMENTS), num_elements % CHUNK_ELEMENTS
        if device_type in _KERNEL_DEVICES:
            widened = 0 if itemsize == 4 else 4 * chunk
            return max(4 * chunk, widened + chunk + 4 * -(-chunk // self.block_size))
        filled = 12 * last if num_elements % self.block_size else 0  # the last block's filling copies its chunk
        return max(8 * chunk, filled) + 4 * -(-chunk // self.block_size)

    @staticmethod
    def _scales_at(num_elements: int) -> int:
        return -(-num_elements // 4) * 4

    def _split(self, memory: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(bytes of the elements, scales), both in this memory."""
        scales = memory.narrow(0, self._scales_at(num_elements), 4 * -(-num_elements // self.block_size))
        return memory.narrow(0, 0, num_elements), scales.view(torch.float32)

    def pack(self, values: torch.Tensor, memory: torch.Tensor, *, exactly: bool = False) -> None:
        """Write the values (a line) into the memory. `exactly`: see NOTE [packing twice]."""
        codes, scales = self._split(memory, values.numel())
        for elements, blocks in self._chunks(values.numel()):
            part = values[elements].to(memory.device, torch.float32)
            quantized = self._pack_exactly(part) if exactly else quantize(part, self.signed, self.block_size)
            codes[elements].copy_(quantized[0])
            scales[blocks].copy_(quantized[1])
            del quantized  # one chunk's scratch at a time

    def unpack(self, memory: torch.Tensor, values: torch.Tensor) -> None:
        """Write what waits in the memory into the values (a line)."""
        codes, scales = self._split(memory, values.numel())
        for elements, blocks in self._chunks(values.numel()):
            values[elements].copy_(dequantize(codes[elements], scales[blocks], self.signed, self.block_size))

    def _chunks(self, num_elements: int) -> Iterator[tuple[slice, slice]]:
        """Stretches of whole blocks: where they lie among the elements and among the scales."""
        step = max(1, CHUNK_ELEMENTS // self.block_size) * self.block_size
        for start in range(0, num_elements, step):
            stop = min(start + step, num_elements)
            yield slice(start, stop), slice(start // self.block_size, -(-stop // self.block_size))

    def _pack_exactly(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantize(values, self.signed, self.block_size)
        rows = _rows(values, self.block_size)
        best = _rows(codes, self.block_size)
        is_exact = _is_same(rows, best, scales, self.signed)
        largest = rows.abs().amax(1)
        for candidate in _candidate_scales(largest, self.signed):
            if bool(is_exact.all()):
                break
            tried = _nearest(rows, candidate, self.signed)
            better = _is_same(rows, tried, candidate, self.signed) & ~is_exact
            best = torch.where(better[:, None], tried, best)
            scales = torch.where(better, candidate, scales)
            is_exact |= better
        return best.reshape(-1)[: values.numel()], scales


@functools.lru_cache(maxsize=8)
def code_book(signed: bool, device: torch.device) -> torch.Tensor:
    """The values that a byte stands for, in order."""
    import bitsandbytes.functional

    book: torch.Tensor = bitsandbytes.functional.create_dynamic_map(signed=signed)
    return book.to(device)


@functools.lru_cache(maxsize=8)
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    """The nearest code of every value of the grid."""
    book = code_book(signed, torch.device("cpu"))
    grid = torch.arange(_GRID, device="cpu") / ((_GRID - 1) / 2) - 1
    return torch.bucketize(grid, (book[:-1] + book[1:]) / 2).to(torch.uint8).to(device)


def table_bytes(device_type: str) -> int:
    """What `code_book` and `_table` keep on the device, for one of the two maps."""
    return 256 * 4 + (0 if device_type in _KERNEL_DEVICES else _GRID)


def forget_tables() -> None:
    """Free what is kept on devices; it is made again when needed."""
    code_book.cache_clear()
    _table.cache_clear()


def quantize(values: torch.Tensor, signed: bool, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a byte an element, the scale of every block)."""
    book = code_book(signed, values.device)
    if private.has_own_kernel("bitsandbytes::quantize_blockwise", values.device.type):
        codes, scales = torch.ops.bitsandbytes.quantize_blockwise(values, book, block_size)
        return codes, scales
    rows = _rows(values, block_size)
    scales = rows.abs().amax(1)
    index = rows * (1 / _above_zero(scales))[:, None]
    index.nan_to_num_(-1, 1, -1)  # as the kernel does: from values that are not finite, and scales too small to invert
    index = index.clamp_(-1, 1).add_(1).mul_((_GRID - 1) / 2).add_(0.5).floor_().int()
    codes = _table(signed, values.device)[index]
    codes.masked_fill_((scales == 0)[:, None], 0)
    return codes.reshape(-1)[: values.numel()], scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, signed: bool, block_size: int) -> torch.Tensor:
    """The values, in 32 bits."""
    book = code_book(signed, codes.device)
    if private.has_own_kernel("bitsandbytes::dequantize_blockwise", codes.device.type):
        values: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            codes, scales, book, block_size, torch.float32
        )
        return values
    rows = book[_rows(codes, block_size).int()]
    return rows.mul_(scales[:, None]).reshape(-1)[: codes.numel()]


def _rows(line: torch.Tensor, block_size: int) -> torch.Tensor:
    """A row a block, the last one filled up with zeros."""
    missing = -line.numel() % block_size
    if missing:
        line = torch.nn.functional.pad(line, (0, missing))
    return line.view(-1, block_size)


def _above_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 0, scales, 1.0)


# ---- See NOTE [packing twice].


def _candidate_scales(largest: torch.Tensor, signed: bool) -> Iterator[torch.Tensor]:
    yield largest
    if signed:
        lowest = -float(code_book(signed, torch.device("cpu"))[0])
        for ulps in _NEIGHBOURS:
            yield (largest / lowest).view(torch.int32).add(ulps).clamp_(min=0).view(torch.float32)


def _nearest(rows: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    book = code_book(signed, rows.device)
    scaled = rows / _above_zero(scales)[:, None]
    return torch.bucketize(scaled, (book[:-1] + book[1:]) / 2, out_int32=True).to(torch.uint8)


def _is_same(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Which blocks come back as they are. The filling of the last one is zero, which both maps have."""
    values = code_book(signed, rows.device)[codes.int()] * scales[:, None]
    return (values == rows).all(1)
