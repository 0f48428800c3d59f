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
