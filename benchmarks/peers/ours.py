"""MemScale at a peer's figures: the plan within its peak, and the lowest plan that is no slower than it."""

from __future__ import annotations

import time
from typing import Any

import torch

import memscale
from benchmarks.peers.work import SHAPE, Shape, Training, build_batch, build_model, torch_device
from memscale import Config, Hardware
from memscale._decide.policy import choose_strategy
from memscale._execute.executor import executor_of
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale.report.explain import what_is_done

MAX_TRIES = 3
"""Plans that are made to find the lowest that is fast enough; each takes seconds."""


def config_for(device: str, allowed: dict[str, Any], budget_bytes: int | None) -> Config:
    return Config(
        **allowed,
        device=torch_device(device),
        memory_budget_gb=None if budget_bytes is None else budget_bytes / 1e9,
        force_optimize=budget_bytes is None,
        enable_logging=False,
    )


def open_wrapped(
    device: str, allowed: dict[str, Any], budget_bytes: int, shape: Shape = SHAPE
) -> tuple[Training, dict[str, Any]]:
    """A training of ours within so many bytes, and what its plan says. DoesNotFitError: there is no such plan."""
    place = torch_device(device)
    batch = build_batch(shape)
    start = time.process_time()
    model = memscale.wrap(build_model(shape), config_for(device, allowed, budget_bytes), batch)
    planning_s = time.process_time() - start
    executor = executor_of(model)
    assert executor is not None
    assert executor.plan is not None
    training = Training(
        model.to(place) if not executor.plan.actions else model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        {name: tensor.to(place) for name, tensor in batch.items()},
    )
    return training, {**said_by(executor.plan), "planning_s": planning_s}


def said_by(plan: Plan) -> dict[str, Any]:
    return {
        "predicted_bytes": plan.predicted_peak_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
        "predicted_slowdown": plan.predicted_slowdown,
        "of_bound": plan.of_bound,
        "what": what_is_done(plan),
    }


def least_budget(
    device: str, allowed: dict[str, Any], most_bytes: int, most_slowdown: float, shape: Shape = SHAPE
) -> int:
    """The smallest budget whose plan is predicted to be no slower; that of the peer, if none below it is found.

    Budgets are taken from the front of the lowest plan, which is thinned: a plan between two of its points is missed.
    """
    config = config_for(device, allowed, None)
    hardware = Hardware.detect(torch_device(device))
    planner = Planner(Job(build_model(shape), config, hardware), Inputs.from_sample(build_batch(shape)))
    front = planner.plan(choose_strategy(planner.job.eligible)).front
    fast_enough = sorted(point.peak_bytes for point in front if point.slowdown <= most_slowdown)
    for budget in [peak for peak in fast_enough if peak < most_bytes][:MAX_TRIES]:
        plan = planner.plan(choose_strategy(planner.job.eligible.under(config_for(device, allowed, budget))))
        if plan.fits and plan.predicted_slowdown <= most_slowdown:
            return budget
    return most_bytes
