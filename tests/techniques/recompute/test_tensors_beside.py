"""Sums of bits, by which a first forward shows what it writes to in silence: they take next to no memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from memscale._torch.bit_sums import LARGEST_PIECE, sums_of_bits


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    large = torch.randn(3, LARGEST_PIECE + 1)
    return [
        torch.randn(7),
        large,
        large.bfloat16(),
        large.t(),
        torch.randn(5, 2 * LARGEST_PIECE)[:, ::2],
        torch.randn(2, 300, 400).permute(2, 0, 1)[1:],
        torch.randn(300, 300, dtype=torch.complex64),
        torch.tensor(3.0),
    ]


def test_they_depend_on_what_is_in_a_tensor_alone() -> None:
    assert sums_of_bits(tensors()) == sums_of_bits(tensors())
    assert sums_of_bits(tensors()) == [sums_of_bits([tensor])[0] for tensor in tensors()]


def test_little_is_summed_up_at_once() -> None:
    """A card copies that many elements into 64 bits."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        sums_of_bits(tensors())
    sizes = [math.prod(event.input_shapes[0]) for event in profiled.events() if event.name == "aten::sum"]
    assert max(sizes) <= LARGEST_PIECE
    assert sum(sizes) == sum(tensor.numel() * (1 + tensor.is_complex()) for tensor in tensors())


MOVES = {
    "roll": lambda tensor: tensor.roll(1, 0),
    "roll columns": lambda tensor: tensor.roll(1, -1),
    "flip": lambda tensor: tensor.flip(-1),
    "swap": lambda tensor: torch.cat([tensor[1:2], tensor[:1], tensor[2:]]),
    "other signs": lambda tensor: -tensor,
}


@pytest.mark.parametrize("how", MOVES)
def test_where_a_value_is_counts_and_so_do_signs(how: str) -> None:
    torch.manual_seed(0)
    half = torch.randn(64, 32)
    for tensor in (torch.cat([half, -half]), half.bfloat16(), half.t(), torch.randn(3, LARGEST_PIECE).t()):
        before = sums_of_bits([tensor])
        tensor.copy_(MOVES[how](tensor))
        assert sums_of_bits([tensor]) != before


@pytest.mark.parametrize("index", [0, LARGEST_PIECE, -1])
def test_every_element_counts(index: int) -> None:
    tensor = torch.zeros(3 * LARGEST_PIECE)
    (before,) = sums_of_bits([tensor])
    tensor[index] = 1.0
    assert sums_of_bits([tensor]) != [before]
