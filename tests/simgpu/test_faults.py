"""Fault injection: what fails is exactly what was asked to, and leaves nothing behind."""

import pytest
import torch
from torch import nn

import simgpu

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks, no_races):
    pass


def test_the_nth_allocation_fails_and_no_other():
    with simgpu.fail_allocation(3) as fault:
        a, b = torch.empty(10, device="simgpu"), torch.empty(10, device="simgpu")
        with pytest.raises(torch.OutOfMemoryError, match="injected fault"):
            torch.empty(10, device="simgpu")
        c = torch.empty(10, device="simgpu")
    assert fault.fired
    del a, b, c


def test_kernel_results_count_as_allocations():
    x = torch.ones(10, device="simgpu")
    with simgpu.fail_allocation(1), pytest.raises(torch.OutOfMemoryError):
        x + 1
    with simgpu.fail_allocation(2), pytest.raises(torch.OutOfMemoryError):
        x.sort()
    assert (x + 1).sum().item() == 20
    del x


def test_a_fault_that_was_not_reached_is_forgotten():
    with simgpu.fail_allocation(100) as fault:
        torch.empty(10, device="simgpu")
    assert not fault.fired
    for _ in range(200):
        torch.empty(10, device="simgpu")


def test_the_nth_pinned_allocation_fails():
    with simgpu.fail_pinned_allocation(2) as fault:
        a = torch.empty(10, pin_memory=True)
        with pytest.raises(RuntimeError, match="pinned host allocation of 40 bytes"):
            torch.empty(10, pin_memory=True)
        b = torch.ones(10).pin_memory()
    assert fault.fired
    del a, b


@pytest.mark.parametrize("direction", ["to device", "to host", "between devices"])
def test_the_nth_copy_fails(direction):
    x, host = torch.zeros(10, device="simgpu"), torch.ones(10).pin_memory()
    other = torch.zeros(10, device="simgpu:1")

    def copy():
        match direction:
            case "to device":
                x.copy_(host, non_blocking=True)
            case "to host":
                host.copy_(x, non_blocking=True)
            case _:
                other.copy_(x)

    with simgpu.fail_copy(2) as fault:
        copy()
        with pytest.raises(RuntimeError, match="a copy failed"):
            copy()
        copy()
    assert fault.fired
    A.synchronize()


def test_copies_within_a_device_are_not_counted():
    x, y = torch.zeros(10, device="simgpu"), torch.ones(10, device="simgpu")
    with simgpu.fail_copy(1) as fault:
        x.copy_(y)
    assert not fault.fired
    del x, y


@pytest.mark.parametrize("nth", range(1, 32, 3))
def test_a_training_step_that_runs_out_of_memory_anywhere_leaves_nothing_behind(nth):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).to("simgpu")
    x = torch.randn(8, 32, device="simgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    before = A.memory_allocated()
    with simgpu.fail_allocation(nth) as fault:
        try:
            model(x).square().mean().backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            pass
    optimizer.zero_grad()
    optimizer.state.clear()
    assert A.memory_allocated() == before
    assert A.memory_stats()["active_bytes.all.current"] == before
    model(x).square().mean().backward()
    assert fault.fired
    del model, x, optimizer


def test_an_event_that_cannot_be_recorded_stays_as_it_was():
    stream, event = torch.Stream("simgpu"), torch.Event("simgpu")
    with simgpu.fail_event(2) as fault:
        stream.record_event(event)
        with pytest.raises(RuntimeError, match="an event could not be recorded"):
            stream.record_event()
        stream.record_event().synchronize()
    assert fault.fired
    event.synchronize()


def test_numbers_below_one_are_refused():
    with pytest.raises(ValueError, match="number 1"), simgpu.fail_copy(0):
        pass


def test_faults_end_with_their_context_even_on_errors():
    with pytest.raises(KeyError), simgpu.fail_allocation(1):
        raise KeyError
    torch.empty(10, device="simgpu")
