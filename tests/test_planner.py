"""When plans are made: from a sample, at the first training forward, and again for a larger batch."""

from __future__ import annotations

import copy

import pytest
import torch

import memscale
from memscale import Config, DoesNotFitError
from memscale._execute import executor_of
from tests.models import case, small, square_loss
from tests.parity import assert_same, attached_plan, seed, train

QUIET = Config(force_optimize=True, enable_logging=False)
SAMPLE = torch.ones(64, 16)


def test_without_a_sample_the_plan_is_made_at_the_first_training_forward() -> None:
    model = memscale.wrap(small(), QUIET)
    assert attached_plan(model) is None
    with torch.no_grad():
        model(SAMPLE)
    model.eval()
    model(SAMPLE)
    assert attached_plan(model) is None
    model.train()
    model(SAMPLE)
    assert attached_plan(model).actions
    assert attached_plan(model).inputs == ("0: 64x16 float32",)


def test_a_transformers_config_is_enough() -> None:
    model = memscale.wrap(case("gpt2").build(), QUIET)
    assert attached_plan(model) is not None


def test_a_larger_batch_is_planned_again_a_smaller_is_not() -> None:
    model = memscale.wrap(small(), QUIET, SAMPLE)
    planned = attached_plan(model)
    model(torch.ones(8, 16))
    assert attached_plan(model) is planned
    model(torch.ones(64, 16))
    assert attached_plan(model) is planned
    model(torch.ones(128, 16))
    assert attached_plan(model) is not planned
    assert attached_plan(model).predicted_peak_bytes > planned.predicted_peak_bytes


def test_a_batch_that_does_not_fit_leaves_the_plan_for_those_that_do() -> None:
    model = small()
    estimate = memscale.estimate(model, SAMPLE, config=QUIET)
    budget = estimate.baseline_peak_bytes - 1000
    memscale.wrap(model, Config(memory_budget_gb=budget / 1e9, enable_logging=False), SAMPLE)
    planned = attached_plan(model)
    assert planned.actions
    with pytest.raises(DoesNotFitError):
        model(torch.ones(20_000, 16))
    assert attached_plan(model) == planned, "the smaller batches still need it"
    square_loss(model(SAMPLE)).backward()
    assert executor_of(model).stats().num_recomputes == len(planned.actions)


def test_planning_at_the_first_forward_changes_nothing_about_it() -> None:
    entry = case("resnet")
    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    memscale.wrap(model, QUIET)
    assert_same(train(model, entry), train(twin, entry))
