"""The race detector: what must be reported, and what must not."""

import pytest
import torch

import simgpu

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    pass


@pytest.fixture
def side():
    return torch.Stream(device="simgpu")


def kinds() -> set[str]:
    A.synchronize()
    return {report.split(" race:")[0] for report in simgpu.take_reports()}


def test_read_before_the_producer_is_waited_for(side):
    x = torch.ones(1000, device="simgpu") * 2
    with side:
        y = x + 1
    assert kinds() == {"read-after-write"}
    del y


def test_write_while_another_stream_reads(side):
    buffer = torch.zeros(100, device="simgpu")
    host = torch.ones(100).pin_memory()
    side.wait_stream(A.current_stream())
    y = buffer * 2
    with side:
        buffer.copy_(host, non_blocking=True)
    assert "write-after-read" in kinds()
    del y


def test_two_streams_write_one_tensor(side):
    x = torch.zeros(100, device="simgpu")
    side.wait_stream(A.current_stream())
    x.add_(1)
    with side:
        x.mul_(2)
    assert "write-after-write" in kinds()


def test_waiting_makes_it_right(side, no_races):
    x = torch.ones(1000, device="simgpu") * 2
    side.wait_stream(A.current_stream())
    with side:
        x.add_(1)
    A.current_stream().wait_stream(side)
    x.mul_(2)
    x.record_stream(side)
    assert x.sum().item() == 6000
    assert kinds() == set()


def test_a_host_synchronisation_orders_everything_after_it(side, no_races):
    x = torch.ones(1000, device="simgpu") * 2
    A.synchronize()
    with side:
        y = x + 1
    side.synchronize()
    assert y.sum().item() == 3000


def test_an_event_that_the_host_saw_done_orders_what_follows(side, no_races):
    x = torch.ones(1000, device="simgpu") * 2
    event = A.current_stream().record_event()
    while not event.query():
        pass
    with side:
        y = x + 1
    side.synchronize()
    assert y.sum().item() == 3000
    assert kinds() == set()


def test_reading_a_value_on_the_host_orders_what_follows(side, no_races):
    x = torch.ones(10, device="simgpu") * 2
    assert x.sum().item() == 20
    with side:
        y = x + 1
    side.synchronize()
    assert y.sum().item() == 30
    assert kinds() == set()


def test_an_event_recorded_too_early_does_not_help(side):
    x = torch.ones(1000, device="simgpu")
    event = A.current_stream().record_event()
    x.mul_(3)
    side.wait_event(event)
    with side:
        y = x + 1
    assert kinds() == {"read-after-write"}
    del y


def test_slices_of_a_flat_buffer_on_different_streams_are_no_race(side, no_races):
    flat = torch.zeros(4096, device="simgpu")
    hosts = [torch.full((1024,), float(i)).pin_memory() for i in range(4)]
    streams = [torch.Stream(device="simgpu") for _ in range(4)]
    for i, (stream, host) in enumerate(zip(streams, hosts, strict=True)):
        stream.wait_stream(A.current_stream())
        with stream:
            flat[i * 1024 : (i + 1) * 1024].copy_(host, non_blocking=True)
            flat[i * 1024 : (i + 1) * 1024].add_(1)
    for stream in streams:
        A.current_stream().wait_stream(stream)
    assert flat.view(4, 1024).float().mean(1).tolist() == [1, 2, 3, 4]


def test_overlapping_slices_of_a_flat_buffer_are_a_race(side):
    flat = torch.zeros(4096, device="simgpu")
    side.wait_stream(A.current_stream())
    flat[:2048].add_(1)
    with side:
        flat[2047:].add_(1)
    assert "write-after-write" in kinds()


def test_slices_of_one_pinned_buffer_are_no_race(side, no_races):
    pool = torch.zeros(2048, pin_memory=True)
    other = torch.Stream(device="simgpu")
    x = torch.ones(1024, device="simgpu")
    for stream in (side, other):
        stream.wait_stream(A.current_stream())
    with side:
        pool[:1024].copy_(x, non_blocking=True)
    with other:
        pool[1024:].copy_(x, non_blocking=True)
    side.synchronize()
    other.synchronize()
    assert pool.sum().item() == 2048


def test_a_free_without_record_stream(side):
    x = torch.full((1000,), 5.0, device="simgpu")
    host = torch.zeros(1000, pin_memory=True)
    side.wait_stream(A.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    del x
    side.synchronize()
    assert host.isnan().all()  # someone else has the memory by now
    assert kinds() == {"use-after-free"}


def test_a_free_after_a_wait_needs_no_record_stream(side, no_races):
    x = torch.full((1000,), 5.0, device="simgpu")
    host = torch.zeros(1000, pin_memory=True)
    side.wait_stream(A.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    A.current_stream().wait_stream(side)
    del x
    side.synchronize()
    assert host.eq(5).all()


def test_a_tensor_of_a_side_stream_used_by_compute_needs_record_stream(side):
    with side:
        x = torch.ones(1000, device="simgpu")
    A.current_stream().wait_stream(side)
    y = x * 2
    del x
    assert kinds() == {"use-after-free"}
    del y


def test_memory_from_compute_filled_by_a_side_stream_must_wait_for_compute(side):
    torch.ones(10, device="simgpu").mul_(2)
    x = torch.empty(1000, device="simgpu")
    host = torch.ones(1000).pin_memory()
    with side:
        x.copy_(host, non_blocking=True)  # the memory may still be in use by what compute ran before
    assert "write-after-write" in kinds()


def test_device_to_host_then_back_on_another_stream_must_wait(side):
    x = torch.ones(100, device="simgpu")
    host = torch.zeros(100, pin_memory=True)
    host.copy_(x, non_blocking=True)
    with side:
        y = torch.empty(100, device="simgpu")
        y.copy_(host, non_blocking=True)
    assert "read-after-write" in kinds()


def test_host_writes_to_a_pinned_source_in_flight():
    host = torch.ones(1000).pin_memory()
    x = torch.empty(1000, device="simgpu")
    x.copy_(host, non_blocking=True)
    host[3] = 2.0
    assert kinds() == {"pinned buffer"}


def test_host_writes_to_a_pinned_destination_in_flight():
    host = torch.zeros(1000).pin_memory()
    x = torch.ones(1000, device="simgpu")
    host.copy_(x, non_blocking=True)
    host.zero_()
    assert kinds() == {"pinned buffer"}


def test_reusing_a_pinned_buffer_after_its_event_is_right(no_races):
    host = torch.empty(1000, pin_memory=True)
    x = torch.empty(1000, device="simgpu")
    for i in range(4):
        host.fill_(float(i))
        x.copy_(host, non_blocking=True)
        A.current_stream().record_event().synchronize()
    assert x.eq(3).all()


def test_a_pinned_buffer_used_both_ways_on_one_stream_is_right(no_races):
    host = torch.empty(1000, pin_memory=True)
    x = torch.ones(1000, device="simgpu")
    y = torch.empty(1000, device="simgpu")
    host.copy_(x, non_blocking=True)
    y.copy_(host, non_blocking=True)
    host.copy_(y, non_blocking=True)
    A.synchronize()
    assert host.sum().item() == 1000
    assert y.sum().item() == 1000


def test_one_mistake_gives_one_report(side):
    x = torch.ones(1000, device="simgpu") * 2
    with side:
        for _ in range(10):
            x.add_(1)
    A.synchronize()
    assert len(simgpu.take_reports()) == 1


def test_a_report_says_who_what_and_where(side):
    x = torch.ones(1000, device="simgpu") * 2
    with side:
        x[10:20] + 1
    A.synchronize()
    (report,) = simgpu.take_reports()
    assert "'aten::add'" in report
    assert f"simgpu:0 stream {side.stream_id}" in report
    assert "bytes 40..80 of a device block of 4000 bytes" in report
    assert "simgpu:0 stream 0" in report
    assert simgpu.take_reports() == []


def test_raise_mode_raises_at_the_spot(side):
    x = torch.ones(1000, device="simgpu") * 2
    with simgpu.race_mode("raise"):
        with side, pytest.raises(RuntimeError, match="simgpu: read-after-write race: 'aten::mul'"):
            x * 2
        torch.ones(3, device="simgpu") + 1  # raised once, not for ever
    simgpu.take_reports()


def test_raise_mode_raises_an_unsafe_free_at_the_next_operator(side):
    x = torch.ones(1000, device="simgpu")
    side.wait_stream(A.current_stream())
    with simgpu.race_mode("raise"):
        with side:
            x * 2
        del x
        with pytest.raises(RuntimeError, match="use-after-free"):
            torch.ones(3, device="simgpu") + 1
        torch.ones(3, device="simgpu") + 1
    simgpu.take_reports()


def free_while_in_use(side):
    x = torch.ones(1000, device="simgpu")
    side.wait_stream(A.current_stream())
    with side:
        x * 2


def test_raise_mode_raises_an_unsafe_free_at_its_end_at_the_latest(side):
    with pytest.raises(RuntimeError, match="use-after-free"), simgpu.race_mode("raise"):
        free_while_in_use(side)
    assert kinds() == {"use-after-free"}


def test_a_report_is_not_raised_for_a_later_user(side):
    simgpu.set_race_mode("raise")
    free_while_in_use(side)
    simgpu.reset()
    with simgpu.race_mode("raise"):
        torch.ones(3, device="simgpu") + 1
    simgpu.set_race_mode("raise")
    free_while_in_use(side)
    assert len(simgpu.take_reports()) == 1
    torch.ones(3, device="simgpu") + 1  # whoever took the report has seen it


def test_growing_a_storage_reads_it(side):
    x = torch.zeros(1000, device="simgpu")
    side.wait_stream(A.current_stream())
    with side:
        x.add_(1)
    x.record_stream(side)  # so that the free alone is right
    x.untyped_storage().resize_(8000)
    assert kinds() == {"read-after-write"}


def test_off_mode_is_silent(side):
    x = torch.ones(1000, device="simgpu") * 2
    with simgpu.race_mode("off"), side:
        x.add_(1)
    assert kinds() == set()
    with pytest.raises(ValueError, match="race mode"):
        simgpu.set_race_mode("loud")  # type: ignore[arg-type]


def test_many_unsynchronised_slices_stay_fast_and_right(side):
    flat = torch.zeros(20_000, device="simgpu")
    side.wait_stream(A.current_stream())
    with side:
        for i in range(0, 20_000, 4):
            flat[i].add_(1)
    A.current_stream().wait_stream(side)
    assert flat.sum().item() == 5000
    flat.record_stream(side)
    assert simgpu.take_reports() == []


@pytest.mark.parametrize("gaps_only", [False, True])
def test_host_writes_to_a_strided_pinned_source_in_flight(gaps_only):
    pairs = torch.ones(1000, 2).pin_memory()
    x = torch.empty(1000, device="simgpu")
    x.copy_(pairs[:, 0], non_blocking=True)
    pairs[:, 1 if gaps_only else 0] = 5
    assert kinds() == (set() if gaps_only else {"pinned buffer"})
