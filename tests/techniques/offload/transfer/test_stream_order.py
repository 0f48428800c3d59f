"""Every wait between streams and threads is needed."""

from __future__ import annotations

import pytest

import simgpu
from memscale.techniques.offload.transfer import in_flight, io_threads
from memscale.techniques.offload.transfer import transfers as transfers_module
from tests.techniques.offload.tiers import opened, same
from tests.techniques.offload.transfer.wait_scenarios import SCENARIOS, left_out, ones, run_scenario

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@pytest.mark.parametrize("why", SCENARIOS)
def test_every_wait_is_needed(why, tmp_path, monkeypatch):
    """With the wait: no race, the right numbers. Without it: a race or a wrong number.

    simgpu's copies run as late as they may.
    """
    expected = run_scenario(why, "simgpu", tmp_path)
    assert simgpu.take_reports() == []
    with left_out(why, monkeypatch):
        result = run_scenario(why, "simgpu", tmp_path)
    assert simgpu.take_reports() or not same(result, expected)


def test_memory_freed_in_another_order_than_it_was_read(tmp_path, no_races):
    """What counts is the latest copy out of the freed memory, not the one whose memory was freed last."""
    with opened("simgpu host async", tmp_path, window_bytes=1 << 20) as transfers:
        first, second = transfers.send(ones(transfers, 1)), transfers.send(ones(transfers, 2))
        arrivals = [transfers.fetch(first), transfers.fetch(second)]
        transfers.free(second)
        transfers.free(first)
        others = [transfers.send(ones(transfers, 3)), transfers.send(ones(transfers, 4))]
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
