"""The laws of planning on profiles of real models, not of invented ones: budgets, modes, policies."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memscale
from memscale import Config, Hardware, OptimizationMode
from memscale._decide import decide, decide_on
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.policy import choose_strategy
from memscale._plan import MixedPrecision, OffloadActivations, Plan, QuantizeOptimizer
from memscale._planning import Planner
from memscale._planning.job import Job
from memscale._profile import CHECKPOINT, KEEP, OFFLOAD, SELECTIVE, Profile, TraceKey
from memscale._profile.inputs import Inputs
from tests._profile.test_shallow import Deep
from tests.lanes import in_turns, some
from tests.models import case

NAMES = ("mlp", "gpt2")
CARD = Hardware.from_name("RTX 3070")
MODES = tuple(OptimizationMode)


@functools.cache
def profile_of(name: str, mode: OptimizationMode) -> Profile:
    """With all that the mode allows looked into."""
    entry = case(name)
    planner = Planner(Job(entry.build(), Config(device="cpu"), CARD), Inputs.from_sample(entry.batch(0)))
    planner.look_into_everything(planner.job.eligible.under(Config(mode=mode)))
    return planner.profile


@functools.cache
def model_of(name: str, mode: OptimizationMode) -> CostModel:
    """One for all budgets: what can be chosen is searched once."""
    return CostModel(profile_of(name, mode), CARD, overlaps=False)


def plan_at(name: str, mode: OptimizationMode, budget_bytes: int) -> Plan:
    model = model_of(name, mode)
    return decide_on(model, resolve(Config(mode=mode, memory_budget_gb=budget_bytes / 1e9), model.hardware))


@pytest.mark.parametrize(("name", "mode"), in_turns(NAMES, MODES))
@settings(derandomize=True, max_examples=25, deadline=None)
@given(shares=st.tuples(st.floats(0.05, 1.1), st.floats(0.05, 1.1)))
def test_a_larger_budget_is_never_slower_and_none_is_exceeded(
    name: str, mode: OptimizationMode, shares: tuple[float, float]
) -> None:
    baseline = plan_at(name, mode, 10**12).baseline_peak_bytes
    small, large = (plan_at(name, mode, int(share * baseline)) for share in sorted(shares))
    for plan in (small, large):
        assert plan.fits == (plan.predicted_peak_bytes <= plan.budget_bytes)
    if small.fits:
        assert large.fits
        lossy = any(isinstance(action, MixedPrecision | QuantizeOptimizer) for action in large.actions)
        same_kind = lossy == any(isinstance(a, MixedPrecision | QuantizeOptimizer) for a in small.actions)
        assert not lossy or same_kind, "exact before lossy: a larger budget needs no more of it"
        if same_kind:
            assert large.predicted_slowdown <= small.predicted_slowdown + 1e-9
    assert Plan.from_json(small.to_json()) == small


# ---- encoders and decoders, shared blocks, blocks that are called twice

SMALL = {"d_model": 32, "vocab_size": 64, "decoder_start_token_id": 0, "pad_token_id": 0}
LAYERS = {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
IDS = torch.ones(2, 32, dtype=torch.long)
LABELS = torch.ones(2, 16, dtype=torch.long)
TEXT = {"input_ids": IDS, "labels": LABELS}


class Again(nn.Module):
    """Blocks that are called twice, one after the other and then all of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            hidden = hidden + block(hidden)
        return hidden


def t5(num_layers: int) -> nn.Module:
    numbers = {"d_kv": 8, "d_ff": 64, "num_heads": 2, "num_layers": num_layers, "max_length": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, **numbers))


def bart() -> nn.Module:
    numbers = {**SMALL, **LAYERS, **HEADS, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**numbers))


def whisper() -> nn.Module:
    numbers = {"max_source_positions": 16, "num_mel_bins": 8, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**SMALL, **LAYERS, **HEADS, **numbers)
    )


def albert() -> nn.Module:
    numbers = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(vocab_size=64, intermediate_size=64, **numbers))


SHAPES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "t5": (lambda: t5(2), TEXT),
    "bart": (bart, TEXT),
    "whisper": (whisper, {"input_features": torch.zeros(2, 8, 32), "labels": LABELS}),
    "albert": (albert, {"input_ids": IDS, "labels": IDS}),
    "again": (Again, torch.randn(4, 16)),
}
HERE = dataclasses.replace(CARD, device_type="cpu")
CARD_OF = {name: HERE if name in ("bart", "whisper") else CARD for name in SHAPES}
"""These two look at values of tensors, which not every device's fake ones have: they are profiled where tests run."""


@functools.cache
def shaped_profile(name: str) -> Profile:
    build, batch = SHAPES[name]
    config = Config(device="cpu")
    planner = Planner(Job(build(), config, CARD_OF[name]), Inputs.from_sample(batch))
    planner.look_into_everything(planner.job.eligible.under(config))
    return planner.profile


def all_peaks(model: CostModel, run: RunOptions) -> list[int]:
    """Every treatment for every block."""
    return [
        model.evaluate(
            Choice(tuple((fqn, t) for fqn, t in zip(model.blocks, way, strict=True) if t != KEEP), run)
        ).peak_bytes
        for way in itertools.product((KEEP, CHECKPOINT, SELECTIVE), repeat=len(model.blocks))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", some(list(SHAPES), "t5", "albert", "again"))
def test_the_lowest_peak_is_found_and_does_not_depend_on_times(name: str) -> None:
    profile, plain = shaped_profile(name), Config(force_optimize=True, enable_offloading=False)
    card = CARD_OF[name]
    faster = dataclasses.replace(card, memory_bytes_per_s=1e13, link_bytes_per_s=1e8, launch_s=1e-4)
    lowest = min(all_peaks(CostModel(profile, card), RunOptions()))
    for hardware in (card, faster):
        model = CostModel(profile, hardware)
        assert decide_on(model, resolve(plain, model.hardware)).predicted_peak_bytes == lowest
        within = Config(memory_budget_gb=lowest / 1e9, enable_offloading=False)
        fitting = decide_on(model, resolve(within, model.hardware))
        assert fitting.fits
        assert fitting.predicted_peak_bytes <= lowest
        assert not decide_on(model, resolve(within.replace(memory_budget_gb=(lowest - 1) / 1e9), model.hardware)).fits
    both = [
        decide(profile, resolve(Config(force_optimize=True), hardware)).predicted_peak_bytes
        for hardware in (card, faster)
    ]
    assert both[0] == both[1] <= lowest


@pytest.mark.full
def test_a_deep_encoder_and_decoder_fit_what_they_can() -> None:
    """Blocks of the one are treated alike and mostly left out of a rehearsal; those of the other are not."""
    config = Config(mode="conservative", force_optimize=True)
    planner = Planner(Job(t5(10), config, CARD), Inputs.from_sample(TEXT))
    lowest = planner.plan(choose_strategy(planner.job.eligible.under(config)))
    modelled = min(point.peak_bytes for point in lowest.front)
    assert lowest.predicted_peak_bytes == pytest.approx(modelled, rel=0.02)
    within = Config(mode="conservative", memory_budget_gb=1.02 * lowest.predicted_peak_bytes / 1e9)
    assert planner.plan(choose_strategy(planner.job.eligible.under(within))).fits


@pytest.mark.parametrize(("name", "known"), [("mlp", OptimizationMode.AGGRESSIVE), ("gpt2", OptimizationMode.BALANCED)])
def test_what_fits_as_it_is_is_left_alone_in_every_mode(name: str, known: OptimizationMode) -> None:
    for mode in MODES:
        model = model_of(name, known)
        plan = decide_on(model, resolve(Config(mode=mode, memory_budget_gb=1000.0), model.hardware))
        assert plan.actions == ()
        assert plan.predicted_slowdown == 1.0


@pytest.mark.parametrize(("policy", "source"), [(False, "user_config"), ("rule", "rule"), (True, "rule_fallback")])
def test_policies_name_themselves_and_leave_the_config_alone(policy: bool | str, source: str) -> None:
    entry = case("mlp")
    config = Config(auto_policy=policy, force_optimize=True, enable_logging=False)  # type: ignore[arg-type]
    before = repr(config)
    with memscale.optimize(entry.build(), config=config, sample_input=entry.batch(0)) as executor:
        assert executor.plan is not None
        assert executor.plan.decision_source == source
    assert repr(config) == before


def test_all_that_is_sent_waits_also_what_is_still_on_its_way() -> None:
    """With overlap the first block's activations are on the device until the window is full. The host needs room for
    them already: a plan that let optimizer state have it ran out of host memory in its second step."""
    with torch.device("meta"):
        model, ids = Deep(4, width=256), torch.zeros(8, 128, dtype=torch.long)
    planner = Planner(Job(model, Config(async_offload=True), CARD), Inputs.from_sample(ids))
    blocks = list(planner.rehearsal.blocks)
    planner.try_variants({TraceKey(OFFLOAD): tuple(map(OffloadActivations, blocks))}, planner.job.eligible)
    forward = [s for s in planner.profile.variants[TraceKey(OFFLOAD)].segments if s.phase == "forward"]
    sent_bytes = sum(segment.sent_bytes for segment in forward if segment.module_fqn == blocks[0])
    costs = planner.cost_model()
    assert costs.saved_bytes(blocks[0], OFFLOAD) < sent_bytes, "the window holds some of it"
    assert costs.evaluate(Choice(((blocks[0], OFFLOAD),))).movable_bytes == sent_bytes
