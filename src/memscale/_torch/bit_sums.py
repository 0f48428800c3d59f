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
    """A device would make a copy of all that is summed up at once, in 64 bits: four times a weight of 16. No plan
    counts that, so it is done piece by piece."""
    pieces = [list(_pieces(tensor)) for tensor in tensors]
    weights = _weights(max(piece.numel() for piece in itertools.chain(*pieces)), device)
    sums = torch.empty(sum(map(len, pieces)), dtype=torch.int64, device=device)
    for piece, place in zip(itertools.chain(*pieces), sums.unbind(), strict=True):
        torch.sum(piece.reshape(-1) * weights[: piece.numel()], 0, out=place)
    values = iter(sums.tolist())
    return [hash(tuple(itertools.islice(values, len(each)))) for each in pieces]


def _weights(num_places: int, device: torch.device) -> torch.Tensor:
    """An odd number for each place of a piece, which is no simple function of the place."""
    mixed = torch.arange(1, num_places + 1, dtype=torch.int64, device=device).mul_(0x2545F4914F6CDD1D)
    return mixed.bitwise_xor_(mixed >> 29).bitwise_or_(1)


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
