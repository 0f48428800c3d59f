"""Studies of real models on fake tensors: what is tried, what is seen, and the plans that come of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from memscale import Config, Hardware, zoo
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import choose_strategy
from memscale._plan import MixedPrecision, StreamParameters
from memscale._planning import make_plan, planner
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import CHECKPOINT, CHECKPOINT_OFFLOAD, OFFLOAD, STREAM, STREAM_OFFLOAD, Profile, TraceKey, layers
from memscale._profile.inputs import Inputs, derive_inputs
from tests.models import WIDTH, Chain, TwoLinears
from tests.parity import plan_of

DEPTH, ROWS = 8, 1 << 16
BOUNDARY_BYTES = 4 * WIDTH * ROWS
CONFIG = Config(force_optimize=True, enable_logging=False, async_offload=False)


def study_of() -> Planner:
    model = Chain(*(TwoLinears() for _ in range(DEPTH)))
    inputs = Inputs(args=(torch.empty(ROWS, WIDTH, device="meta"),))
    return Planner(Job(model, CONFIG, Hardware.from_name("T4")), inputs)


def test_inputs_that_wait_elsewhere_are_freed_by_the_blocks_that_sent_them() -> None:
    """Their caller lets go of them after the block, between the layers."""
    planner = study_of()
    planner._try_simple(planner.job.eligible.under(CONFIG))
    model = CostModel(planner.profile, planner.hardware)
    for treatment in (CHECKPOINT, CHECKPOINT_OFFLOAD, STREAM, STREAM_OFFLOAD, OFFLOAD):
        choice = Choice(tuple((fqn, treatment) for fqn in model.blocks))
        traced = model.peak_of(planner.profile.variants[TraceKey(treatment)], choice)
        assert abs(model.evaluate(choice).peak_bytes - traced) < BOUNDARY_BYTES // 8, treatment
    last = list(model.blocks)[-2]
    for treatment, offloading in ((CHECKPOINT, CHECKPOINT_OFFLOAD), (STREAM, STREAM_OFFLOAD)):
        assert model.saved_bytes(last, offloading) - model.saved_bytes(last, treatment) == BOUNDARY_BYTES
        extra_ms = model.extra_ms(last, offloading) - model.extra_ms(last, treatment)
        assert extra_ms >= 2 * BOUNDARY_BYTES / planner.hardware.link_bytes_per_s * 1e3


class TwoTowers(Chain):
    """One of its towers is not called, like that for images in a step on text alone."""

    def __init__(self) -> None:
        super().__init__(*(TwoLinears() for _ in range(2)))
        self.images = nn.ModuleList(TwoLinears() for _ in range(2))


@pytest.mark.parametrize("card", ["T4", None], ids=str)
def test_blocks_that_the_step_does_not_come_to_are_planned_around(card: str | None) -> None:
    hardware = Hardware.detect("cpu") if card is None else Hardware.from_name(card)
    inputs = Inputs(args=(torch.empty(1 << 12, WIDTH, device="meta"),))
    plan = make_plan(Job(TwoTowers(), CONFIG, hardware), inputs)
    assert plan.fits
    assert plan.least_slowdown is not None, "the bound goes through all blocks"


def test_a_card_without_bf16_is_planned_for_with_overlapped_transfers() -> None:
    """The second rehearsed step looks at the gradients of the first, which have no values there."""
    model = Chain(*(TwoLinears() for _ in range(3)))
    config = CONFIG.replace(mode="aggressive", async_offload=True, use_8bit_optimizer=False)
    inputs = Inputs(args=(torch.empty(1 << 12, WIDTH, device="meta"),))
    plan = make_plan(Job(model, config, Hardware.from_name("T4")), inputs)
    kinds = {type(action) for action in plan.actions}
    assert {MixedPrecision, StreamParameters} <= kinds


def test_blocks_are_found_once_and_a_cost_model_is_built_once_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the longest way: the mode allows everything, and nothing fits before all of it was looked into."""
    searched: list[nn.Module] = []
    profiles: list[Profile] = []
    walk, build = layers._walk_blocks, CostModel.__init__

    def counted_walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        searched.extend([module] if not prefix else [])
        return walk(prefix, module)

    def counted_build(self: CostModel, profile: Profile, *args: Any, **options: Any) -> None:
        profiles.append(profile)
        build(self, profile, *args, **options)

    monkeypatch.setattr(layers, "_walk_blocks", counted_walk)
    monkeypatch.setattr(CostModel, "__init__", counted_build)
    model = Chain(*(TwoLinears() for _ in range(12)))  # deep enough to be tried at a fraction of its depth
    config = CONFIG.replace(mode="aggressive", use_mixed_precision=False)
    inputs = Inputs(args=(torch.empty(1 << 12, WIDTH, device="meta"),))
    assert make_plan(Job(model, config, Hardware.from_name("T4")), inputs).actions
    assert len(searched) == 1
    assert len({id(profile) for profile in profiles}) == len(profiles) > 1


def test_the_lowest_plan_lets_inputs_of_recomputed_blocks_wait_elsewhere() -> None:
    planner = study_of()
    plan = planner.plan(choose_strategy(planner.job.eligible.under(CONFIG)))
    offloaded = [action for action in plan.actions if type(action).__name__ == "OffloadActivations"]
    assert len(offloaded) >= DEPTH - 3
    assert plan.predicted_peak_bytes < (DEPTH + 4) * BOUNDARY_BYTES


def test_16_bits_that_are_left_to_the_mode_are_those_of_the_card_and_not_of_this_machine() -> None:
    model, inputs = Chain(TwoLinears(), TwoLinears()), Inputs(args=(torch.empty(1 << 12, WIDTH, device="meta"),))
    config = Config(mode="aggressive", enable_logging=False, use_8bit_optimizer=False)
    card = Hardware.from_name("RTX 3090")
    for is_fast in (True, False):
        planner = Planner(
            Job(model, config, dataclasses.replace(card, has_fast_16bit=is_fast, supports_bf16=True)), inputs
        )
        strategy = choose_strategy(planner.job.eligible)
        front = planner.peak_against_time(strategy, planner.plan(strategy)).front
        assert any(key.precision == "bfloat16" for key in planner.profile.variants) is is_fast
        assert all(point.is_exact for point in front) is not is_fast


def small_gpt2() -> nn.Module:
    shape = GPT2Config(n_layer=14, n_embd=512, n_head=8, vocab_size=8000, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        return GPT2LMHeadModel(shape).train()


@pytest.mark.parametrize(
    ("build", "length", "budget_gb", "most"),
    [
        pytest.param(small_gpt2, 256, 0.8, 1.40, id="small"),
        pytest.param(lambda: zoo.build("gpt2-large"), 512, 4.68, 1.76, id="large", marks=pytest.mark.full),
    ],
)
def test_a_plan_that_leaves_room_is_followed_by_faster_ones(
    build: Callable[[], nn.Module], length: int, budget_gb: float, most: float
) -> None:
    """The plan that is first to fit leaves 4 or 5 % of the budget: others, which did not fit, held more above what is
    live than it does. With it as the last one they were predicted at 1.43 and 1.80."""
    ids = torch.zeros(2, length, dtype=torch.long, device="meta")
    job = Job(build(), Config(memory_budget_gb=budget_gb), Hardware.from_name("RTX 3090"))
    plan = make_plan(job, Inputs((), {"input_ids": ids, "labels": ids}))
    assert plan.fits
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_reserved_bytes <= budget_gb * 1e9
    assert plan.predicted_slowdown < most


@pytest.mark.full
def test_tiles_inside_blocks_are_tried_only_where_blocks_hold_the_peak() -> None:
    config = CONFIG.replace(mode="aggressive", use_mixed_precision=False, use_8bit_optimizer=False)
    tried = {}
    for name, vocabulary in (("blocks", 64), ("head", 1 << 20)):
        with torch.device("meta"):
            model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=vocabulary)).train()
        planner = Planner(Job(model, config, Hardware.from_name("T4")), derive_inputs(model, 4, 512))
        planner.plan(choose_strategy(planner.job.eligible))
        assert planner.tiles.inside
        tried[name] = any(key.num_tiles for key in planner.profile.variants)
    assert tried == {"blocks": True, "head": False}


def test_another_card_gets_the_plan_that_it_would_get_alone() -> None:
    """Kernels of cards with other multiprocessors take other bytes inside; single techniques are tried once for all."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4096, use_cache=False))
    inputs = derive_inputs(model, 8, 256)
    assert inputs is not None
    first = Planner(Job(model, Config(memory_budget_gb=0.25), Hardware.from_name("RTX A6000")), inputs)
    first.plan(choose_strategy(first.job.eligible))
    for card in ("RTX 3070", "RTX 4080"):
        shared = first.on(Hardware.from_name(card))
        alone = Planner(Job(model, first.job.config, shared.hardware), inputs)
        strategy, num_tried = choose_strategy(shared.job.eligible), len(first.stage.tried)
        assert shared.plan(strategy) == alone.plan(strategy)
        assert shared.plan(strategy).actions
        assert len(shared.stage.tried) == num_tried


def test_of_plans_that_do_not_fit_the_one_that_needs_least_is_named() -> None:
    """The budget bounds what is reserved: a plan with fewer live bytes may need a larger budget than another."""
    wide = plan_of((), fits=False, predicted_peak_bytes=40, predicted_reserved_bytes=58, budget_bytes=50)
    narrow = plan_of((), fits=False, predicted_peak_bytes=45, predicted_reserved_bytes=51, budget_bytes=50)
    fitting = plan_of((), predicted_peak_bytes=49, predicted_reserved_bytes=50, budget_bytes=50)
    for order in (planner._preference, planner._rank):
        assert min(wide, narrow, key=order) is narrow
        assert min(wide, narrow, fitting, key=order) is fitting
