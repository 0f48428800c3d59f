"""What backward of attention allocates inside itself, held against what PyTorch 2.13 asked for on the emulated card."""

from __future__ import annotations

import pytest
import torch

from memscale._planning.reserved.attention_temporaries import EFFICIENT, FLASH, groups

pytestmark = pytest.mark.unit

Shape = tuple[int, int, int, int, int]
"""Batch, heads, queries, keys, width of a head."""
_SEEN: list[tuple[str, torch.dtype, Shape, int]] = [
    ("sm_86", torch.float32, (2, 3, 256, 256, 32), 393_600),
    ("sm_86", torch.float32, (2, 3, 256, 256, 64), 393_600),
    ("sm_86", torch.float32, (2, 3, 256, 256, 80), 787_200),
    ("sm_86", torch.float32, (2, 3, 256, 256, 160), 1_180_800),
    ("sm_86", torch.float32, (1, 2, 64, 300, 64), 32_800),
    ("sm_80", torch.float32, (2, 3, 256, 300, 128), 786_816),
    ("sm_90", torch.float32, (2, 3, 256, 300, 160), 1_180_224),
    ("sm_86", torch.float16, (2, 12, 1024, 1024, 64), 6_297_600),
    ("sm_86", torch.float16, (2, 3, 256, 256, 80), 786_816),
    ("sm_90", torch.float16, (2, 3, 256, 100, 72), 786_624),
    ("sm_80", torch.float16, (2, 3, 256, 300, 128), 786_624),
    ("sm_75", torch.float16, (8, 8, 64, 1024, 128), 4_196_352),
    ("sm_86", torch.float16, (2, 3, 256, 100, 104), 1_573_632),
    ("sm_86", torch.bfloat16, (2, 3, 256, 256, 128), 2_360_064),
    ("sm_86", torch.float16, (2, 3, 256, 300, 128), 2_753_280),
    ("sm_86", torch.float16, (8, 8, 256, 300, 128), 20_979_712),
    ("sm_86", torch.float16, (16, 16, 100, 300, 128), 33_570_816),
    ("sm_75", torch.float16, (8, 8, 256, 300, 160), 37_754_880),
    ("sm_90", torch.float16, (16, 16, 100, 300, 160), 58_732_544),
    ("sm_86", torch.float16, (8, 8, 64, 1024, 256), 33_558_528),
]


def _tensors(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient, query, key and value, as kernels want them."""
    batch, heads, queries, keys, width = shape
    long, short = (
        torch.empty(batch, length, heads, width, dtype=dtype, device="meta").transpose(1, 2)
        for length in (queries, keys)
    )
    return long, long, short, short


@pytest.mark.parametrize(("architecture", "dtype", "shape", "workspace_bytes"), _SEEN)
def test_the_workspace_of_efficient_attention(
    architecture: str, dtype: torch.dtype, shape: Shape, workspace_bytes: int
) -> None:
    *_, last = groups(EFFICIENT, _tensors(shape, dtype), architecture)
    batch, heads, queries, *_ = shape
    assert last == (batch * heads * queries * 4, workspace_bytes)


def test_in_full_precision_the_product_with_the_output_is_there_before() -> None:
    first, last = groups(EFFICIENT, _tensors((4, 3, 256, 256, 64), torch.float32), "sm_90")
    assert first == (786_432, 12_288, 12_288)
    assert last == (12_288, 787_200)


def test_one_head_needs_no_turning() -> None:
    first, _ = groups(EFFICIENT, _tensors((2, 1, 100, 300, 256), torch.float32), "sm_86")
    assert first == (204_800, 800)


def test_a_gradient_that_lies_otherwise_is_copied() -> None:
    _, query, key, value = _tensors((1, 2, 100, 100, 64), torch.float32)
    gradient = torch.empty(1, 2, 64, 100, device="meta").transpose(2, 3)
    first, last = groups(EFFICIENT, (gradient, query, key, value), "sm_86")
    assert first == (51_200, 51_200, 800, 800)
    assert last == (51_200, 800, 65_600)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 3, 256, 300, 160), (6_144, 1_179_648)),
        ((2, 3, 256, 256, 80), (6_144, 589_824)),
        ((2, 3, 100, 300, 64), (3_072, 196_608)),
        ((2, 12, 1024, 1024, 64), (98_304, 6_291_456)),
    ],
)
def test_flash_attention_adds_up_in_single_precision(shape: Shape, sizes: tuple[int, ...]) -> None:
    gradient, query, key, value = _tensors(shape, torch.float16)
    assert groups(FLASH, (gradient, query, key, value, gradient), "sm_80") == [sizes]
    by_heads = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    copies = (gradient.nbytes, gradient.nbytes)
    assert groups(FLASH, (by_heads, query, key, value, by_heads), "sm_80") == [(*copies, *sizes)]


def test_other_operators_are_none_of_these() -> None:
    assert groups(torch.ops.aten.mm.default, (), "sm_86") == []
