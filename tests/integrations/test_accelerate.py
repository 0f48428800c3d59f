"""The real Accelerate: a model that is wrapped before `prepare`, or after it, trains as a plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import memscale
from memscale._execute.executor import executor_of
from memscale._plan import Checkpoint

CONFIG = memscale.Config(mode=memscale.OptimizationMode.CONSERVATIVE, force_optimize=True, enable_logging=False)


def train(order: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
    """Losses, weights and plan of a loop with accumulation, clipping, a schedule and a smaller last batch."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)))
    data: Any = torch.randn(4 * 4 + 2, 8, 16)
    if order == "before":
        model = memscale.wrap(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(data, 4))
    if order == "after":
        model = memscale.wrap(model, CONFIG)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    if order == "plain":
        return losses, weights, None
    executor = executor_of(accelerator.unwrap_model(model))
    assert executor is not None
    memscale.detach(accelerator.unwrap_model(model))
    return losses, weights, executor.plan


@pytest.mark.parametrize("order", ["before", "after"])
def test_wrap_may_come_before_prepare_or_after_it(order: str) -> None:
    expected_losses, expected, _ = train("plain")
    losses, weights, plan = train(order)
    assert all(torch.equal(loss, wanted) for loss, wanted in zip(losses, expected_losses, strict=True))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert any(isinstance(action, Checkpoint) for action in plan.actions)
