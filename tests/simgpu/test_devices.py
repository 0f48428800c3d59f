"""Two devices, each with its own memory, cap, streams and random numbers."""

import pytest
import torch
from torch import nn

import simgpu

pytestmark = pytest.mark.full

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    pass


def test_each_has_its_own_books():
    before = [A.memory_allocated(i) for i in (0, 1)]
    a = torch.zeros(1024, device="simgpu:0")
    b = torch.zeros(2048, device="simgpu:1")
    assert [A.memory_allocated(i) - before[i] for i in (0, 1)] == [4096, 8192]
    c = b + 1
    assert c.device.index == 1
    assert [A.memory_allocated(i) - before[i] for i in (0, 1)] == [4096, 16384]
    del a, b, c


def test_each_has_its_own_cap(cap):
    cap(1 << 20, device=1)
    torch.zeros(1 << 20, device="simgpu:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"simgpu:1 has a total capacity of 1024.00 KiB"):
        torch.zeros(1 << 20, device="simgpu:1")
    assert simgpu.get_cap(1) == 1 << 20
    assert simgpu.get_cap(0) == 1 << 40
    assert A.get_memory_info(1)[1] == 1 << 20


def test_the_current_device_decides_where_tensors_go():
    A.set_device_index(1)
    assert torch.ones(1, device="simgpu").device.index == 1
    assert torch.arange(3, device="simgpu").device.index == 1
    with A.device_index(0):
        assert torch.ones(1, device="simgpu").device.index == 0
        assert torch.ones(1, device="simgpu:1").device.index == 1
    assert A.current_device_index() == 1
    A.set_device_index(0)
    assert torch.rand(3, device="simgpu:1").device.index == 1  # factories that name a device
    assert torch.full((3,), 2.0, device="simgpu:1").device.index == 1
    assert torch.empty_like(torch.ones(3, device="simgpu:1")).device.index == 1


def test_operands_of_two_devices_are_refused():
    a, b = torch.ones(3, device="simgpu:0"), torch.ones(3, device="simgpu:1")
    with pytest.raises(RuntimeError, match="two devices, simgpu:0 and simgpu:1"):
        a + b
    with pytest.raises(RuntimeError, match="two devices, simgpu:0 and simgpu:1"):
        torch.cat([a, b])


def test_copies_between_devices_are_ordered_on_both(no_races):
    a = torch.ones(1000, device="simgpu:0") * 3
    b = a.to("simgpu:1")
    b += 1
    c = b.to("simgpu:0")
    assert c.sum().item() == 4000
    a.copy_(b)
    assert a.sum().item() == 4000
    del a, b, c


def test_streams_belong_to_their_device(no_races):
    side = torch.Stream(device="simgpu:1")
    assert side.device.index == 1
    host = torch.full((8,), 4.0).pin_memory()
    with side:
        assert A.current_device_index() == 1
        x = torch.empty(8, device="simgpu:1")
        x.copy_(host, non_blocking=True)
        event = side.record_event()
    assert A.current_device_index() == 0
    A.current_stream(1).wait_event(event)
    y = x.to("simgpu:0")
    assert y.sum().item() == 32
    x.record_stream(A.current_stream(1))
    del x, y


def test_a_race_between_devices_is_reported():
    side = torch.Stream(device="simgpu:1")
    with side:
        x = torch.ones(8, device="simgpu:1")
        x *= 2
    y = x.to("simgpu:0")  # the current stream of device 1 has not waited for `side`
    A.synchronize(0)
    (report,) = simgpu.take_reports()
    assert "'copy (source)' on simgpu:1 stream 0" in report
    assert f"on simgpu:1 stream {side.stream_id}" in report
    A.synchronize(1)
    del x, y


def test_random_numbers_per_device():
    torch.manual_seed(0)
    a, b = torch.rand(3, device="simgpu:0"), torch.rand(3, device="simgpu:1")
    assert torch.equal(a.cpu(), b.cpu())
    torch.rand(3, device="simgpu:0")
    state = torch.simgpu.get_rng_state(1)
    c = torch.rand(3, device="simgpu:1")
    torch.simgpu.set_rng_state(state, 1)
    assert torch.equal(c, torch.rand(3, device="simgpu:1"))
    with A.device_index(1):
        torch.simgpu.manual_seed(9)
        first = torch.rand(2, device="simgpu")
    torch.ops.simgpu.manual_seed(1, 9)
    assert torch.equal(first, torch.rand(2, device="simgpu:1"))


def test_a_model_over_two_devices_trains_like_one(no_races):
    def losses(second: str) -> list[float]:
        torch.manual_seed(0)
        front, back = nn.Linear(16, 16).to("simgpu:0"), nn.Linear(16, 4).to(second)
        optimizer = torch.optim.AdamW([*front.parameters(), *back.parameters()])
        x = torch.randn(8, 16, device="simgpu:0")
        result = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = back(front(x).relu().to(second)).square().mean()
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result

    assert losses("simgpu:1") == losses("simgpu:0")


def test_virtual_time_of_a_copy_between_devices():
    simgpu.reset_clock()
    a = torch.zeros(25_000_000, dtype=torch.uint8, device="simgpu:0")
    A.synchronize()
    before = simgpu.virtual_ms()
    b = a.to("simgpu:1")
    assert simgpu.virtual_ms() - before == pytest.approx(1.0, abs=0.1)
    del a, b
