"""What kernels allocate inside themselves, held against what PyTorch's allocator was asked for on an emulated card."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from memscale import Hardware
from memscale._planning.reserved.allocation_log import Allocated, Freed
from memscale._planning.reserved.kernel_temporaries import KernelTemporaries, temporary_bytes, threads_of
from memscale._planning.reserved.recording import record_steps
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal

pytestmark = pytest.mark.unit
SUM = torch.ops.aten.sum.dim_IntList
CARD = Hardware.from_name("RTX 3090")


def inside(rows: int, columns: int, hardware: Hardware = CARD, dtype: torch.dtype = torch.float32) -> list[int]:
    summed = torch.empty(rows, columns, device="meta", dtype=dtype)
    return [size for sizes in KernelTemporaries(hardware).inside(SUM, (summed, [0]), summed.sum(0)) for size in sizes]


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
    assert not list(KernelTemporaries(CARD).inside(SUM, (summed, [1]), summed.sum(1)))
    square = torch.empty(2048, 2048, device="meta")
    assert not list(KernelTemporaries(CARD).inside(SUM, (square, [-1], True), square.sum(-1, keepdim=True)))
    assert list(KernelTemporaries(CARD).inside(SUM, (square, [0]), square.sum(0)))


def test_other_operators_are_not_known() -> None:
    x = torch.empty(2048, 768, device="meta")
    assert not list(KernelTemporaries(CARD).inside(torch.ops.aten.add.Tensor, (x, x), x + x))


def test_threads_by_architecture() -> None:
    assert [threads_of(name) for name in ("sm_75", "sm_80", "sm_86", "sm_90")] == [1024, 2048, 1536, 2048]


def test_a_sum_of_booleans_is_converted_and_then_split() -> None:
    summed = torch.empty(2048, 768, device="meta", dtype=torch.bool)
    found = list(KernelTemporaries(CARD).inside(SUM, (summed, [0]), summed.sum(0)))
    assert found[0] == temporary_bytes(SUM, (summed, [0]))
    assert list(KernelTemporaries(None).inside(SUM, (summed, [0]), summed.sum(0))) == found[:1]
    assert len(found) == 2


# ---- on every card; the figures are those of the emulated card

_aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("func", "args", "allocated_bytes"),
    [
        (_aten._softmax_backward_data.default, (_meta(64, 128, 128), _meta(64, 128, 128), -1), 4_194_304),
        (_aten.embedding_dense_backward.default, (_meta(3072, 768), _meta(3072, dtype=torch.int64), 30000), 0),
        (_aten.embedding_dense_backward.default, (_meta(3073, 768), _meta(3073, dtype=torch.int64), 30000), 10_536_960),
        (
            _aten.embedding_dense_backward.default,
            (_meta(4096, 1024), _meta(4096, dtype=torch.int32), 50257),
            18_553_856,
        ),
        (_aten.native_group_norm.default, (_meta(128, 32, 512), None, None, 128, 32, 512, 8, 1e-6), 32_768),
        (
            _aten.native_group_norm.default,
            (_meta(128, 32, 512, dtype=torch.bfloat16), None, None, 128, 32, 512, 8, 1e-6),
            40_960,
        ),
        (
            _aten.native_group_norm_backward.default,
            (None, None, None, None, _meta(32), 128, 32, 512, 8, [True, True, True]),
            57_344,
        ),
        (
            _aten.native_group_norm_backward.default,
            (None, None, None, None, _meta(32), 128, 32, 512, 8, [False, True, True]),
            32_768,
        ),
        (_aten.sort.default, (_meta(2048, 1024), -1, True), 8_192),
        (_aten.sort.default, (_meta(2048, 8192), -1, True), 335_544_832),
        (_aten.sum.dim_IntList, (_meta(2048, 1024, dtype=torch.bool), [-1]), 16_777_216),
        (_aten.sum.dim_IntList, (_meta(2048, 1024), [-1]), 0),
        (_aten._fft_r2c.default, (_meta(64, 36, 256), [2], 0, True), 4_718_592),
        (_aten._fft_c2c.default, (_meta(64, 36, 256, dtype=torch.complex64), [0], 0, True), 4_718_592),
        (_aten._fft_c2c.default, (_meta(64, 36, 256, dtype=torch.complex64), [1], 0, True), 9_437_184),
        (_aten._fft_c2c.default, (_meta(512, 768, dtype=torch.complex64), [0, 1], 0, True), 3_145_728),
        (_aten._fft_c2r.default, (_meta(64, 36, 129, dtype=torch.complex64), [2], 0, 256), 7_096_320),
        (_aten._fft_c2r.default, (_meta(512, 385, dtype=torch.complex64), [0, 1], 0, 768), 4_722_688),
        (_aten._log_softmax_backward_data.default, (_meta(64, 128), _meta(64, 128), -1), 0),
    ],
)
def test_what_a_kernel_allocates_inside_itself(func: Any, args: tuple[Any, ...], allocated_bytes: int) -> None:
    assert sum(-(-size // 512) * 512 for size in temporary_bytes(func, args)) == allocated_bytes


def test_a_kernel_is_also_known_by_what_is_named_in_its_call() -> None:
    assert temporary_bytes(_aten.sort.stable, (_meta(512),), {"stable": True, "dim": -1}) == (512 * 8,)
    assert temporary_bytes(_aten.sum.dim_IntList, (_meta(8, 8), [0]), {"dtype": torch.float32}) == ()


def convolved(memory_format: torch.memory_format, groups: int = 1) -> list[tuple[int, ...]]:
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
        *kernels.after_each(
            aten.convolution_backward.default, backward, (torch.empty_like(x), torch.empty_like(weight), None)
        ),
    ]


def test_convolutions_copy_what_is_not_channels_last() -> None:
    images, weights = 8 * 64 * 56 * 56 * 4, 64 * 64 * 9 * 4
    assert convolved(torch.contiguous_format) == [(2 * images + weights,)] * 3
    assert convolved(torch.channels_last) == [(), ()]


def test_a_convolution_of_one_channel_a_group_is_pytorchs_own() -> None:
    assert convolved(torch.contiguous_format, groups=64) == [(), ()]


def test_the_backward_of_a_convolution_has_a_workspace_after_each_result() -> None:
    """As PyTorch allocates on the emulated card: the gradient of the input, its kernel's, that of the weight, its."""
    images, weights = 2 * 4 * 16 * 16 * 4, 4 * 4 * 9 * 4
    model = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
    batch = torch.zeros(2, 4, 16, 16, requires_grad=True)
    log = record_steps(FakeRehearsal(model, Inputs((batch,), {}), "cuda"), model, "none", hardware=CARD)
    events = [event for event in log.steps[0] if isinstance(event, Allocated | Freed)]
    first = next(n for n, event in enumerate(events) if "convolution_backward" in str(getattr(event, "place", "")))
    sizes = {event.serial: event.num_bytes for event in events if isinstance(event, Allocated)}
    of_kernel = 2 * images + weights
    seen = [(type(event), sizes[event.serial]) for event in events[first:] if event.serial in sizes]
    kernel = [(Allocated, of_kernel), (Freed, of_kernel)]
    assert seen[:6] == [(Allocated, images), *kernel, (Allocated, weights), *kernel]
