"""Sources in flight are kept within their window."""

from __future__ import annotations

import pytest
import torch

from tests.techniques.offload.tiers import opened

pytestmark = pytest.mark.unit
KIB = 1 << 10


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def test_sources_are_kept_within_the_window_and_no_longer(tmp_path, no_races):
    """The peak does not depend on when copies happen to run."""
    import simgpu

    peaks = set()
    for seed in range(4):
        simgpu.set_schedule_seed(seed)
        with opened("simgpu host async", tmp_path, window_bytes=80 * KIB) as transfers:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            tickets = []
            for _ in range(10):
                tickets.append(transfers.send(torch.ones(32 * KIB, dtype=torch.uint8, device="simgpu")))
                assert transfers.in_flight_bytes <= 80 * KIB
                assert torch.accelerator.memory_allocated() - before == transfers.in_flight_bytes
            peaks.add(torch.accelerator.max_memory_allocated() - before)
            transfers.settle()
            assert torch.accelerator.memory_allocated() == before
            for ticket in tickets:
                transfers.free(ticket)
    assert peaks == {3 * 32 * KIB}  # two in the window and the one that is made
