"""Every wait between streams and threads is needed."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memscale.techniques.offload.transfer import in_flight, io_threads, stream_order
from memscale.techniques.offload.transfer import transfers as transfers_module
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.techniques.offload.tiers import opened, same

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# Each scenario uses one wait and nothing else that would cover for it. simgpu's copies run as late as they may.


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((4096,), value, device="simgpu")


def send_fresh_result(transfers: Transfers) -> Any:
    return transfers.store.get(transfers.send(ones(2) * 3), device="cpu")


def fetch_into_used_memory(transfers: Transfers) -> Any:
    """The arrival's memory was another tensor's, which a kernel still reads."""
    ticket = transfers.send(ones())
    transfers.settle()
    old = ones(5)
    total = old.sum()
    del old
    return transfers.fetch(ticket).wait(), total


def fetch_at_once(transfers: Transfers) -> Any:
    return transfers.fetch(transfers.send(ones(7))).wait().clone()


def drop_source_and_reuse(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(3))
    reused = ones(8)  # in the memory of the source, if that was let go
    back = transfers.fetch(ticket).wait()
    return back, reused


def drop_arrival_and_reuse(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(3))
    transfers.fetch(ticket)
    return ones(8) * 2


def refill_while_read(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(3))
    arrival = transfers.fetch(ticket)
    transfers.send(ones(4), ticket)
    return arrival.wait()


def free_while_read(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(3))
    arrival = transfers.fetch(ticket)
    transfers.free(ticket)
    other = transfers.send(ones(4))  # in the same host memory
    return arrival.wait(), transfers.fetch(other).wait()


def stage_while_read(transfers: Transfers) -> Any:
    first, second = transfers.send(ones(3)), transfers.send(ones(4))
    transfers.settle()
    arrival = transfers.fetch(first)
    back = arrival.wait()  # its staging memory is free, though the copy from it may still run
    other = transfers.fetch(second)
    return other.wait().clone(), back.clone()


def send_then_let_thread_write(transfers: Transfers) -> Any:
    return transfers.store.get(transfers.send(ones(6)), device="cpu")


SCENARIOS: dict[str, tuple[str, Callable[[Transfers], Any]]] = {
    "out after compute": ("simgpu host async", send_fresh_result),
    "in after compute": ("simgpu host async", fetch_into_used_memory),
    "in after written": ("simgpu host async", fetch_at_once),
    "compute after arrival": ("simgpu host async", fetch_at_once),
    "reuse after sent": ("simgpu host async", drop_source_and_reuse),
    "reuse after unread arrival": ("simgpu host async", drop_arrival_and_reuse),
    "out after read": ("simgpu host async", refill_while_read),
    "out after freed": ("simgpu host async", free_while_read),
    "thread after sent": ("simgpu disk async", send_then_let_thread_write),
    "thread after freed": ("simgpu disk async", stage_while_read),
}


def run_scenario(why: str, directory: pathlib.Path) -> tuple[Any, list[str]]:
    import simgpu

    way, scenario = SCENARIOS[why]
    window_bytes = 1 << 20 if why == "in after written" else 0  # letting a source go waits for its copy as well
    with opened(way, directory, window_bytes=window_bytes) as transfers:
        result = scenario(transfers)
        result = [part.cpu() for part in (result if isinstance(result, tuple) else (result,))]
    torch.accelerator.synchronize()
    return result, simgpu.take_reports()


@pytest.mark.parametrize("why", SCENARIOS)
def test_every_wait_is_needed(why, tmp_path, monkeypatch):
    """With the wait: no race, the right numbers. Without it: a race or a wrong number."""
    expected, reports = run_scenario(why, tmp_path)
    assert reports == []
    original = stream_order.order

    def forget(waiter: Any, event: Any, name: str) -> None:
        if name != why:
            original(waiter, event, name)

    monkeypatch.setattr(stream_order, "order", forget)
    result, reports = run_scenario(why, tmp_path)
    assert reports or not same(result, expected)


def test_memory_freed_in_another_order_than_it_was_read(tmp_path, no_races):
    """What counts is the latest copy out of the freed memory, not the one whose memory was freed last."""
    with opened("simgpu host async", tmp_path, window_bytes=1 << 20) as transfers:
        first, second = transfers.send(ones(1)), transfers.send(ones(2))
        arrivals = [transfers.fetch(first), transfers.fetch(second)]
        transfers.free(second)
        transfers.free(first)
        others = [transfers.send(ones(3)), transfers.send(ones(4))]
        assert [float(arrival.wait()[0]) for arrival in arrivals] == [1, 2]
        assert [float(transfers.fetch(ticket).wait()[0]) for ticket in others] == [3, 4]
        for ticket in others:
            transfers.free(ticket)
        del arrivals


def test_no_wait_is_forgotten_here():
    """Every named wait of transfers has its scenario (but those after a failed copy, which the faults cover)."""
    import inspect
    import re

    sources = map(inspect.getsource, (transfers_module, in_flight, io_threads))
    names = {name for source in sources for name in re.findall(r'order\([^"]*"([a-z ]+)"\)', source)}
    assert names - {"reuse after failed copy"} == set(SCENARIOS)
