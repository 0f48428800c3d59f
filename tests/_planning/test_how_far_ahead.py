"""Plans choose how many layers ahead weights are fetched; see NOTE [how far ahead] in `_decide/travel.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale import AsyncOffloadConfig, Config
from memscale._plan import Plan
from tests._planning.test_virtual_clock import CARD, Residual
from tests.models import Chain, features
from tests.parity import attached_plan

WIDTH, ROWS, NUM_BLOCKS = 256, 2048, 6
BLOCK_BYTES = sum(parameter.nbytes for parameter in Residual(WIDTH).parameters())
"""A sixth of all weights. What a block computes with is larger, so that the peak is in backward and not in the step."""


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: Any, no_races: Any) -> None:
    simgpu.set_card(CARD)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain(*(Residual(WIDTH) for _ in range(NUM_BLOCKS)), width=WIDTH)


def planned(**wishes: Any) -> tuple[nn.Module, Plan]:
    config = Config(device="simgpu", enable_logging=False, **wishes)
    model = memscale.wrap(build(), config, features(0, ROWS, WIDTH))
    plan = attached_plan(model)
    assert isinstance(plan, Plan)
    return model, plan


def lowest_bytes() -> int:
    """The lowest peak with overlap and weights that are fetched one layer ahead."""
    ahead = AsyncOffloadConfig(prefetch_depth=1)
    model, plan = planned(async_offload=True, async_config=ahead, force_optimize=True)
    memscale.detach(model)
    return plan.predicted_peak_bytes


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


def test_one_layer_ahead_where_two_do_not_fit() -> None:
    """Else transfers would block. It trains the same, and the promised peak holds."""
    expected = trained(build().to("simgpu"))
    budget_bytes = lowest_bytes() + BLOCK_BYTES // 2
    others_bytes = torch.accelerator.memory_allocated()  # constants of files that ran before
    model, plan = planned(memory_budget_gb=budget_bytes / 1e9)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    found = trained(model)
    torch.accelerator.synchronize()
    peak_bytes = torch.accelerator.max_memory_allocated() - others_bytes
    memscale.detach(model)
    assert all(map(torch.equal, found, expected))
    assert peak_bytes <= plan.predicted_peak_bytes <= plan.budget_bytes == budget_bytes
    assert plan.conditions is not None
    assert plan.conditions.async_offload
    assert plan.conditions.prefetch_depth == 1
    assert plan.conditions.nearer is not None
    assert plan.conditions.nearer.numbers["farther_bytes"] > plan.budget_bytes
    assert "1 layer fetched ahead, since with more of them nothing fits the budget" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan


def test_two_layers_ahead_where_they_fit() -> None:
    model, plan = planned(memory_budget_gb=(lowest_bytes() + 2 * BLOCK_BYTES) / 1e9)
    memscale.detach(model)
    assert plan.conditions is not None
    assert (plan.conditions.async_offload, plan.conditions.prefetch_depth) == (True, 2)
    assert plan.conditions.nearer is None


def test_how_far_ahead_is_said_by_the_user() -> None:
    """The budget of the first test, and two layers that are asked for: transfers block."""
    budget_gb = (lowest_bytes() + BLOCK_BYTES // 2) / 1e9
    model, plan = planned(memory_budget_gb=budget_gb, async_config=AsyncOffloadConfig(prefetch_depth=2))
    memscale.detach(model)
    assert plan.conditions is not None
    assert not plan.conditions.async_offload
