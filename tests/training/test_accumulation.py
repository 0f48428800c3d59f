"""Loops that add up gradients over several batches: a budget holds for them, too (`_planning/replanning.py`)."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._planning import make_plan
from memscale._planning.job import open_job
from memscale._profile.inputs import Inputs
from tests.models import square_loss

BATCH = torch.Size((256, 64))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)) for _ in range(5))
    )


def budget(share: float) -> Config:
    """So far from the lowest plan's peak to the plain one's."""
    forced = Config(force_optimize=True, enable_logging=False, enable_offloading=False)
    model = build()
    plan = make_plan(open_job(model, forced, sgd(model)), Inputs.from_sample(torch.zeros(BATCH)))
    wanted = plan.predicted_peak_bytes + share * (plan.baseline_peak_bytes - plan.predicted_peak_bytes)
    return forced.replace(force_optimize=False, memory_budget_gb=wanted / 1e9)


def train(model: nn.Module, num_batches: int, *, clears_late: bool = False) -> list[torch.Tensor]:
    """Two steps of SGD, of so many batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(2):
        for _ in range(num_batches):
            loss = square_loss(model(torch.randn(BATCH)))
            if clears_late:
                optimizer.zero_grad()
            loss.backward()
            del loss
        optimizer.step()
        if not clears_late:
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def peak_of(config: Config, num_batches: int, **loop: bool) -> tuple[int, list[torch.Tensor], Any, Any]:
    """Measured bytes of the model's own, its weights, and the plans before and after."""
    gc.collect()
    with memscale.measure("cpu") as strangers:
        pass
    model = build()
    with memscale.optimize(model, sgd(model), config, torch.zeros(BATCH)) as executor:
        before = executor.plan
        with memscale.measure("cpu") as measured:
            weights = train(model, num_batches, **loop)
        return measured.peak_bytes - strangers.peak_bytes, weights, before, executor.plan


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("num_batches", "clears_late"), [(3, False), (1, True)], ids=["accumulated", "cleared late"])
def test_a_budget_holds_where_gradients_are_held(num_batches: int, clears_late: bool) -> None:
    config = budget(0.6)
    assert config.memory_budget_gb is not None
    peak, weights, before, after = peak_of(config, num_batches, clears_late=clears_late)
    assert after.predicted_peak_bytes > before.predicted_peak_bytes or after.actions != before.actions
    # What the loop itself holds beside the step: the weights that it returns do not count, they come after the peak.
    assert peak <= config.memory_budget_gb * 1e9
    assert all(map(torch.equal, weights, train(build(), num_batches, clears_late=clears_late)))


def test_a_loop_that_clears_its_gradients_is_planned_once() -> None:
    _, _, before, after = peak_of(budget(0.6), 1)
    assert after is before


def test_where_there_is_room_nothing_is_planned_again() -> None:
    config = Config(memory_budget_gb=1, enable_logging=False)
    _, _, before, after = peak_of(config, 3)
    assert after is before


def test_where_no_plan_counts_them_training_goes_on_and_says_so() -> None:
    model = build()
    config = budget(0.0)
    with memscale.optimize(model, sgd(model), config, torch.zeros(BATCH)) as executor:
        before = executor.plan
        with pytest.warns(
            UserWarning, match=r"keeps gradients between batches \([\d.]+ [Mk]B\).*no plan that counts them"
        ):
            weights = train(model, 2)
        assert executor.plan is before
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, 2)  # once is enough
    assert all(map(torch.equal, weights, train(build(), 2)))
