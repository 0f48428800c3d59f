"""Sums of the bits of tensors: whether one was written to, whoever wrote, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from memscale._torch import private

LARGEST_PIECE = 1 << 16
"""The most elements that are summed up at once."""


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sum of the bits of each, read as integers; the host waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    sums: list[torch.Tensor] = []
    with private.real_tensors(), torch.no_grad():
        for number, tensor in enumerate(tensors):
            sums.append(_sum_of(_as_integers(tensor)))
            by_device.setdefault(tensor.device, []).append(number)
        found = {n: bits for ns in by_device.values() for n, bits in zip(ns, _read([sums[n] for n in ns]), strict=True)}
    return [found[number] for number in range(len(tensors))]


def _sum_of(bits: torch.Tensor) -> torch.Tensor:
    """The sum as a tensor of 64 bits. A device would make a copy of all that is summed up at once, in 64 bits: four
    times a weight of 16. No plan counts that, so it is done piece by piece."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in _pieces(bits):
        total += piece.sum(dtype=torch.int64)
    return total


def _pieces(bits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of at most so many elements, which are all of it."""
    if bits.numel() <= LARGEST_PIECE:
        yield bits
    elif bits.is_contiguous():
        yield from bits.view(-1).split(LARGEST_PIECE)
    else:
        dimension = max(range(bits.dim()), key=bits.size)
        for half in bits.chunk(2, dimension):
            yield from _pieces(half)


def _read(sums: list[torch.Tensor]) -> list[int]:
    values: list[int] = torch.stack(sums).tolist()
    return values


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_plain_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
