"""Streams and events: copies that nobody waited for have not happened."""

import pytest
import torch

import simgpu

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    pass


def test_a_copy_to_the_host_has_not_happened_until_waited_for():
    x = torch.full((1000,), 3.0, device="simgpu")
    host = torch.zeros(1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    A.synchronize()
    assert host.sum().item() == 3000


def test_a_copy_to_the_device_reads_the_host_as_late_as_it_may():
    host = torch.ones(1000).pin_memory()
    x = torch.empty(1000, device="simgpu")
    x.copy_(host, non_blocking=True)
    host.fill_(9.0)
    assert x.sum().item() == 9000
    assert any("pinned buffer race" in report for report in simgpu.take_reports())


def test_an_operator_on_the_same_stream_sees_the_copy():
    host = torch.ones(1000).pin_memory()
    x = torch.empty(1000, device="simgpu")
    x.copy_(host, non_blocking=True)
    assert (x * 2).sum().item() == 2000
    assert simgpu.take_reports() == []


def test_another_stream_sees_the_copy_only_after_waiting():
    side = torch.Stream(device="simgpu")
    host = torch.ones(1000).pin_memory()
    with side:
        x = torch.empty(1000, device="simgpu")
        x.copy_(host, non_blocking=True)
        event = side.record_event()
    assert (x * 1).isnan().all()
    assert any("read-after-write" in report for report in simgpu.take_reports())
    A.current_stream().wait_event(event)
    assert x.sum().item() == 1000
    assert simgpu.take_reports() == []
    x.record_stream(A.current_stream())


def test_waits_chain_over_streams():
    first, second = torch.Stream(device="simgpu"), torch.Stream(device="simgpu")
    host, out = torch.full((8,), 4.0).pin_memory(), torch.zeros(8, pin_memory=True)
    with first:
        x = torch.empty(8, device="simgpu")
        x.copy_(host, non_blocking=True)
        event = first.record_event()
    second.wait_event(event)
    with second:
        out.copy_(x, non_blocking=True)
    x.record_stream(second)
    assert out.isnan().all()
    second.synchronize()
    assert out.sum().item() == 32
    assert simgpu.take_reports() == []


def test_query_makes_progress():
    side = torch.Stream(device="simgpu")
    x, host = torch.ones(10, device="simgpu"), torch.zeros(10, pin_memory=True)
    side.wait_stream(A.current_stream())
    event = torch.Event(device="simgpu")
    with side:
        host.copy_(x, non_blocking=True)
        event.record()
    answers = [event.query() for _ in range(5)]
    assert answers[0] is False
    assert answers[-1] is True
    assert host.sum().item() == 10
    with side:
        host.copy_(x, non_blocking=True)
    polls = 0
    while not side.query():
        polls += 1
        assert polls < 10
    assert host.sum().item() == 10


def test_an_event_that_was_never_recorded_is_done():
    event = torch.Event(device="simgpu")
    assert event.query()
    event.synchronize()


def test_event_times_come_from_the_virtual_clock():
    start, end = (torch.Event(device="simgpu", enable_timing=True) for _ in range(2))
    host = torch.empty(25_000_000, dtype=torch.uint8, pin_memory=True)
    x = torch.empty_like(host, device="simgpu")
    start.record()
    x.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0, abs=0.02)  # 25 MB at 25 GB/s


def test_the_current_stream_is_per_thread_and_restored():
    default = A.current_stream()
    side = torch.Stream(device="simgpu")
    with side:
        assert A.current_stream() == side
        with torch.Stream(device="simgpu") as inner:
            assert A.current_stream() == inner
        assert A.current_stream() == side
    assert A.current_stream() == default
    assert default == torch.simgpu.default_stream()


def test_backward_runs_on_the_stream_of_the_forward():
    side = torch.Stream(device="simgpu")
    w = torch.randn(8, 8, device="simgpu", requires_grad=True)
    side.wait_stream(A.current_stream())
    with side:
        loss = (w @ w).sum()
    loss.backward()
    A.current_stream().wait_stream(side)
    assert w.grad.device.type == "simgpu"
    assert not [r for r in simgpu.take_reports() if "use-after-free" not in r]


@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_gives_correct_code_the_same_result(seed, no_races):
    simgpu.set_schedule_seed(seed)
    copier = torch.Stream(device="simgpu")
    host = [torch.full((256,), float(i)).pin_memory() for i in range(8)]
    total = torch.zeros(256, device="simgpu")
    for buffer in host:
        x = torch.empty(256, device="simgpu")
        copier.wait_stream(A.current_stream())
        with copier:
            x.copy_(buffer, non_blocking=True)
        A.current_stream().wait_stream(copier)
        total += x
        x.record_stream(copier)
    assert total.eq(28).all()


def test_seeds_explore_different_orders_and_repeat():
    def pattern(seed: int) -> tuple[bool, ...]:
        """Which of twelve copies to the device, left alone, read their source before it was overwritten."""
        simgpu.set_schedule_seed(seed)
        early = []
        for _ in range(12):
            host, side = torch.ones(4).pin_memory(), torch.Stream(device="simgpu")
            with side:
                x = torch.empty(4, device="simgpu")
                x.copy_(host, non_blocking=True)
            torch.zeros(4, device="simgpu") * 2  # a chance for the scheduler
            host.zero_()
            side.synchronize()
            early.append(bool(x.eq(1).all()))
        simgpu.set_schedule_seed(0)
        simgpu.take_reports()
        return tuple(early)

    assert not any(pattern(0))
    patterns = {seed: pattern(seed) for seed in range(1, 6)}
    assert len(set(patterns.values())) > 1
    assert any(any(p) for p in patterns.values())
    assert patterns == {seed: pattern(seed) for seed in range(1, 6)}


def test_copies_can_be_made_eager():
    simgpu.set_defer_copies(False)
    x, host = torch.ones(10, device="simgpu"), torch.zeros(10, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host.sum().item() == 10


def test_unpinned_non_blocking_copies_block_and_are_counted():
    before = simgpu.counters().unpinned_async_copies
    x = torch.ones(4).to("simgpu", non_blocking=True)
    assert simgpu.counters().unpinned_async_copies == before + 1
    host = x.to("cpu", non_blocking=True)  # torch pins the destination by itself
    assert host.is_pinned()
    A.synchronize()
    assert host.tolist() == [1.0] * 4
    assert simgpu.counters().unpinned_async_copies == before + 1


def test_more_streams_than_the_pool_has_wrap_around():
    streams = [torch.Stream(device="simgpu") for _ in range(70)]
    assert all(stream.stream_id != 0 for stream in streams)
    for stream in streams:
        with stream:
            torch.ones(4, device="simgpu").sum()
    A.synchronize()


def test_work_left_pending_at_exit_harms_nobody(run_python):
    run_python(
        """
        host = torch.ones(10, pin_memory=True)
        kept = torch.empty(10, device="simgpu")
        kept.copy_(host, non_blocking=True)
        """
    )
