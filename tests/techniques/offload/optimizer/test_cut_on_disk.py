"""State of large parameters on disk, a stretch at a time: the same bits, so many bytes, and what failures leave."""

from __future__ import annotations

import contextlib
import gc
import io
import pathlib
from typing import Any

import pytest
import torch

from memscale import Config
from memscale._errors import ChecksumError, PartialStepError, StoreIOError
from memscale._hardware import Hardware
from memscale._planning.job import Job
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale.techniques.offload.optimizer.adoption import adopt
from memscale.techniques.offload.optimizer.buckets import rounded
from memscale.techniques.offload.store.disk import BLOCK_BYTES, DiskStore
from tests.lanes import in_turns
from tests.models import Mlp
from tests.techniques.offload.optimizer.test_effect import FaultyDisk
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.optimizer.test_in_turns import ELEMENT_BY_ELEMENT
from tests.techniques.offload.store.test_disk import flip_a_byte
from tests.techniques.offload.tiers import on_host, opened, same
from tests.techniques.offload.training import (
    O,
    Training,
    adopted,
    check_races,
    check_waiting,
    plain,
)

WAYS = ("simgpu disk sync", "simgpu disk async", "simgpu tiered async")
BUCKET_BYTES = 5_000
"""Parameters of 24,576 bytes come in six stretches, those of 16,384 in four, those of 10,240 in three."""
NUM_TURNS = 6 + 1 + 6 + 4 + 3 + 1


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def bf16_of(way: str) -> torch.dtype:
    return torch.bfloat16 if "tiered" in way else torch.float32


# -------------------------------------------------------------------------------------------------- the same training


@pytest.mark.parametrize(("name", "way"), in_turns(ELEMENT_BY_ELEMENT, WAYS, whole=["AdamW"]))
def test_the_bits_are_those_of_the_plain_optimizer(name: str, way: str, tmp_path: pathlib.Path) -> None:
    """Also of 16 bits, where stretches begin in the middle of a block; also after somebody looked and changed them."""

    def make(net: torch.nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference = Training("simgpu", make, dtype=bf16_of(way)).run(3)
    with opened(way, tmp_path) as transfers:
        training = Training("simgpu", make, dtype=bf16_of(way))
        with adopted(training, transfers, bucket_bytes=BUCKET_BYTES) as adoption:
            training.run(3)
            if bf16_of(way) is torch.float32:
                assert adoption.stats.num_buckets == 3 * NUM_TURNS
            assert same(training.result(), reference.result())
            check_waiting(training)
            for one in (reference, training):
                for value in one.optimizer.state[one.net.body[0].weight].values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value.mul_(2)
            assert same(training.run(2).result(), reference.run(2).result())
        assert same(training.run(2).result(), reference.run(2).result())
    check_races("simgpu")


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_are_plain_ones_and_are_loaded_into_stretches(way: str, tmp_path: pathlib.Path) -> None:
    reference = Training("simgpu", plain(O.AdamW, lr=1e-2)).run(2)
    with opened(way, tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW, lr=1e-2))
        with adopted(training, transfers, bucket_bytes=BUCKET_BYTES):
            file = io.BytesIO()
            torch.save(training.run(2).optimizer.state_dict(), file)
            file.seek(0)
            saved = torch.load(file)
            assert same(on_host(saved), on_host(reference.optimizer.state_dict()))
            resumed = Training("simgpu", plain(O.AdamW, lr=1e-2))
            resumed.net.load_state_dict(training.net.state_dict())
            resumed.optimizer.load_state_dict(saved)
            training.run(1)
            training.net.load_state_dict(resumed.net.state_dict())
            training.optimizer.load_state_dict(saved)
            training.num_steps = resumed.num_steps = 2
            expected = on_host(resumed.run(3).optimizer.state_dict())
            assert same(on_host(training.run(3).optimizer.state_dict()), expected)
            assert same(on_host(training.net.state_dict()), on_host(resumed.net.state_dict()))


def test_state_that_is_there_at_first_is_cut_as_well(tmp_path: pathlib.Path) -> None:
    reference = Training("simgpu", plain(O.AdamW, lr=1e-2)).run(4)
    with opened("simgpu disk async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW, lr=1e-2)).run(2)
        with adopted(training, transfers, bucket_bytes=BUCKET_BYTES) as adoption:
            check_waiting(training)
            training.run(2)
            assert adoption.stats.num_buckets == 2 * NUM_TURNS
            assert same(training.result(), reference.result())
        assert same(training.result(), reference.result())


# ------------------------------------------------------------------------------------------------------- so many bytes


@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_peak_of_the_step_is_the_predicted_one(way: str, tmp_path: pathlib.Path) -> None:
    """To the byte, the step that makes the state included, with a directory as without one."""
    bucket_bytes = 300_000  # matrices of 1 MiB, in four stretches
    model = Mlp(width=512, depth=3)
    costs = {}
    for directory in (None, str(tmp_path)):
        config = Config(device="simgpu", enable_logging=False, async_offload=way == "async", offload_dir=directory)
        found = OptimizerCosts(Job(model, config, Hardware.detect("simgpu"), "adamw"))
        costs[directory] = found.by(found.travel.in_buckets_of(bucket_bytes)).cost()
    assert costs[None] == costs[str(tmp_path)]
    window_bytes = found.travel.transfers.window_bytes
    model.to("simgpu")
    with opened(f"simgpu disk {way}", tmp_path, window_bytes=window_bytes) as transfers:
        with contextlib.ExitStack() as undo:
            adopt(model, transfers.store, transfers, bucket_bytes, undo)
            optimizer, peaks = O.AdamW(model.parameters()), []
            before = torch.accelerator.memory_allocated() + sum(rounded(p.nbytes) for p in model.parameters())
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                torch.accelerator.synchronize()
                torch.accelerator.reset_peak_memory_stats()
                optimizer.step()
                torch.accelerator.synchronize()
                peaks.append(torch.accelerator.max_memory_allocated() - before)
            cost = costs[None]
            assert cost.offloaded_step_bytes is not None
            assert max(peaks) == cost.offloaded_state_bytes + cost.offloaded_step_bytes
            assert transfers.store.counters.held_bytes == sum(cost.bucket_bytes)
        optimizer.zero_grad()
        del optimizer
        gc.collect()


# ------------------------------------------------------------------------------------------------- what failures leave


@pytest.mark.parametrize("nth", [1, 2, 17, 30])
@pytest.mark.parametrize("way", ["simgpu disk sync", "simgpu disk async"])
def test_a_failed_write_of_a_stretch_loses_nothing(
    way: str, nth: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Training("simgpu", plain(O.AdamW, lr=1e-2)).run(3)
    disk = FaultyDisk(monkeypatch, "pwrite")
    with opened(way, tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW, lr=1e-2))
        with adopted(training, transfers, bucket_bytes=BUCKET_BYTES):
            training.run(2)
            transfers.settle()
            disk.fail(nth)
            with contextlib.suppress(StoreIOError):
                training.step()
            training.num_steps = 3
            assert same(on_host(training.net.state_dict()), on_host(reference.net.state_dict()))
            assert same(on_host(training.optimizer.state_dict()), on_host(reference.optimizer.state_dict()))
            assert disk.num_failed == 1
            errors = []
            for _ in range(2):
                try:
                    training.step()
                except StoreIOError as late:
                    errors.append(late)
                training.num_steps = len(reference.losses) + 1
                reference.step()
            assert len(errors) <= 1
            assert same(on_host(training.net.state_dict()), on_host(reference.net.state_dict()))
            assert same(on_host(training.optimizer.state_dict()), on_host(reference.optimizer.state_dict()))


def test_every_write_of_a_step_may_fail(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is then in host memory, and returns to the disk with the next step."""
    reference = Training("simgpu", plain(O.AdamW, lr=1e-2)).run(4)

    def fail(*args: Any) -> None:
        raise StoreIOError("the disk is gone")

    for way in ("simgpu disk sync", "simgpu disk async"):
        with opened(way, tmp_path) as transfers:
            training = Training("simgpu", plain(O.AdamW, lr=1e-2))
            with adopted(training, transfers, bucket_bytes=BUCKET_BYTES):
                training.run(2)
                transfers.settle()
                with monkeypatch.context() as patch:
                    patch.setattr(DiskStore, "write", fail)
                    with pytest.raises(StoreIOError, match=r"the disk is gone.*Nothing is lost"):
                        training.step()
                    concurrent_writes = transfers.store.counters.held_bytes
                    training.optimizer.state_dict()
                training.num_steps = 3
                with contextlib.suppress(StoreIOError):  # of what a thread found too late for the step before
                    training.step()
                assert same(on_host(training.net.state_dict()), on_host(reference.net.state_dict()))
                assert same(on_host(training.optimizer.state_dict()), on_host(reference.optimizer.state_dict()))
                check_waiting(training)
                assert transfers.store.counters.held_bytes >= concurrent_writes


@pytest.mark.parametrize("way", ["simgpu disk sync", "simgpu disk async"])
def test_a_failed_read_of_a_later_stretch_stops_training(
    way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Training("simgpu", plain(O.AdamW, lr=1e-2)).run(3)
    disk = FaultyDisk(monkeypatch, "preadv")
    with opened(way, tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW, lr=1e-2))
        with adopted(training, transfers, bucket_bytes=BUCKET_BYTES):
            training.run(2)
            saved = [on_host(part.state_dict()) for part in (training.net, training.optimizer)]
            disk.fail(9)
            with pytest.raises(PartialStepError, match=r"failed after \d of 21 buckets"):
                training.step()
            training.net.load_state_dict(saved[0])
            training.optimizer.load_state_dict(saved[1])
            training.num_steps = 2
            training.step()
            assert same(on_host(training.net.state_dict()), on_host(reference.net.state_dict()))
            assert same(on_host(training.optimizer.state_dict()), on_host(reference.optimizer.state_dict()))


@pytest.mark.parametrize("way", ["simgpu disk sync", "simgpu disk async"])
def test_a_changed_byte_of_a_stretch_is_found(way: str, tmp_path: pathlib.Path) -> None:
    """By the stretch that it is in, before its parameter is stepped; and by who saves all of them."""
    with opened(way, tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW, lr=1e-2))
        with adopted(training, transfers, bucket_bytes=BUCKET_BYTES):
            training.run(2)
            transfers.settle()
            saved = [on_host(part.state_dict()) for part in (training.net, training.optimizer)]
            flip_a_byte(transfers.store, BLOCK_BYTES + 100)
            with pytest.raises(ChecksumError, match="came back changed"):
                training.optimizer.state_dict()
            with pytest.raises((PartialStepError, ChecksumError), match="came back changed"):
                training.step()
            training.net.load_state_dict(saved[0])
            training.optimizer.load_state_dict(saved[1])
