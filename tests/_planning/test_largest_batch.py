"""fit: the largest size that fits is one that fits, and the next ones do not."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, DoesNotFitError, Hardware, OptimizationMode, zoo
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import choose_strategy
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.largest_batch import Fit, fit
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs, derive_inputs
from tests.profiles import hardware_of

HARDWARE = hardware_of()
MODES = (OptimizationMode.CONSERVATIVE, OptimizationMode.BALANCED)


def encoder(num_layers: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(num_layers)))


def batch_of(size: int) -> Inputs:
    return Inputs((torch.zeros(size, 32, 64, device="meta"),))


@functools.cache
def plain_peak(size: int, num_layers: int = 4) -> int:
    """An estimate says it as well, but plans for every mode."""
    planner = Planner(Job(encoder(num_layers), Config(), HARDWARE), batch_of(size))
    return CostModel(planner.profile, HARDWARE).evaluate(Choice()).peak_bytes


def fitting(config: Config) -> Fit:
    return fit(encoder(), batch_of, config=config, hardware=HARDWARE, modes=MODES)


@pytest.mark.slow
def test_the_largest_fits_and_a_tenth_more_does_not() -> None:
    config = Config(memory_budget_gb=plain_peak(20) / 1e9)
    found = fitting(config)
    assert found.plain.size == 20
    sizes = [found.plain.size, *(found.by_mode[mode].size for mode in MODES)]
    assert sizes == sorted(sizes)
    assert sizes[1] > 1.3 * sizes[0]
    for mode in MODES:
        entry, strategy = found.by_mode[mode], choose_strategy(config.replace(mode=mode))
        assert entry.plan is not None
        assert entry.plan.rehearsed
        assert entry.predicted_peak_bytes <= found.budget_bytes
        assert Planner(Job(encoder(), config, HARDWARE), batch_of(entry.size)).plan(strategy).fits
        more = entry.size + max(1, entry.size // 10)
        assert not Planner(Job(encoder(), config, HARDWARE), batch_of(more)).plan(strategy).fits


@pytest.mark.full
def test_a_window_that_holds_a_tiny_batch_does_not_mislead() -> None:
    """At a batch of 2 whatever is offloaded fits into the transfer window; drawn from there, no answer held."""
    model = zoo.build("bert-mini")
    modes = (OptimizationMode.BALANCED, OptimizationMode.AGGRESSIVE)

    def inputs_of(size: int) -> Inputs:
        inputs = derive_inputs(model, size, 128)
        assert inputs is not None
        return inputs

    hardware = Hardware.from_name("RTX 3070")
    found = fit(model, inputs_of, config=Config(memory_budget_gb=2.0), hardware=hardware, modes=modes)
    assert found.plain.size == 33
    assert found.by_mode[OptimizationMode.BALANCED].size > 33
    assert found.by_mode[OptimizationMode.AGGRESSIVE].size > 700  # it was 538


@pytest.mark.slow
def test_16_bits_are_considered_for_a_card_that_has_them_wherever_it_is() -> None:
    card = dataclasses.replace(HARDWARE, has_fast_16bit=True, supports_bf16=True, device_type="cuda")
    config = Config(
        memory_budget_gb=plain_peak(8) / 1e9, enable_offloading=False, enable_tiling=False, use_8bit_optimizer=False
    )
    mode = OptimizationMode.AGGRESSIVE
    sizes = [
        fit(encoder(), batch_of, config=wish, hardware=card, modes=(mode,)).by_mode[mode].size
        for wish in (config, config.replace(use_mixed_precision=False))
    ]
    assert sizes[0] > sizes[1]


def test_nothing_fits_where_parameters_do_not() -> None:
    found = fit(encoder(), batch_of, config=Config(memory_budget_gb=1e-4), hardware=HARDWARE, modes=MODES[:1])
    assert found.plain.size == found.by_mode[MODES[0]].size == 0
    assert found.by_mode[MODES[0]].plan is None


def test_what_has_an_end_stops_there() -> None:
    found = fit(encoder(), batch_of, config=Config(), hardware=HARDWARE, modes=MODES[:1], limit=6, vary="seq")
    assert found.plain.size == 6
    assert found.plain.is_limited


# ---- what is said when nothing fits


@pytest.mark.slow
def test_a_misfit_names_a_batch_that_fits() -> None:
    config = Config(memory_budget_gb=plain_peak(4) / 1e9, enable_offloading=False)
    with pytest.raises(DoesNotFitError, match="lower the batch size from 64 to") as caught:
        make_plan(Job(encoder(), config, HARDWARE), batch_of(64))
    named = int(str(caught.value).split("from 64 to ")[1].split()[0])
    assert make_plan(Job(encoder(), config, HARDWARE), batch_of(named)).fits
    with pytest.raises(DoesNotFitError):
        make_plan(Job(encoder(), config, HARDWARE), batch_of(named + max(2, named // 8)))


@pytest.mark.slow
def test_no_batch_is_named_where_none_fits() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(Job(encoder(), Config(memory_budget_gb=1e-4), HARDWARE), batch_of(8))
    assert "lower the" not in str(caught.value)
    assert "none of them fits" in str(caught.value)


@pytest.mark.slow
def test_the_estimate_gives_advice_when_no_mode_fits() -> None:
    budget_gb = 1.02 * memscale.estimate(
        encoder(), batch_of(2), config=Config(force_optimize=True), hardware=HARDWARE
    ).by_mode[OptimizationMode.AGGRESSIVE].predicted_peak_bytes / 1e9  # fmt: skip
    config = Config(memory_budget_gb=budget_gb)
    estimate = memscale.estimate(encoder(), batch_of(64), config=config, hardware=HARDWARE)
    assert estimate.recommended_mode is None
    assert estimate.advice.startswith("lower the batch size from 64 to ")


# ---- the rule table of the memory-budget guide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pressure", "mode"),
    [(0.9, "conservative"), (1.5, "balanced"), pytest.param(3.0, "aggressive", marks=pytest.mark.full)],
)
def test_the_rule_table_falls_out(pressure: float, mode: str) -> None:
    """The mode of the guide fits; what fits as it is is left alone."""
    model = encoder(12)
    config = Config(memory_budget_gb=plain_peak(64, 12) / pressure / 1e9)
    estimate = memscale.estimate(model, batch_of(64), config=config, hardware=HARDWARE)
    order = [each.value for each in OptimizationMode]
    assert estimate.recommended_mode is not None
    assert order.index(estimate.recommended_mode.value) <= order.index(mode)
    assert estimate.by_mode[OptimizationMode(mode)].fits
    if pressure < 1:
        assert all(not entry.plan.actions for entry in estimate.by_mode.values())
