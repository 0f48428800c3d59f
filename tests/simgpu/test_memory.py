"""Every device byte is counted: absolute numbers, because an accounting bug once passed every relative test."""

import gc

import pytest
import torch
from torch import nn

import simgpu

A = torch.accelerator
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _clean(simgpu_device, no_leaks):
    """Every test here must also give all its bytes back."""


def allocated() -> int:
    return A.memory_allocated()


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((1,), torch.uint8, 512),
        ((512,), torch.uint8, 512),
        ((513,), torch.uint8, 1024),
        ((128,), torch.float32, 512),
        ((129,), torch.float32, 1024),
        ((1000,), torch.float32, 4096),
        ((1000,), torch.float64, 8192),
        ((3, 5, 7), torch.bfloat16, 512),
        ((100, 100), torch.complex64, 80384),
        ((), torch.int64, 512),
        ((0,), torch.float32, 0),
        ((4, 0, 3), torch.float32, 0),
    ],
)
def test_one_tensor_costs_its_bytes_rounded_to_512(shape, dtype, expected):
    before = allocated()
    t = torch.empty(shape, dtype=dtype, device="simgpu")
    assert allocated() - before == expected
    del t
    assert allocated() == before


def test_operator_results_are_charged_and_views_are_not():
    before = allocated()
    A.reset_peak_memory_stats()
    x = torch.empty(1024, device="simgpu")
    y = x + 1
    z = y.view(32, 32).t()[3:, 1::2]
    assert allocated() - before == 8192
    del x, y
    assert allocated() - before == 4096  # the view keeps its base
    del z
    assert allocated() == before
    assert A.max_memory_allocated() - before == 8192


def test_a_linear_layer_forward_and_backward_to_the_byte():
    before = allocated()
    layer = nn.Linear(256, 128).to("simgpu")
    parameters = 256 * 128 * 4 + 512
    assert allocated() - before == parameters
    x = torch.zeros(64, 256, device="simgpu")
    y = layer(x)
    assert allocated() - before == parameters + 64 * 256 * 4 + 64 * 128 * 4
    y.backward(torch.zeros_like(y))
    assert allocated() - before == 2 * parameters + 64 * 256 * 4 + 64 * 128 * 4
    del layer, x, y


def test_dropout_saves_a_boolean_mask():
    x = torch.ones(1 << 16, device="simgpu", requires_grad=True)
    before = allocated()
    y = torch.nn.functional.dropout(x, 0.5)
    assert allocated() - before == (1 << 16) * 4 + (1 << 16)
    del y


def test_foreach_adamw_holds_a_whole_copy_of_the_parameters_in_its_step():
    start = allocated()
    parameters = [nn.Parameter(torch.zeros(1 << 14, device="simgpu")) for _ in range(8)]
    size = 8 * (1 << 14) * 4
    optimizer = torch.optim.AdamW(parameters)  # the default: torch picks foreach, as for a GPU
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        A.reset_peak_memory_stats()
        before = allocated()
        optimizer.step()
    assert allocated() == before
    assert A.max_memory_allocated() - before == size
    assert before - start == pytest.approx(4 * size, rel=0.01)  # parameters, gradients, two moments
    del parameters, parameter, optimizer


def test_results_that_share_one_storage_are_charged_once():
    before = allocated()
    values, indices = torch.zeros(1024, device="simgpu").sort()
    assert allocated() - before == 4096 + 8192
    parts = torch.zeros(1024, device="simgpu").chunk(4)
    assert allocated() - before == 4096 + 8192 + 4096
    del values, indices, parts


def test_out_variants_and_resizes_move_the_charge():
    before = allocated()
    out = torch.empty(0, device="simgpu")
    torch.add(torch.ones(1024, device="simgpu"), 1, out=out)
    assert out.tolist() == [2.0] * 1024
    assert allocated() - before == 4096
    out.resize_(2048)
    assert out[:1024].tolist() == [2.0] * 1024
    assert allocated() - before == 8192
    out.untyped_storage().resize_(0)
    assert allocated() == before
    out.untyped_storage().resize_(8192)
    out.fill_(1.0)
    assert out.sum().item() == 2048
    assert allocated() - before == 8192
    del out


def test_set_and_data_swaps_move_the_charge():
    before = allocated()
    a = torch.zeros(1024, device="simgpu")
    a.set_()
    assert allocated() == before
    layer = nn.Linear(64, 64, bias=False).to("simgpu")
    weight = layer.weight
    host = weight.detach().cpu()
    layer.weight.data = torch.empty(0, device="simgpu")
    assert allocated() == before
    layer.weight.data = host.to("simgpu")
    assert allocated() - before == 64 * 64 * 4
    layer.weight.data = host
    assert layer.weight is weight
    assert layer.weight.device.type == "cpu"
    assert allocated() == before


def test_the_peak_is_exact_and_can_be_reset():
    before = allocated()
    A.reset_peak_memory_stats()
    a = torch.zeros(MIB, dtype=torch.uint8, device="simgpu")
    b = torch.zeros(2 * MIB, dtype=torch.uint8, device="simgpu")
    del a
    assert A.max_memory_allocated() - before == 3 * MIB
    A.reset_peak_memory_stats()
    assert A.max_memory_allocated() - before == 2 * MIB
    del b


def test_reserved_covers_allocated_and_empty_cache_lowers_it():
    A.empty_cache()
    base = A.memory_reserved()
    big = torch.zeros(10 * MIB, dtype=torch.uint8, device="simgpu")
    assert A.memory_reserved() >= A.memory_allocated()
    grown = A.memory_reserved()
    assert grown - base + 2 * MIB >= 10 * MIB
    del big
    assert A.memory_reserved() == grown  # cached
    A.empty_cache()
    assert A.memory_reserved() == base
    assert A.max_memory_reserved() >= grown


def test_memory_info_and_stats_have_the_usual_names(cap):
    cap(64 * MIB)
    A.empty_cache()
    free, total = A.get_memory_info()
    assert total == 64 * MIB
    assert free == total - A.memory_reserved()
    stats = A.memory_stats()
    for name in (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "active_bytes.all.current",
        "num_ooms",
    ):
        assert name in stats


def test_out_of_memory_is_raised_before_anything_is_allocated_and_says_what_a_card_says(cap):
    x = torch.zeros(200_000, device="simgpu")
    cap(allocated() + MIB // 4)
    before = A.memory_stats()
    message = (
        r"simgpu out of memory\. Tried to allocate 781\.50 KiB\. simgpu:0 has a total capacity of .* of which "
        r"256\.00 KiB is free\. .* is allocated by PyTorch, and .* is reserved by PyTorch but unallocated\."
    )
    with pytest.raises(torch.OutOfMemoryError, match=message):
        torch.empty(200_000, device="simgpu")
    with pytest.raises(torch.OutOfMemoryError):
        x * 2
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 36, dtype=torch.float64, device="simgpu")  # far more than the host has
    after = A.memory_stats()
    assert after["num_ooms"] == before["num_ooms"] + 3
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["active_bytes.all.current"] == before["active_bytes.all.current"]
    del x
    torch.empty(200_000, device="simgpu")  # and the device goes on working


@pytest.mark.parametrize("fitting_results", [0, 1, 2])
def test_out_of_memory_while_several_results_are_taken_over_leaves_the_books_right(cap, fitting_results):
    x = torch.randn(64, 64, device="simgpu")
    before = allocated()
    cap(before + fitting_results * 64 * 64 * 4)
    with pytest.raises(torch.OutOfMemoryError):
        torch.linalg.svd(x)  # three results
    gc.collect()
    assert allocated() == before
    assert A.memory_stats()["active_bytes.all.current"] == before
    del x


def training_losses(cap_bytes: int | None = None) -> tuple[list[float], int]:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.1) for _ in range(2)]
    model = nn.Sequential(*layers).to("simgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 64, 64, device="simgpu")
    torch.manual_seed(5)
    A.reset_peak_memory_stats()
    if cap_bytes is not None:
        simgpu.set_cap(cap_bytes)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, A.max_memory_allocated()


def test_a_cap_at_the_peak_passes_and_one_block_less_raises():
    losses, peak = training_losses()
    gc.collect()
    assert training_losses(peak) == (losses, peak)
    gc.collect()
    simgpu.set_cap(1 << 40)
    with pytest.raises(torch.OutOfMemoryError):
        training_losses(peak - 512)
    simgpu.set_cap(1 << 40)


def test_a_hundred_runs_give_one_peak():
    def run() -> tuple[int, int]:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Dropout(0.1)).to("simgpu")
        q = torch.randn(1, 2, 64, 16, device="simgpu", requires_grad=True)
        before = allocated()
        A.reset_peak_memory_stats()
        model(torch.randn(32, 64, device="simgpu")).sum().backward()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1).sum().backward()
        return A.max_memory_allocated() - before, before

    peaks = {run() for _ in range(100)}
    assert len(peaks) == 1, peaks


def test_recording_a_stream_holds_the_bytes_until_its_work_is_done():
    side = torch.Stream(device="simgpu")
    before = A.memory_stats()["active_bytes.all.current"]
    x = torch.full((1024,), 5.0, device="simgpu")
    host = torch.zeros(1024, pin_memory=True)
    side.wait_stream(A.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    del x
    assert A.memory_stats()["active_bytes.all.current"] - before == 4096
    assert A.memory_allocated() == before
    side.synchronize()
    assert A.memory_stats()["active_bytes.all.current"] == before
    assert host.tolist() == [5.0] * 1024
    assert simgpu.take_reports() == []


def test_held_bytes_are_waited_for_under_pressure(cap):
    side = torch.Stream(device="simgpu")
    x = torch.full((MIB,), 5, dtype=torch.uint8, device="simgpu")
    host = torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    side.wait_stream(A.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    cap(allocated())
    del x
    y = torch.empty(MIB, dtype=torch.uint8, device="simgpu")  # fits only after the side stream's copy
    assert A.memory_stats()["num_alloc_retries"] >= 1
    side.synchronize()
    assert host.eq(5).all()
    del y


def test_pinned_bytes_requested_and_rounded():
    simgpu.reset_pinned_peaks()
    A.empty_host_cache()
    before = simgpu.pinned_stats()
    a = torch.empty(3000, dtype=torch.uint8, pin_memory=True)
    b = torch.ones(1025, dtype=torch.uint8).pin_memory()
    now = simgpu.pinned_stats()
    assert now.requested_bytes - before.requested_bytes == 3000 + 1025
    assert now.rounded_bytes - before.rounded_bytes == 4096 + 2048
    assert now.allocations - before.allocations == 2
    del a
    assert simgpu.pinned_stats().requested_bytes - before.requested_bytes == 1025
    assert simgpu.pinned_stats().requested_peak - before.requested_bytes == 4025
    assert simgpu.pinned_stats().reserved_bytes - before.reserved_bytes == 4096 + 2048  # cached for reuse
    c = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    assert simgpu.pinned_stats().reserved_bytes - before.reserved_bytes == 4096 + 2048
    del b, c
    A.empty_host_cache()
    assert simgpu.pinned_stats().reserved_bytes == before.reserved_bytes


def test_is_pinned_knows_views_and_strangers():
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.ones(4).is_pinned()
    assert not torch.ones(4, device="simgpu").is_pinned()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.ones(4, device="simgpu").pin_memory()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(4, device="simgpu", pin_memory=True)


def test_uninitialised_memory_is_nan():
    assert torch.empty(100, device="simgpu").isnan().all()


def test_bad_capacities_and_devices_are_refused():
    with pytest.raises(ValueError, match="negative"):
        simgpu.set_cap(-1)
    with pytest.raises(RuntimeError, match="invalid device index 7"):
        simgpu.set_cap(1, device=7)
    for operation in (
        lambda: torch.empty(1, device="simgpu:7"),
        lambda: A.memory_allocated(7),
        lambda: A.reset_peak_memory_stats(7),
        lambda: A.get_memory_info(7),
        lambda: A.current_stream(7),
        lambda: A.synchronize(7),
        lambda: A.set_device_index(7),
        lambda: torch.Stream(device="simgpu:7"),
        lambda: torch.Stream(stream_id=0, device_index=7, device_type=20).synchronize(),
        lambda: torch.Generator("simgpu:7"),
        lambda: torch.simgpu.get_rng_state(7),
        lambda: simgpu.overlap_report(7),
    ):
        with pytest.raises(RuntimeError, match="invalid device index 7"):
            operation()
    with pytest.raises(RuntimeError, match="no stream 99"):
        A.set_stream(torch.Stream(stream_id=99, device_index=0, device_type=20))


def test_a_lower_cap_lowers_what_is_reserved(cap):
    A.empty_cache()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="simgpu")
    covered = A.memory_reserved()
    cap(covered - 512)
    assert A.memory_reserved() == covered - 512
    cap(1 << 20)
    assert A.memory_reserved() == A.memory_allocated() >= x.nbytes  # what is in use stays
