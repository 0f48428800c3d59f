"""Gradients that wait in host memory until the step: the bits, what it frees, what is refused, and its waits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale import AsyncOffloadConfig, ConfigError, OffloadError, PartialStepError
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale._torch.waiting_gradients import WaitingGradient, is_waiting
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.gradient_homes import choose_waiting
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.optimizer.waiting_gradients import OffloadGradients
from memscale.techniques.offload.transfer import stream_order
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.runs import DEVICE
from tests.techniques.offload.tiers import same
from tests.techniques.offload.training import O, Training, no_hooks_left, plain

BUCKET_BYTES = 25_000
SMALL = 5_000
PLANS: dict[str, tuple[Any, ...]] = {
    "all": (OffloadOptimizer(BUCKET_BYTES), OffloadGradients("body"), OffloadGradients("head")),
    "half": (OffloadOptimizer(BUCKET_BYTES), OffloadGradients("body", 0.5)),
    "state stays": (OffloadOptimizer(BUCKET_BYTES, 0.9), OffloadGradients("body")),
    "stretches": (OffloadOptimizer(SMALL), OffloadGradients("body", bucket_bytes=SMALL)),
    "other stretches": (OffloadOptimizer(SMALL), OffloadGradients("body", bucket_bytes=7_000)),
    "stretches of what stays": (OffloadOptimizer(SMALL, 0.9), OffloadGradients("body", bucket_bytes=SMALL)),
    "guests": (
        StreamParameters("head"),
        StepOnDevice(BUCKET_BYTES),
        OffloadOptimizer(BUCKET_BYTES),
        OffloadGradients("body"),
        OffloadGradients("head"),
    ),
    "recomputed": (Checkpoint("body"), OffloadActivations("body"), OffloadOptimizer(SMALL), OffloadGradients("body")),
    "early": (OffloadOptimizer(BUCKET_BYTES), FetchStateEarly("body", 30_000), OffloadGradients("body")),
}


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def wrapped(net: nn.Module, *actions: Any, asynchronous: bool = True, **settings: Any) -> Iterator[Executor]:
    made = ExecutionSettings(asynchronous=asynchronous, device=DEVICE, **settings)
    executor = execute(net, plan_of(list(actions), device_type="simgpu"), made)
    try:
        yield executor
    finally:
        executor.detach()
    torch.accelerator.synchronize()
    assert simgpu.take_reports() == []


def stats(executor: Executor) -> Any:
    return executor.stats().transfers["gradients"]


def waiting(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if is_waiting(parameter.grad)]


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_the_bits_are_those_of_plain_training(plan: str, asynchronous: bool):
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    reference.run()
    with wrapped(training.net, *PLANS[plan], asynchronous=asynchronous) as executor:
        training.run()
        assert same(training.result(), reference.result())
        assert stats(executor).num_sent > 0
        assert stats(executor).num_brought >= stats(executor).num_sent
    assert same(training.run().result(), reference.run().result())
    no_hooks_left(training.optimizer)


@pytest.mark.parametrize(("name", "plan"), in_turns(list(OPTIMIZERS), ["all", "stretches", "state stays"]))
def test_with_every_optimizer(name: str, plan: str):
    def make(net: nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference, training = Training("simgpu", make).run(), Training("simgpu", make)
    with wrapped(training.net, *PLANS[plan]) as executor:
        assert same(training.run().result(), reference.result())
        assert stats(executor).num_sent > 0
