"""Threads that write to a disk: their errors are raised, and lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memscale._errors import StoreIOError
from memscale.techniques.offload.store.disk import DiskStore
from tests.techniques.offload.tiers import device_of, opened

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def test_a_failed_threaded_write_is_raised_once_and_keeps_the_bytes(tmp_path, monkeypatch):
    def fail(*args: Any) -> None:
        raise StoreIOError("the disk is gone")

    for way in ("cpu disk async", "simgpu disk async"):
        with opened(way, tmp_path) as transfers:
            with monkeypatch.context() as patch:
                patch.setattr(DiskStore, "write", fail)
                ticket = transfers.send(torch.arange(1000.0, device=device_of(way)))
                with pytest.raises(StoreIOError, match="gone"):
                    transfers.settle()
            assert torch.equal(ticket.rescued.view(torch.float32), torch.arange(1000.0))
            with pytest.raises(StoreIOError, match="gone"):
                transfers.fetch(ticket).wait()
            transfers.settle()
            transfers.send(torch.arange(1000.0, device=device_of(way)), ticket)
            assert torch.equal(transfers.fetch(ticket).wait().cpu(), torch.arange(1000.0))
            assert ticket.rescued is None
            transfers.free(ticket)
