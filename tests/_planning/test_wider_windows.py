"""Plans choose windows as large as what a block saves, where there is room for them; see NOTE [far apart]."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale import AsyncOffloadConfig, Config, Hardware
from memscale._decide import link_clock, plan_as_it_is, travel
from memscale._decide.choice import Choice, RunOptions, actions_of
from memscale._plan import OffloadActivations, Plan
from memscale._planning.job import Job
from memscale._planning.one_way import OneWay
from memscale._planning.planner import Planner
from memscale._profile import CHECKPOINT, OFFLOAD, STREAM
from memscale._profile.inputs import Inputs
from memscale.techniques.offload.activations import offloader
from tests._planning.test_virtual_clock import CARD, Residual
from tests.models import Chain, features
from tests.parity import attached_plan

WIDTH, ROWS, WINDOW_BYTES = 128, 1024, 1 << 16
SENT_BYTES = 3 * ROWS * WIDTH * 4
"""What a block saves: its input, and what its tanh gives, which is twice as wide."""
SMALL = functools.partial(
    AsyncOffloadConfig, window_bytes=WINDOW_BYTES, prefetch_bytes=WINDOW_BYTES, min_tensor_bytes=4096
)
"""Defaults that are as small beside these blocks as 64 MiB is beside those of a large model."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain(*(Residual(WIDTH) for _ in range(8)), width=WIDTH)


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: Any, no_races: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated card, and small default windows."""
    simgpu.set_card(CARD)
    monkeypatch.setattr(travel, "AsyncOffloadConfig", SMALL)
    for module in (offloader, link_clock):  # so that wider ones let go of what backward has used
        monkeypatch.setattr(module, "KEPT_WINDOW_BYTES", WINDOW_BYTES)


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Losses and weights after three steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(features(step, ROWS, WIDTH).to("simgpu")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        del loss
    return [*losses, *(parameter.detach().cpu().clone() for parameter in model.parameters())]


def wrapped(budget_bytes: float, **changes: Any) -> tuple[nn.Module, Plan]:
    config = Config(device="simgpu", memory_budget_gb=budget_bytes / 1e9, enable_logging=False, **changes)
    model = memscale.wrap(build(), config, features(0, ROWS, WIDTH))
    plan = attached_plan(model)
    assert isinstance(plan, Plan)
    return model, plan


def test_windows_are_part_of_a_plan_that_holds_and_trains_the_same() -> None:
    """Another plan would compute again what has the time to travel."""
    expected = trained(build().to("simgpu"))
    budget_bytes = 0.85 * torch.accelerator.max_memory_allocated()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    model, plan = wrapped(budget_bytes)
    found = trained(model)
    torch.accelerator.synchronize()
    peak_bytes = torch.accelerator.max_memory_allocated()
    memscale.detach(model)
    assert all(map(torch.equal, found, expected))
    assert peak_bytes <= plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.conditions is not None
    assert plan.conditions.window_bytes == plan.conditions.prefetch_bytes > WINDOW_BYTES
    assert sum(isinstance(action, OffloadActivations) for action in plan.actions) >= 2
    assert "on their way out at most" in plan.explain()
    assert plan.predicted_slowdown < 1.05

    del model, found, expected
    model, narrow = wrapped(budget_bytes, async_config=SMALL())
    memscale.detach(model)
    assert narrow.conditions is not None
    assert narrow.conditions.window_bytes == WINDOW_BYTES, "the user has set it"
    assert narrow.predicted_slowdown > plan.predicted_slowdown + 0.01


def test_wider_windows_begin_with_what_narrow_ones_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build().to("simgpu")
    trained(plain)
    budget_bytes = 0.85 * torch.accelerator.max_memory_allocated()
    del plain
    decide, begun = OneWay.decide_and_rehearse, []

    def seen(way: OneWay, strategy: Any, beating: Plan | None = None, like: OneWay | None = None) -> Plan:
        begun.append((way.travel.transfers.window_bytes, None if like is None else like.travel.transfers.window_bytes))
        return decide(way, strategy, beating, like)

    monkeypatch.setattr(OneWay, "decide_and_rehearse", seen)
    model, plan = wrapped(budget_bytes)
    memscale.detach(model)
    assert plan.conditions is not None
    narrow, *wide = begun
    assert narrow == (WINDOW_BYTES, None)
    assert wide == [(plan.conditions.window_bytes, WINDOW_BYTES)], "they are planned for once"


def test_blocks_that_send_between_streamed_ones_train_the_same() -> None:
    """What the search tries where nothing leaves beside streamed blocks. See NOTE [among streamed blocks]."""
    expected = trained(build().to("simgpu"))
    windows = SMALL(window_bytes=SENT_BYTES, prefetch_bytes=SENT_BYTES)
    config = Config(device="simgpu", async_offload=True, async_config=windows, enable_logging=False)
    planner = Planner(Job(build(), config, Hardware.detect("simgpu")), Inputs((features(0, ROWS, WIDTH),), {}))
    planner.look_into_everything(planner.job.eligible)
    ways = {"o": OFFLOAD, "s": STREAM, "c": CHECKPOINT}
    blocks = tuple((f"blocks.{index}", ways[way]) for index, way in enumerate("ossosscs"))
    actions = tuple(actions_of(Choice(blocks, RunOptions(steps_on_device=True)), planner.profile))
    decided = plan_as_it_is(planner.profile, planner.job.eligible, actions, "")
    plan = planner.confirm(decided, planner.job.eligible)
    del planner
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    others_bytes = torch.accelerator.memory_allocated()  # constants of files that ran before
    model = build()
    executor = memscale.execute(model, plan, config)
    found = trained(model)
    torch.accelerator.synchronize()
    peak_bytes = torch.accelerator.max_memory_allocated() - others_bytes
    executor.detach()
    assert all(map(torch.equal, found, expected))
    output_bytes = ROWS * WIDTH * 4  # the loop drops its output, and a plan counts with one that keeps it
    assert plan.predicted_peak_bytes - output_bytes <= peak_bytes <= plan.predicted_peak_bytes
