"""A scenario for every named wait of transfers, which uses that wait and nothing else that would cover for it."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memscale.techniques.offload.transfer import stream_order
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.techniques.offload.tiers import opened


def ones(transfers: Transfers, value: float = 1.0) -> torch.Tensor:
    return torch.full((4096,), value, device=transfers.device)


def send_fresh_result(transfers: Transfers) -> Any:
    return transfers.store.get(transfers.send(ones(transfers, 2) * 3), device="cpu")


def fetch_into_used_memory(transfers: Transfers) -> Any:
    """The arrival's memory was another tensor's, which a kernel still reads."""
    ticket = transfers.send(ones(transfers))
    transfers.settle()
    old = ones(transfers, 5)
    total = old.sum()
    del old
    return transfers.fetch(ticket).wait(), total


def fetch_at_once(transfers: Transfers) -> Any:
    return transfers.fetch(transfers.send(ones(transfers, 7))).wait().clone()


def drop_source_and_reuse(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(transfers, 3))
    reused = ones(transfers, 8)  # in the memory of the source, if that was let go
    back = transfers.fetch(ticket).wait()
    return back, reused


def drop_arrival_and_reuse(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(transfers, 3))
    transfers.fetch(ticket)
    return ones(transfers, 8) * 2


def refill_while_read(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(transfers, 3))
    arrival = transfers.fetch(ticket)
    transfers.send(ones(transfers, 4), ticket)
    return arrival.wait()


def free_while_read(transfers: Transfers) -> Any:
    ticket = transfers.send(ones(transfers, 3))
    arrival = transfers.fetch(ticket)
    transfers.free(ticket)
    other = transfers.send(ones(transfers, 4))  # in the same host memory
    return arrival.wait(), transfers.fetch(other).wait()


def stage_while_read(transfers: Transfers) -> Any:
    first, second = transfers.send(ones(transfers, 3)), transfers.send(ones(transfers, 4))
    transfers.settle()
    arrival = transfers.fetch(first)
    back = arrival.wait()  # its staging memory is free, though the copy from it may still run
    other = transfers.fetch(second)
    return other.wait().clone(), back.clone()


def send_then_let_thread_write(transfers: Transfers) -> Any:
    return transfers.store.get(transfers.send(ones(transfers, 6)), device="cpu")


SCENARIOS: dict[str, tuple[str, Callable[[Transfers], Any]]] = {
    "out after compute": ("host async", send_fresh_result),
    "in after compute": ("host async", fetch_into_used_memory),
    "in after written": ("host async", fetch_at_once),
    "compute after arrival": ("host async", fetch_at_once),
    "reuse after sent": ("host async", drop_source_and_reuse),
    "reuse after unread arrival": ("host async", drop_arrival_and_reuse),
    "out after read": ("host async", refill_while_read),
    "out after freed": ("host async", free_while_read),
    "thread after sent": ("disk async", send_then_let_thread_write),
    "thread after freed": ("disk async", stage_while_read),
}


def run_scenario(why: str, device_type: str, directory: pathlib.Path) -> list[torch.Tensor]:
    """What the scenario of a wait gives, on the host."""
    way, scenario = SCENARIOS[why]
    window_bytes = 1 << 20 if why == "in after written" else 0  # letting a source go waits for its copy as well
    with opened(f"{device_type} {way}", directory, window_bytes=window_bytes) as transfers:
        result = scenario(transfers)
        result = [part.cpu() for part in (result if isinstance(result, tuple) else (result,))]
    torch.accelerator.synchronize()
    return result


@contextlib.contextmanager
def left_out(why: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits for this reason."""
    original = stream_order.order

    def forget(waiter: Any, event: Any, name: str) -> None:
        if name != why:
            original(waiter, event, name)

    with monkeypatch.context() as patch:
        patch.setattr(stream_order, "order", forget)
        yield
