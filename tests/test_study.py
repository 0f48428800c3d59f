"""Studies of real models on fake tensors: what is tried, what is seen, and the plans that come of it."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memscale import Config, Hardware
from memscale._choice import Choice
from memscale._peak import CostModel
from memscale._policy import choose_strategy
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._study import Study
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


@pytest.mark.slow
def test_tiles_inside_blocks_are_tried_only_where_blocks_hold_the_peak() -> None:
    config = CONFIG.replace(mode="aggressive", use_mixed_precision=False, use_8bit_optimizer=False)
    tried = {}
    for name, vocabulary in (("blocks", 64), ("head", 1 << 20)):
        with torch.device("meta"):
            model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=vocabulary)).train()
        study = Study(model, derive_inputs(model, 4, 512), config, "adamw", Hardware.from_name("T4"))
        study.plan(choose_strategy(config))
        assert study.tiles.inside
        tried[name] = any(variant.startswith("inside") for variant in study.profile.variants)
    assert tried == {"blocks": True, "head": False}
