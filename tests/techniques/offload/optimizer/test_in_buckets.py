"""A step in buckets whose state stays where it is: the same bits, fewer temporaries, and nothing else is different."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memscale._errors import PartialStepError
from memscale._execute.executor import Executor, execute
from memscale._plan import StepInBuckets, StreamParameters
from memscale.techniques.offload.optimizer.adoption import adopt
from memscale.techniques.offload.optimizer.bucket_transfers import Visits
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.tiers import same
from tests.techniques.offload.training import (
    BUCKET_BYTES,
    O,
    Training,
    no_hooks_left,
    plain,
    step_peak_bytes,
    wide_net,
)

LAYER_BYTES = 128 * 128 * 4


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def in_buckets(training: Training, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Executor]:
    executor = execute(training.net, plan_of([StepInBuckets(bucket_bytes)]))
    try:
        yield executor
    finally:
        executor.detach()


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("name", "dtype"), in_turns(list(OPTIMIZERS), [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("device", ["simgpu", "cpu"])
def test_the_bits_are_those_of_the_step_at_once(name: str, dtype: torch.dtype, device: str):
    def make(net: torch.nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference = Training(device, make, dtype=dtype).run()
    training = Training(device, make, dtype=dtype)
    with in_buckets(training) as executor:
        training.run()
        assert executor.stats().transfers["optimizer"].num_buckets > 5
        assert same(training.result(), reference.result())
    assert same(training.run().result(), reference.run().result())
    no_hooks_left(training.optimizer)


@pytest.mark.parametrize(
    "mode", ["closure", "clip accumulate", "schedule keep", "scaler unscale clip", "scaler overflow"]
)
def test_loops_of_every_kind(mode: str):
    reference = Training("simgpu", plain(O.AdamW), mode).run()
    training = Training("simgpu", plain(O.AdamW), mode)
    with in_buckets(training):
        assert same(training.run().result(), reference.result())


def test_beside_streamed_parameters_a_step_is_taken_once():
    reference = Training("simgpu", plain(O.ASGD)).run()
    training = Training("simgpu", plain(O.ASGD))
    executor = execute(training.net, plan_of([StreamParameters("body"), StepInBuckets(BUCKET_BYTES)]))
    training.run()
    executor.detach()
    assert same(training.result(), reference.result())


# --------------------------------------------------------------------------------------------------------- effect


def peaks_of(bucket_bytes: int | None) -> list[int]:
    """Of steps, above parameters and gradients; 8 layers of 65,536 bytes."""
    net = wide_net()
    optimizer = O.AdamW(net.parameters())
    peaks = []
    with contextlib.ExitStack() as undo:
        if bucket_bytes is not None:
            adopt(net, None, None, bucket_bytes, undo)
        for _ in range(3):
            peaks.append(step_peak_bytes(net, optimizer))
    return peaks


def test_temporaries_are_those_of_one_bucket():
    at_once, halves, alone = (peaks_of(size)[-1] for size in (None, 4 * LAYER_BYTES, 1))
    assert at_once == 2 * halves == 8 * alone >= 8 * LAYER_BYTES


def test_state_stays_where_it_is_and_belongs_to_the_optimizer():
    training = Training("simgpu", plain(O.AdamW)).run(1)
    optimizer = training.optimizer
    entries = {parameter: (entry, dict(entry)) for parameter, entry in optimizer.state.items()}
    with in_buckets(training):
        training.run(2)
        for parameter, (entry, values) in entries.items():
            assert optimizer.state[parameter] is entry
            assert all(entry[name] is value for name, value in values.items())
        saved = optimizer.state_dict()["state"][0]["exp_avg"]
        assert saved is optimizer.state[next(iter(training.net.parameters()))]["exp_avg"], "no copy is made"


def test_a_saved_state_is_loaded_as_ever():
    reference = Training("simgpu", plain(O.AdamW)).run(2)
    saved = copy.deepcopy([reference.net.state_dict(), reference.optimizer.state_dict()])
    training = Training("simgpu", plain(O.AdamW))
    with in_buckets(training):
        training.run(1)
        training.net.load_state_dict(saved[0])
        training.optimizer.load_state_dict(saved[1])
        training.num_steps, training.losses = 2, list(reference.losses)
        assert same(training.run(2).result(), reference.run(2).result())


# -------------------------------------------------------------------------------------------------------- failures


def test_a_step_that_fails_half_way_is_not_taken_for_a_whole_one(monkeypatch: pytest.MonkeyPatch):
    training = Training("simgpu", plain(O.AdamW))
    with in_buckets(training):
        training.run(1)
        saved = copy.deepcopy(training.optimizer.state_dict())
        park, calls = Visits.park, []

        def fail_second(self: Visits, *args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            park(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Visits, "park", fail_second)
            with pytest.raises(PartialStepError, match="failed after 1 of"):
                training.step()
        with pytest.raises(PartialStepError, match="no state was loaded since"):
            training.step()
        training.optimizer.load_state_dict(saved)
        training.step()


def test_an_optimizer_that_looks_at_all_parameters_is_left_alone():
    class Normed(O.SGD):
        def step(self, closure: Any = None) -> None:
            norm = sum(p.grad.square().sum() for g in self.param_groups for p in g["params"] if p.grad is not None)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad / (1 + norm))

    reference = Training("simgpu", plain(Normed, lr=0.1)).run()
    training = Training("simgpu", plain(Normed, lr=0.1))
    with in_buckets(training), pytest.warns(UserWarning, match="Normed is left as it is"):
        training.run()
    assert same(training.result(), reference.result())
