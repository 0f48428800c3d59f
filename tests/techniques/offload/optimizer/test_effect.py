"""Optimizer state that waits elsewhere: what it saves, that every wait is needed, and what failures leave."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from memscale._errors import OffloadError, PartialStepError, StoreFullError, StoreIOError
from memscale.techniques.offload.optimizer.adoption import adopt, adopt_optimizer
from memscale.techniques.offload.optimizer.buckets import rounded, split_into_buckets
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.lanes import STEPS_OF_A_LEAK
from tests.techniques.offload.tiers import on_host, opened, same
from tests.techniques.offload.training import (
    BUCKET_BYTES,
    O,
    Training,
    adopted,
    give_gradients,
    is_caught,
    plain,
    step_peak_bytes,
    wide_net,
)


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# ------------------------------------------------------------------------------------------------------- effect


@pytest.mark.parametrize("asynchronous", [False, True])
def test_device_bytes_of_the_state_fall_to_the_buckets(asynchronous, tmp_path):
    """8 layers of 65,536 bytes, two a bucket: S = 2 * 2 * 65,536 of AdamW's 1,048,576 bytes of state."""
    layer_bytes = 128 * 128 * 4
    bucket_state = 4 * layer_bytes
    step_bytes, temporaries = 8 * 512, layer_bytes  # step counters stay; the fused step needs no temporaries
    with opened("simgpu host async" if asynchronous else "simgpu host sync", tmp_path) as transfers:
        net = wide_net()
        optimizer = O.AdamW(net.parameters(), fused=True)
        with contextlib.ExitStack() as undo:
            adoption = adopt(net, transfers.store, transfers, 2 * layer_bytes, undo)
            peaks = []
            for _ in range(3):
                give_gradients(net)
                before = torch.accelerator.memory_allocated()
                peaks.append(step_peak_bytes(net, optimizer))
                after = torch.accelerator.memory_allocated() - before
                assert after == (step_bytes if len(peaks) == 1 else 0)
            assert adoption.stats.largest_bucket_bytes == bucket_state
            # One is stepped while the next arrives and the one before leaves; state is made without the next.
            in_step = 3 * bucket_state if asynchronous else bucket_state
            assert peaks[0] == (3 if asynchronous else 2) * bucket_state + step_bytes
            assert all(in_step <= peak <= in_step + temporaries for peak in peaks[1:]), peaks
            assert transfers.store.counters.held_bytes == 16 * layer_bytes
            assert adoption.stats.bytes_to_store == 3 * 16 * layer_bytes
            assert adoption.stats.bytes_from_store == 2 * 16 * layer_bytes
            assert adoption.stats.num_prefetched == (2 * 3 if asynchronous else 0)
            optimizer.zero_grad()
            before = torch.accelerator.memory_allocated()
        assert torch.accelerator.memory_allocated() - before == 16 * layer_bytes


def test_state_that_is_made_beside_state_that_waits_stays_within_the_bound(tmp_path):
    """While the state of a bucket is made, twice its bytes are there, beside what is leaving; nothing is fetched."""
    bucket_state = 4 * 128 * 128 * 4
    with opened("simgpu host async", tmp_path) as transfers:
        net = wide_net()
        optimizer = O.AdamW(net.parameters(), fused=True)
        with contextlib.ExitStack() as undo:
            adopt(net, transfers.store, transfers, 2 * 128 * 128 * 4, undo)
            give_gradients(net)
            for layer in (0, 1, 4, 5):  # every other bucket comes later
                net[layer].weight.grad = None
            optimizer.step()
            give_gradients(net)
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            optimizer.step()
            peak = torch.accelerator.max_memory_allocated() - before
            assert peak <= 3 * bucket_state + 8 * 512


def test_bucket_rule():
    assert split_into_buckets([4, 4, 4, 20, 1, 1], 8) == [[0, 1], [2], [3], [4, 5]]
    assert split_into_buckets([16, 1, 16, 1, 16, 1, 4], 16) == [[0], [1, 3, 5], [2], [4], [6]], "small ones share one"
    assert split_into_buckets([1] * 20, 16) == [[*range(16)], [*range(16, 20)]]
    assert split_into_buckets([], 8) == []
    assert [rounded(n) for n in (1, 512, 513)] == [512, 512, 1024]


# --------------------------------------------------------------------------------------------------- mutations

# "in after written" is not among them: letting go of a bucket makes compute wait for its copy out, and the copy in
# waits for compute. test_transfers.py leaves it out where nothing else covers it.
WAITS = (
    "out after compute",
    "in after compute",
    "compute after arrival",
    "reuse after sent",
)


def run_watched(transfers: Transfers, *, steps: int = 4, bucket_bytes: int = 2 * 65_536) -> Any:
    """Steps back to back, without anything that would synchronise by accident."""
    net = wide_net()
    optimizer = O.AdamW(net.parameters(), lr=1e-2, fused=True)
    with contextlib.ExitStack() as undo:
        adopt(net, transfers.store, transfers, bucket_bytes, undo)
        give_gradients(net)
        for _ in range(steps):
            optimizer.step()
    return on_host([list(net.parameters()), optimizer.state_dict()])


def is_caught_in(monkeypatch: pytest.MonkeyPatch, why: str, directory: pathlib.Path, bucket_bytes: int) -> bool:
    return is_caught(monkeypatch, why, directory, functools.partial(run_watched, bucket_bytes=bucket_bytes))


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_is_needed(why, tmp_path, monkeypatch):
    """Without any one of the waits, simgpu reports a race or the numbers are wrong."""
    caught = [is_caught_in(monkeypatch, why, tmp_path, bucket_bytes) for bucket_bytes in (2 * 65_536, 1 << 30)]
    assert any(caught), caught


def test_leaving_out_nothing_is_not_caught(tmp_path, monkeypatch):
    assert not is_caught_in(monkeypatch, "no such wait", tmp_path, 2 * 65_536)


# ------------------------------------------------------------------------------------------------------ faults


class FaultyDisk:
    """Lets the n-th call of one of the kernel's file functions fail, as a bad disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, error: int | None = errno.EIO) -> None:
        self.countdown = -1
        self.num_failed = 0
        original = getattr(os, function)

        def call(*args: Any) -> Any:
            self.countdown -= 1
            if self.countdown == 0:
                self.num_failed += 1
                if error is None:
                    return 0  # the file ends here
                raise OSError(error, os.strerror(error))
            return original(*args)

        monkeypatch.setattr(os, function, call)

    def fail(self, nth: int) -> None:
        self.countdown = nth


DISK_WAYS = ("cpu disk async", "cpu disk sync", "simgpu disk async", "simgpu disk sync")


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("way", DISK_WAYS)
def test_a_failed_write_loses_nothing(way, nth, tmp_path, monkeypatch):
    """The error is raised, the state stays in memory, and training goes on with the same numbers."""
    disk = FaultyDisk(monkeypatch, "pwrite")
    reference = Training(way.split()[0], plain(O.AdamW)).run(5)
    with opened(way, tmp_path) as transfers:
        training = Training(way.split()[0], plain(O.AdamW))
        with adopted(training, transfers):
            training.run(2)
            disk.fail(nth)
            with pytest.raises(StoreIOError, match="Nothing is lost"):
                training.run(3)
            assert disk.num_failed == 1
            # An error of a step that was completed is raised by it or, if a thread found it later, before the next.
            training.num_steps = int(training.optimizer.state_dict()["state"][0]["step"])
            training.losses = reference.losses[: training.num_steps]
            training.run(5 - training.num_steps)
            assert same(training.result(), reference.result())
        assert same(training.result(), reference.result())


@pytest.mark.parametrize("error", [errno.EIO, None])
@pytest.mark.parametrize("way", DISK_WAYS)
def test_a_failed_read_of_a_later_bucket_stops_training(way, error, tmp_path, monkeypatch):
    disk = FaultyDisk(monkeypatch, "preadv", error)
    reference = Training(way.split()[0], plain(O.AdamW)).run(4)
    with opened(way, tmp_path) as transfers:
        training = Training(way.split()[0], plain(O.AdamW))
        with adopted(training, transfers):
            training.run(2)
            checkpoint = [on_host(part.state_dict()) for part in (training.net, training.optimizer)]
            disk.fail(3)
            with pytest.raises(PartialStepError, match=r"failed after \d of \d buckets .*load a checkpoint"):
                training.step()
            assert disk.num_failed == 1
            with pytest.raises(PartialStepError, match="an earlier step failed half-way"):
                training.step()
            training.net.load_state_dict(checkpoint[0])
            training.optimizer.load_state_dict(checkpoint[1])
            training.num_steps, training.losses = 2, training.losses[:2]
            assert same(training.run(2).result(), reference.result())


@pytest.mark.parametrize("way", DISK_WAYS)
def test_a_failed_read_of_the_first_bucket_changes_nothing(way, tmp_path, monkeypatch):
    disk = FaultyDisk(monkeypatch, "preadv")
    reference = Training(way.split()[0], plain(O.AdamW)).run(4)
    with opened(way, tmp_path) as transfers:
        training = Training(way.split()[0], plain(O.AdamW))
        with adopted(training, transfers):
            training.run(2)
            before = training.result()
            disk.fail(1)
            with pytest.raises(StoreIOError, match="failed to read"):
                training.step()
            training.losses.pop()
            assert same(training.result(), before)
            assert same(training.run(2).result(), reference.result())


def test_state_that_cannot_be_read_at_detach_is_named(tmp_path, monkeypatch):
    disk = FaultyDisk(monkeypatch, "preadv")
    with opened("cpu disk async", tmp_path) as transfers:
        training = Training("cpu", plain(O.AdamW))
        undo = contextlib.ExitStack()
        adopt(training.net, transfers.store, transfers, BUCKET_BYTES, undo)
        training.run(1)
        disk.fail(2)
        with pytest.raises(OffloadError, match="1 buckets of AdamW could not be read back"):
            undo.close()
        assert not training.optimizer._optimizer_step_pre_hooks
        missing = [p for p in training.net.parameters() if p.grad is not None and p not in training.optimizer.state]
        assert missing


def test_a_full_tier_is_a_clear_error_and_loses_nothing(tmp_path):
    reference = Training("simgpu", plain(O.AdamW)).run(1)
    store = HostStore(1 << 16, pinned=True)
    transfers = Transfers("simgpu", store)
    training = Training("simgpu", plain(O.AdamW))
    with adopted(training, transfers):
        with pytest.raises(StoreFullError, match=r"budget of 65.5 kB is spent .*Nothing is lost"):
            training.step()
        training.losses = reference.losses
        assert store.counters.peak_allocated_bytes <= 1 << 16
        assert same(training.result(), reference.result())
    assert same(training.result(), reference.result())
    transfers.close()
    store.close()


def test_adopting_at_once_into_a_full_tier_leaves_no_trace(tmp_path):
    training = Training("simgpu", plain(O.AdamW)).run(1)
    before = on_host(training.optimizer.state_dict())
    store = HostStore(1 << 16, pinned=True)
    transfers = Transfers("simgpu", store)
    with contextlib.ExitStack() as undo, pytest.raises(StoreFullError):
        adopt_optimizer(training.optimizer, store, transfers, BUCKET_BYTES, undo)
    assert not training.optimizer._optimizer_step_pre_hooks
    assert all(type(entry) is dict for entry in training.optimizer.state.values())
    assert training.optimizer.state[training.net.head.weight]["exp_avg"].device.type == "simgpu"
    assert same(on_host(training.optimizer.state_dict()), before)
    assert store.counters.held_bytes == 0
    transfers.close()
    store.close()


@pytest.mark.parametrize("kind", ["fail_allocation", "fail_copy"])
def test_device_faults_in_a_step(kind, tmp_path):
    """Wherever it strikes: an error, no leaked byte, and a model that trains again after a checkpoint is loaded."""
    import simgpu

    struck = 0
    for nth in (1, 2, 5, 9, 14, 20):
        with opened("simgpu host async", tmp_path) as transfers:
            training = Training("simgpu", plain(O.AdamW, foreach=True)).run(2)
            checkpoint = [on_host(part.state_dict()) for part in (training.net, training.optimizer)]
            with adopted(training, transfers):
                training.step()
                training.backward(torch.ones(2, 64, device="simgpu"))
                with getattr(simgpu, kind)(nth) as fault, contextlib.suppress(RuntimeError, OffloadError):
                    training.optimizer.step()
                struck += fault.fired
                training.net.load_state_dict(checkpoint[0])
                training.optimizer.load_state_dict(checkpoint[1])
                training.num_steps = 2
                training.step()
            torch.accelerator.synchronize()
            assert simgpu.take_reports() == []
            reference = Training("simgpu", plain(O.AdamW, foreach=True)).run(3)
            assert same(on_host(training.net.state_dict()), on_host(reference.net.state_dict()))
    assert struck >= 3


def test_an_error_in_the_users_step_is_a_partial_step(tmp_path):
    class Moody(O.SGD):
        fail = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if self.fail and p.shape == (40, 64):
                        raise ValueError("no")
                    if p.grad is not None:
                        self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
                        p.sub_(self.state[p]["m"], alpha=0.1)

    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(Moody))
        with adopted(training, transfers):
            training.step()
            training.optimizer.fail = True
            with pytest.raises(PartialStepError, match="ValueError: no"):
                training.step()


@pytest.mark.parametrize("way", ["simgpu host async", "cpu disk async"])
def test_a_closure_that_fails_changes_nothing(way, tmp_path):
    with opened(way, tmp_path) as transfers:
        training = Training(way.split()[0], plain(O.AdamW))
        with adopted(training, transfers):
            training.run(2)
            before = training.result()

            def closure() -> float:
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                training.optimizer.step(closure)
            assert same(training.result(), before)
            training.step()


KILLED = """
import os, signal, sys, torch
from torch import nn
import contextlib
from memscale.techniques.offload.store.disk import DiskStore
from memscale.techniques.offload.optimizer.adoption import adopt
from memscale.techniques.offload.transfer.transfers import Transfers

torch.set_num_threads(1)
net = nn.Linear(256, 256)
store = DiskStore(sys.argv[1])
undo = contextlib.ExitStack()
adopt(net, store, Transfers("cpu", store), 1 << 20, undo)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.ones(2, 256)).sum().backward()
    optimizer.step()
assert store.counters.held_bytes > 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


@STEPS_OF_A_LEAK
@pytest.mark.parametrize("way", ["simgpu host async", "cpu disk async", "simgpu disk async"])
def test_many_steps_use_no_more_than_five(way, num_steps, tmp_path):
    device = way.split()[0]
    with opened(way, tmp_path, num_threads=2) as transfers:
        training = Training(device, plain(O.AdamW), "clip")
        with adopted(training, transfers):
            levels, most_threads = [], threading.active_count() + 2  # workers start when they are first needed
            for number in range(num_steps):
                training.step()
                if number % 10 == 4:
                    training.losses.clear()
                    leaves = transfers.store.leaves()
                    books = [(leaf.counters.held_bytes, leaf.counters.allocated_bytes) for leaf in leaves]
                    on_device = torch.accelerator.memory_allocated() if device == "simgpu" else 0
                    levels.append((*books, on_device, transfers.in_flight_bytes))
                    assert threading.active_count() <= most_threads
            assert len(set(levels)) == 1, levels


@pytest.mark.parametrize("way", ["simgpu host async", "simgpu tiered async"])
def test_parameters_on_the_host_beside_those_on_the_device(way, tmp_path, no_races):
    """Streamed layers live on the host: their state goes to the disk if there is one, and else stays."""

    def run(transfers: Transfers | None) -> Any:
        net = wide_net()
        net[2].to("cpu")
        net[3].to("cpu")
        optimizer = O.AdamW(net.parameters(), foreach=False)
        with contextlib.ExitStack() as undo:
            if transfers is not None:
                adopt(net, transfers.store, transfers, 2 * 65_536, undo)
            for _ in range(3):
                give_gradients(net)
                optimizer.step()
            if transfers is not None and "tiered" in way:
                disk = transfers.store.leaves()[1]
                assert disk.counters.held_bytes >= 4 * 65_536
            return on_host([list(net.parameters()), optimizer.state_dict()])

    with opened(way, tmp_path) as transfers:
        assert same(run(transfers), run(None))
