"""Transfers: the same bytes by every way, also after faults, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from memscale._errors import OffloadError, StoreFullError
from memscale._torch import private
from memscale.techniques.offload.store.disk import CHUNK_BYTES
from memscale.techniques.offload.store.stores import ShapeStore
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.techniques.offload.store.test_stores import tensors
from tests.techniques.offload.tiers import WAYS, device_of, opened, same

pytestmark = pytest.mark.unit
KIB = 1 << 10
ACCELERATOR_WAYS = tuple(way for way in WAYS if way.startswith("simgpu"))


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_comes_back(way, tmp_path, no_races):
    with opened(way, tmp_path, window_bytes=100 * KIB) as transfers:
        for _ in range(2):  # the second time in memory that was used before
            originals = tensors(device_of(way))
            expected = {name: tensor.detach().cpu().clone() for name, tensor in originals.items()}
            strides = {name: tensor.stride() for name, tensor in originals.items()}
            tickets = {name: transfers.send(tensor) for name, tensor in originals.items()}
            del originals
            arrivals = {name: transfers.fetch(ticket) for name, ticket in reversed(tickets.items())}
            for name, arrival in arrivals.items():
                back = arrival.wait()
                assert torch.equal(back.cpu(), expected[name]), name
                assert back.stride() == strides[name], name
                assert back.device.type == device_of(way)
            for ticket in tickets.values():
                transfers.free(ticket)
        assert transfers.stats.num_sends == transfers.stats.num_fetches == 2 * len(tickets)
        assert transfers.stats.bytes_sent == transfers.stats.bytes_fetched
        del back, arrival, arrivals


@pytest.mark.parametrize("way", WAYS)
def test_a_ticket_is_filled_anew(way, tmp_path, no_races):
    with opened(way, tmp_path) as transfers:
        ticket = transfers.send(torch.zeros(10_000, device=device_of(way)))
        for _ in range(5):
            value = transfers.fetch(ticket).wait() + 1
            transfers.send(value, ticket)
            transfers.wait_sent(ticket)
            value.fill_(-1)  # allowed now
        assert bool((transfers.fetch(ticket).wait() == 5).all())
        transfers.free(ticket)


@pytest.mark.parametrize("way", WAYS)
def test_into_given_memory(way, tmp_path, no_races):
    with opened(way, tmp_path) as transfers:
        ticket = transfers.send(torch.arange(3000.0, device=device_of(way)).view(50, 60).t())
        memory = torch.zeros(12_000, dtype=torch.uint8, device=device_of(way))
        back = transfers.fetch(ticket, out=memory).wait()
        assert back.data_ptr() == memory.data_ptr()
        assert torch.equal(back.cpu(), torch.arange(3000.0).view(50, 60).t())
        transfers.free(ticket)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", ["simgpu host async", "simgpu host async one stream", "simgpu tiered async"])
def test_any_schedule_gives_the_same(way, seed, tmp_path, no_races):
    """Sends, fetches, frees and refills at random, over a device whose copies run at random moments."""
    import simgpu

    simgpu.set_schedule_seed(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    waiting: list[tuple[Any, int]] = []
    with opened(way, tmp_path, window_bytes=20 * KIB) as transfers:
        for number in range(60):
            match draw(4) if waiting else 0:
                case 0 | 1:
                    source = torch.full((1000 + 100 * draw(20),), float(number), device="simgpu")
                    waiting.append((transfers.send(source), number))
                case 2:
                    ticket, value = waiting[draw(len(waiting))]
                    assert bool((transfers.fetch(ticket).wait() == value).all())
                case _:
                    ticket, value = waiting.pop(draw(len(waiting)))
                    back = transfers.fetch(ticket)
                    transfers.free(ticket)  # while it is on its way
                    assert bool((back.wait() == value).all())
        for ticket, _ in waiting:
            transfers.free(ticket)
        del ticket, waiting, back


@pytest.mark.parametrize("way", ["simgpu disk async", "simgpu tiered async"])
def test_tensors_larger_than_the_staging_memory(way, tmp_path, no_races):
    import simgpu

    simgpu.reset_pinned_peaks()
    with opened(way, tmp_path, staging_bytes=64 * KIB) as transfers:
        large = torch.arange(CHUNK_BYTES // 2 + 1000, dtype=torch.int32, device="simgpu")
        small = [torch.full((8 * KIB,), n, dtype=torch.uint8, device="simgpu") for n in range(30)]
        tickets = [transfers.send(tensor) for tensor in (large, *small)]
        arrivals = [transfers.fetch(ticket) for ticket in tickets]
        assert all(map(same, (arrival.wait() for arrival in arrivals), (large, *small)))
        assert transfers.staging.counters.peak_allocated_bytes <= 64 * KIB
        assert simgpu.pinned_stats().rounded_peak <= 128 * KIB
        for ticket in tickets:
            transfers.free(ticket)
        del arrivals


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_is_given_back(way, tmp_path, no_races):
    with opened(way, tmp_path) as transfers:
        for _ in range(3):
            ticket = transfers.send(torch.ones(50_000, device=device_of(way)))
            transfers.fetch(ticket)  # never waited for
            del ticket
        gc.collect()
        transfers.settle()
        for _ in range(6000):  # a thread lets go of its arguments a moment after it is done
            transfers.store.sweep()
            held = sum(leaf.counters.held_bytes for leaf in transfers.store.leaves())
            if not held:
                break
            time.sleep(0.01)
        assert held == 0


def test_another_thread_may_fetch(tmp_path, no_races):
    """Backward of an accelerator runs in a thread of its own."""
    with opened("simgpu host async", tmp_path) as transfers:
        ticket = transfers.send(torch.arange(5000.0, device="simgpu"))
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(transfers.fetch(ticket).wait().sum().cpu()))
        thread.start()
        thread.join()
        assert found[0] == torch.arange(5000.0).sum()
        transfers.free(ticket)


def test_hits_and_waits_are_counted(tmp_path):
    with opened("cpu disk async", tmp_path) as transfers:
        ticket = transfers.send(torch.ones(100_000))
        transfers.settle()
        arrival = transfers.fetch(ticket)
        while not arrival.is_here():
            pass
        arrival.wait()
        arrival.wait()
        assert (transfers.stats.num_hits, transfers.stats.num_fetches, transfers.stats.hit_rate) == (1, 1, 1.0)
        assert transfers.stats.host_waited_s > 0
        transfers.free(ticket)


def test_no_copy_of_ours_is_unpinned(tmp_path):
    """A non-blocking copy from or to pageable memory would block without saying so."""
    import simgpu

    before = simgpu.counters().unpinned_async_copies
    for way in ("simgpu host async", "simgpu disk async"):
        with opened(way, tmp_path) as transfers:
            ticket = transfers.send(torch.ones(50_000, device="simgpu"))
            transfers.fetch(ticket).wait()
            transfers.free(ticket)
    assert simgpu.counters().unpinned_async_copies == before


def test_a_rehearsal_on_fake_tensors_moves_shapes():
    """Memory falls as it would, and what comes back has the right shape."""
    from memscale._torch.live_bytes import LiveBytes

    store = ShapeStore()
    transfers = Transfers("cpu", store, window_bytes=0)
    with private.fake_tensor_mode(), LiveBytes("cpu", counts_fakes=True) as books:
        tensor = torch.empty(100, 100).t()
        assert books.total_bytes == 40_000
        ticket = transfers.send(tensor)
        del tensor
        assert books.total_bytes == 0
        back = transfers.fetch(ticket).wait()
        assert (back.shape, back.stride(), books.total_bytes) == ((100, 100), (1, 100), 40_000)
        transfers.free(ticket)
    transfers.close()
    store.close()


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for kind in ("fail_allocation", "fail_copy", "fail_pinned_allocation")
        for way in ("simgpu host async", "simgpu disk async", "simgpu host sync", "simgpu disk sync")
        if (kind, way) != ("fail_pinned_allocation", "simgpu disk sync")  # which pins nothing
    ],
)
def test_device_faults_leave_nothing_behind(kind, way, tmp_path, no_races):
    import simgpu

    struck = 0
    for nth in (1, 2, 3):
        with opened(way, tmp_path) as transfers:
            source = torch.arange(30_000.0, device="simgpu")
            with getattr(simgpu, kind)(nth) as fault:
                try:
                    ticket = transfers.send(source)
                    transfers.fetch(ticket).wait()
                except (RuntimeError, StoreFullError):
                    pass
            struck += fault.fired
            ticket = transfers.send(source)
            assert torch.equal(transfers.fetch(ticket).wait().cpu(), torch.arange(30_000.0))
            transfers.free(ticket)
            gc.collect()
    assert struck >= 1


@pytest.mark.parametrize("way", WAYS)
def test_debug_finds_nothing_where_all_is_well(way, tmp_path, no_races):
    with opened(way, tmp_path, debug=True) as transfers:
        tensors = [torch.randn(n, 100, device=device_of(way)) for n in (1, 7, 300)]
        tickets = [transfers.send(tensor) for tensor in tensors]
        for ticket, tensor in zip(tickets, tensors, strict=True):
            assert torch.equal(transfers.fetch(ticket).wait(), tensor)
            transfers.free(ticket)


def test_debug_turns_an_overtaken_transfer_into_an_error(tmp_path):
    with opened("simgpu host async", tmp_path, debug=True) as transfers:
        ticket = transfers.send(torch.ones(1000, device="simgpu"))
        transfers.settle()
        torch.accelerator.synchronize()
        transfers.store.memory_of(ticket)[0].zero_()
        with pytest.raises(OffloadError, match=r"4\.0 kB came back from the host store changed"):
            transfers.fetch(ticket).wait()
        transfers.free(ticket)
