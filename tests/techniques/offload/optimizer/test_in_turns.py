"""Buckets that travel and buckets that stay take turns: the link is kept busy, large parameters come in stretches."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OPTIMIZER_BUCKET_BYTES, OffloadOptimizer, StepInBuckets, StreamParameters
from memscale.techniques.offload.optimizer.adoption import adopt
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.store.stores import PartEvents
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.techniques.offload.optimizer import test_effect
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.runs import DEVICE
from tests.techniques.offload.tiers import opened, same
from tests.techniques.offload.training import O, Training, adopted, give_gradients, step_peak_bytes, wide_net

LAYER_BYTES = 128 * 128 * 4
ELEMENT_BY_ELEMENT = [name for name in OPTIMIZERS if name != "Adafactor"]


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# ------------------------------------------------------------------------------------- stretches of what lives here


@pytest.mark.parametrize(("name", "way"), in_turns(ELEMENT_BY_ELEMENT, ["simgpu host async", "simgpu host sync"]))
def test_the_state_of_a_large_parameter_comes_a_stretch_at_a_time(name: str, way: str, tmp_path: pathlib.Path):
    def make(net: nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference = Training("simgpu", make).run(3)
    with opened(way, tmp_path) as transfers:
        training = Training("simgpu", make)
        with adopted(training, transfers, bucket_bytes=5_000) as adoption:
            training.run(3)
            # 24,576 bytes in six stretches, twice, with a bias; 16,384 in four; 10,240 in three; the small ones in one.
            assert adoption.stats.num_buckets == 3 * (6 + 1 + 6 + 4 + 3 + 1)
            assert same(training.result(), reference.result())
            for one in (reference, training):
                for value in one.optimizer.state[one.net.body[0].weight].values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value.mul_(2)
            assert same(training.run(2).result(), reference.run(2).result())
        assert same(training.run(2).result(), reference.run(2).result())


def test_a_stretch_that_is_stepped_counts_as_a_change_of_the_parameter(tmp_path: pathlib.Path):
    with opened("simgpu host async", tmp_path) as transfers:
        net = wide_net()
        optimizer = O.AdamW(net.parameters())
        with contextlib.ExitStack() as undo:
            adopt(net, transfers.store, transfers, LAYER_BYTES // 4, undo)
            give_gradients(net)
            before = [parameter._version for parameter in net.parameters()]
            optimizer.step()
            assert all(p._version > version for p, version in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_device_holds_stretches_of_the_state(asynchronous: bool, tier: str, tmp_path: pathlib.Path):
    """8 layers of 65,536 bytes in stretches of a quarter: S = 2 * 16,384 bytes, of 1,048,576 bytes of state."""
    stretch_state = 2 * LAYER_BYTES // 4
    with opened(f"simgpu {tier} {'async' if asynchronous else 'sync'}", tmp_path) as transfers:
        net = wide_net()
        optimizer = O.AdamW(net.parameters(), fused=True)
        with contextlib.ExitStack() as undo:
            adoption = adopt(net, transfers.store, transfers, LAYER_BYTES // 4, undo)
            for _ in range(3):
                peak_bytes = step_peak_bytes(net, optimizer)
            counters = 2 * 512  # each stretch starts from its own copy of the counter
            assert 0 <= peak_bytes - (3 if asynchronous else 1) * stretch_state <= counters
            assert adoption.stats.num_buckets == 3 * 8 * 4
            assert transfers.store.counters.held_bytes == 16 * LAYER_BYTES
            assert transfers.store.counters.allocated_bytes == 16 * LAYER_BYTES, "whole blocks: nothing is lost"


@pytest.mark.parametrize("why", test_effect.WAITS)
def test_every_wait_of_a_stretch_is_needed(why: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Without any one of the waits, simgpu reports a race or the numbers are wrong."""
    assert test_effect.is_caught_in(monkeypatch, why, tmp_path, LAYER_BYTES // 4)


def test_a_part_waits_for_its_own_copies_and_for_those_of_the_whole():
    events = PartEvents[str]()
    assert events.of((0, 4), "whole") == "whole"
    events.note((0, 4), "first")
    assert events.of((4, 8), "first") == "whole", "not for its neighbour"
    events.note((4, 8), "second")
    assert events.of((0, 4), "second") == "first"
    assert events.of((2, 6), "second") == "second", "cut otherwise, it may be any of them"
    events.note((2, 6), "third")
    assert events.of((0, 4), "third") == "third"
    assert events.of((2, 6), "third") == "third"
    assert events.of((0, 4), "whole again") == "whole again"
    assert events.of((4, 8), None) is None


# ------------------------------------------------------------------------------------------------ the link is busy


def layers(num_layers: int = 16, width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))).to("simgpu")


def share_busy(actions: Sequence[Any], net: nn.Sequential) -> float:
    """Of the optimizer's step by the virtual clock: how long the busier direction of the link is in use."""
    settings = ExecutionSettings(asynchronous=True, device=DEVICE)
    executor = execute(net, plan_of(actions, device_type="simgpu"), settings)
    optimizer, x = O.AdamW(net.parameters()), torch.ones(2, net[0].in_features, device="simgpu")
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        torch.accelerator.synchronize()
        before, start_ms = simgpu.overlap_report(), simgpu.virtual_ms()
        optimizer.step()
        torch.accelerator.synchronize()
    after, elapsed_ms = simgpu.overlap_report(), simgpu.virtual_ms() - start_ms
    executor.detach()
    to_device_ms, to_host_ms = after.to_device_ms - before.to_device_ms, after.to_host_ms - before.to_host_ms
    return max(to_device_ms, to_host_ms) / elapsed_ms


BUCKET_BYTES = 256 * 256 * 4


def small_card() -> simgpu.Card:
    """An RTX 3090 on which these buckets take as long as those of plans, of 16 MiB, do on the real one."""
    card, scale = simgpu.CARDS["RTX 3090"], BUCKET_BYTES / OPTIMIZER_BUCKET_BYTES
    rates = ("fp32_tflops", "bf16_tflops", "fp16_tflops", "memory_gbps", "link_gbps", "pageable_link_gbps")
    return dataclasses.replace(card, **{name: getattr(card, name) * scale for name in rates})


STREAMED = [StreamParameters(str(index)) for index in range(4, 12)]
TRAVELLING: dict[str, list[Any]] = {
    "all of the state": [OffloadOptimizer(BUCKET_BYTES)],
    "in stretches": [OffloadOptimizer(BUCKET_BYTES // 2)],
    "half of the state": [OffloadOptimizer(BUCKET_BYTES, 0.5)],
    "guests": [*STREAMED, StepOnDevice(BUCKET_BYTES), StepInBuckets(BUCKET_BYTES)],
    "guests and half of the state": [*STREAMED, StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES, 0.5)],
    "early state": [OffloadOptimizer(BUCKET_BYTES), FetchStateEarly("4", 6 * BUCKET_BYTES)],
    "late state": [OffloadOptimizer(BUCKET_BYTES), SendStateLate("4", 6 * BUCKET_BYTES)],
    "early and late state": [
        *(OffloadOptimizer(BUCKET_BYTES), FetchStateEarly("4", 6 * BUCKET_BYTES), SendStateLate("4", 6 * BUCKET_BYTES))
    ],
    "guests, early and late state": [
        *(*STREAMED, StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES)),
        *(FetchStateEarly("2", 4 * BUCKET_BYTES), SendStateLate("2", 4 * BUCKET_BYTES)),
    ],
}
"""What comes early and leaves late is not in the step: the rest of what travels is to keep the link busy by itself."""


@pytest.mark.parametrize("name", TRAVELLING)
def test_the_busier_direction_of_the_link_is_in_use_for_85_percent_of_the_step(name: str):
    simgpu.set_card(small_card())
    assert share_busy(TRAVELLING[name], layers()) >= 0.85
