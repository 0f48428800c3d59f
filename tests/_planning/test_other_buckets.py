"""Plans whose state travels in buckets of another size than most; see NOTE [sizes of buckets] in other_buckets.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale import Config, Hardware
from memscale._decide import other_buckets
from memscale._decide.policy import choose_strategy
from memscale._plan import OPTIMIZER_BUCKET_BYTES, OffloadOptimizer, Plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes
from memscale.techniques import planned_step
from tests._planning.test_virtual_clock import CARD, Residual
from tests.models import Chain, features
from tests.parity import attached_plan

WIDTH, ROWS, SMALL_BYTES = 512, 64, 1 << 21


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain(*(Residual(WIDTH) for _ in range(8)), width=WIDTH)


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: Any, no_races: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated card, and a size that is as small beside this model as 8 MiB is beside large ones."""
    simgpu.set_card(CARD)
    monkeypatch.setattr(other_buckets, "SIZES", (SMALL_BYTES,))


def trained(model: nn.Module) -> tuple[list[torch.Tensor], float]:
    """Losses and weights after three steps, and the time of the last by the virtual clock."""
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step in range(3):
        torch.accelerator.synchronize()
        start_ms = simgpu.virtual_ms()
        optimizer.zero_grad()
        loss = model(features(step, ROWS, WIDTH).to("simgpu")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        del loss
    torch.accelerator.synchronize()
    elapsed_ms = simgpu.virtual_ms() - start_ms
    return [*losses, *(parameter.detach().cpu().clone() for parameter in model.parameters())], elapsed_ms


def wrapped(budget_bytes: float) -> tuple[nn.Module, Plan]:
    config = Config(
        device="simgpu", memory_budget_gb=budget_bytes / 1e9, enable_logging=False, enable_checkpointing=False
    )
    model = memscale.wrap(build(), config, features(0, ROWS, WIDTH))
    plan = attached_plan(model)
    assert isinstance(plan, Plan)
    return model, plan


def size_in(plan: Plan) -> int | None:
    return planned_step(plan.actions).bucket_bytes


def test_a_plan_in_smaller_buckets_trains_the_same_faster_and_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build().to("simgpu")
    expected, _ = trained(plain)
    budget_bytes = 0.85 * torch.accelerator.max_memory_allocated()
    del plain

    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    model, plan = wrapped(budget_bytes)
    found, small_ms = trained(model)
    peak_bytes = torch.accelerator.max_memory_allocated()
    memscale.detach(model)
    assert size_in(plan) == SMALL_BYTES
    assert all(map(torch.equal, found, expected))
    assert peak_bytes <= plan.predicted_peak_bytes <= plan.budget_bytes
    assert f"bucket {show_bytes(SMALL_BYTES)}" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan

    del model, found
    monkeypatch.setattr(other_buckets, "SIZES", ())
    model, other = wrapped(budget_bytes)
    _, large_ms = trained(model)
    memscale.detach(model)
    assert size_in(other) == OPTIMIZER_BUCKET_BYTES
    assert plan.predicted_slowdown < 0.995 * other.predicted_slowdown
    assert small_ms < large_ms


def test_what_rehearses_a_plan_goes_by_its_buckets() -> None:
    """Whoever looks at a plan again, for another batch or a report, gets the numbers that it was made with."""
    plain = build().to("simgpu")
    trained(plain)
    config = Config(
        device="simgpu",
        memory_budget_gb=0.85 * torch.accelerator.max_memory_allocated() / 1e9,
        enable_logging=False,
        enable_checkpointing=False,
    )
    del plain
    planner = Planner(Job(build(), config, Hardware.detect("simgpu")), Inputs((features(0, ROWS, WIDTH),), {}))
    strategy = choose_strategy(planner.job.eligible)
    plan = planner.plan(strategy)
    assert size_in(plan) == SMALL_BYTES
    way = planner.by(planner.job.eligible.travel_of(plan))
    assert way.profile.bucket_bytes == way.costs.travel.bucket_bytes == SMALL_BYTES
    again = way.confirm(plan, strategy.eligible.by(way.travel))
    assert (again.predicted_peak_bytes, again.predicted_reserved_bytes) == (
        plan.predicted_peak_bytes,
        plan.predicted_reserved_bytes,
    )
    assert any(isinstance(action, OffloadOptimizer) for action in again.actions)
