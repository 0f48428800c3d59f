"""What kernels allocate inside themselves, held against what PyTorch's allocator was asked for on an emulated card."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memscale import Hardware
from memscale._planning.kernel_temporaries import KernelTemporaries, threads_of

pytestmark = pytest.mark.unit
SUM = torch.ops.aten.sum.dim_IntList
CARD = Hardware.from_name("RTX 3090")


def inside(rows: int, columns: int, hardware: Hardware = CARD, dtype: torch.dtype = torch.float32) -> list[int]:
    summed = torch.empty(rows, columns, device="meta", dtype=dtype)
    return KernelTemporaries(hardware).inside(SUM, (summed, [0]), summed.sum(0))


@pytest.mark.parametrize(
    ("rows", "columns", "staging_bytes"),
    [(2048, 768, 12_582_912), (2048, 3072, 50_331_648), (2048, 30522, 15_627_264)],
)
def test_biases_of_bert_base(rows: int, columns: int, staging_bytes: int) -> None:
    assert inside(rows, columns)[0] == staging_bytes


def test_short_sums_need_nothing() -> None:
    assert inside(64, 768) == []
    assert inside(1, 768) == []


def test_a_larger_card_divides_the_work_further() -> None:
    small = dataclasses.replace(CARD, num_multiprocessors=10)
    assert inside(2048, 3072, small)[0] < inside(2048, 3072)[0]


def test_along_the_rows_there_is_no_buffer() -> None:
    summed = torch.empty(2048, 768, device="meta")
    assert KernelTemporaries(CARD).inside(SUM, (summed, [1]), summed.sum(1)) == []


def test_other_operators_are_not_known() -> None:
    x = torch.empty(2048, 768, device="meta")
    assert KernelTemporaries(CARD).inside(torch.ops.aten.add.Tensor, (x, x), x + x) == []


def test_threads_by_architecture() -> None:
    assert [threads_of(name) for name in ("sm_75", "sm_80", "sm_86", "sm_90")] == [1024, 2048, 1536, 2048]


def convolved(memory_format: torch.memory_format, groups: int = 1) -> list[int]:
    """The workspaces of a convolution and of its backward: 8 images of 64 channels, 56 x 56."""
    x = torch.empty(8, 64, 56, 56, device="meta").to(memory_format=memory_format)
    weight = torch.empty(64, 64 // groups, 3, 3, device="meta").to(memory_format=memory_format)
    aten, places = torch.ops.aten, ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    forward = (x, weight, None, *places)
    result = torch.empty_like(x)  # on the meta device a result's channels never come last
    backward = (result, x, weight, [0], *places, [True, True, False])
    kernels = KernelTemporaries(CARD)
    return [
        *kernels.inside(aten.convolution.default, forward, result),
        *kernels.inside(
            aten.convolution_backward.default, backward, (torch.empty_like(x), torch.empty_like(weight), None)
        ),
    ]


def test_convolutions_copy_what_is_not_channels_last() -> None:
    images, weights = 8 * 64 * 56 * 56 * 4, 64 * 64 * 9 * 4
    assert convolved(torch.contiguous_format) == [2 * images + weights, 2 * images + weights]
    assert convolved(torch.channels_last) == []


def test_a_convolution_of_one_channel_a_group_is_pytorchs_own() -> None:
    assert convolved(torch.contiguous_format, groups=64) == []
