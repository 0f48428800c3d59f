"""Sums of the bits of tensors: whether one was written to, whoever wrote, without a copy of it.

Each element is weighted by its place, and sums are taken modulo 2**64. A plain sum would not show what only moves
values about (`x.data.copy_(x.roll(1))`), nor what flips as many signs one way as the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from memscale._torch import private

LARGEST_PIECE = 1 << 15
"""The most elements that are summed up at once."""


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each, made of its bits, read as integers; the host waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    found: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    with private.real_tensors(), torch.no_grad():
        for device, numbers in by_device.items():
            found |= zip(numbers, _sums_on(device, [_as_integers(tensors[n]) for n in numbers]), strict=True)
    return [found[number] for number in range(len(tensors))]


def _sums_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Piece by piece: no plan counts what this takes of the device, weights and products in 64 bits."""
    pieces = [list(_pieces(tensor, _size_of_pieces(tensor))) for tensor in tensors]
    weights = _weights(max(piece.numel() for piece in itertools.chain(*pieces)), device)
    sums = torch.empty(sum(map(len, pieces)), dtype=torch.int64, device=device)
    for piece, place in zip(itertools.chain(*pieces), sums.unbind(), strict=True):
        weighted = piece * weights[: piece.numel()].view(piece.shape)
        torch.sum(weighted, tuple(range(piece.dim())), out=place)
        del weighted  # or two of them would be there
    values = iter(sums.tolist())
    return [hash(tuple(itertools.islice(values, len(each)))) for each in pieces]


def _size_of_pieces(tensor: torch.Tensor) -> int:
    """Two pieces of 64 bits are held: as much as the tensor would take in 64 bits, and at most 512 KiB."""
    return max(1, min(LARGEST_PIECE, tensor.numel() // 2))


def _weights(num_places: int, device: torch.device) -> torch.Tensor:
    """An odd number for each place of a piece, which is no simple function of it. Made in place."""
    mixed = torch.arange(1, num_places + 1, dtype=torch.int64, device=device).mul_(0x2545F4914F6CDD1D)
    return mixed.mul_(mixed).bitwise_xor_(0x1B873593CC9E2D51).bitwise_or_(1)


def _pieces(bits: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Views of at most so many elements, which are all of it."""
    if bits.numel() <= size:
        yield bits
    elif bits.is_contiguous():
        yield from bits.view(-1).split(size)
    else:
        dimension = max(range(bits.dim()), key=bits.size)
        for half in bits.chunk(2, dimension):
            yield from _pieces(half, size)


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
