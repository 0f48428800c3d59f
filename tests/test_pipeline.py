"""The stages together, on real models and fake tensors."""

from __future__ import annotations

import torch

from memscale import Config, Hardware
from memscale._choice import Choice
from memscale._peak import CostModel
from memscale._pipeline import Study
from memscale._policy import choose_strategy
from memscale._profile.inputs import Inputs
from tests.models import WIDTH, Chain, TwoLinears

DEPTH, ROWS = 8, 1 << 16
BOUNDARY_BYTES = 4 * WIDTH * ROWS
CONFIG = Config(force_optimize=True, enable_logging=False)


def study_of() -> Study:
    model = Chain(*(TwoLinears() for _ in range(DEPTH)))
    inputs = Inputs(args=(torch.empty(ROWS, WIDTH, device="meta"),))
    return Study(model, inputs, CONFIG, "adamw", Hardware.from_name("T4"))


def test_inputs_that_wait_elsewhere_are_freed_by_the_blocks_that_sent_them() -> None:
    """Their caller lets go of them after the block, between the layers."""
    study = study_of()
    study._try_simple(CONFIG)
    model = CostModel(study.profile, study.hardware)
    for treatment in ("checkpoint", "checkpoint+offload", "stream", "stream+offload", "offload"):
        choice = Choice(tuple((fqn, treatment) for fqn in model.blocks))
        traced = model.peak_of(study.profile.variants[treatment], choice)
        assert abs(model.evaluate(choice).peak_bytes - traced) < BOUNDARY_BYTES // 8, treatment
    last = list(model.blocks)[-2]
    for treatment in ("checkpoint", "stream"):
        assert model.saved_bytes(last, f"{treatment}+offload") - model.saved_bytes(last, treatment) == BOUNDARY_BYTES
        extra_ms = model.extra_ms(last, f"{treatment}+offload") - model.extra_ms(last, treatment)
        assert extra_ms >= 2 * BOUNDARY_BYTES / study.hardware.link_bytes_per_s * 1e3


def test_the_lowest_plan_lets_inputs_of_recomputed_blocks_wait_elsewhere() -> None:
    plan = study_of().plan(choose_strategy(CONFIG))
    offloaded = [action for action in plan.actions if type(action).__name__ == "OffloadActivations"]
    assert len(offloaded) >= DEPTH - 3
    assert plan.predicted_peak_bytes < (DEPTH + 4) * BOUNDARY_BYTES
