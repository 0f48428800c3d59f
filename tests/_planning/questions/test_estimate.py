"""estimate(): what a step would peak at, per mode, before anything is allocated."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Hardware, MemScaleError, OptimizationMode
from memscale._planning.questions.estimate import recommended_of
from tests._torch.test_overrides import snapshot
from tests.models import case, small

SAMPLE = torch.ones(64, 16)


def test_the_parts_add_up() -> None:
    estimate = memscale.estimate(small(), SAMPLE)
    assert sum(estimate.breakdown.values()) == estimate.baseline_peak_bytes
    assert all(value >= 0 for value in estimate.breakdown.values())
    assert {"params", "grads", "optimizer", "activations", "temporaries"} <= set(estimate.breakdown)
    parameters = sum(p.nbytes for p in small().parameters())
    assert estimate.breakdown["params"] == parameters
    assert estimate.breakdown["optimizer"] == 2 * parameters + 4 * len(list(small().parameters()))


def test_every_mode_is_there_and_the_mildest_of_equally_fast_ones_is_recommended() -> None:
    estimate = memscale.estimate(small(), SAMPLE)
    assert set(estimate.by_mode) == set(OptimizationMode)
    assert estimate.baseline_fits
    assert estimate.recommended_mode is OptimizationMode.CONSERVATIVE
    assert estimate.by_mode[OptimizationMode.CONSERVATIVE].predicted_peak_bytes == estimate.baseline_peak_bytes


@pytest.mark.parametrize(
    ("slowdowns", "expected"),
    [
        ((1.17, 1.05, 1.04), "balanced"),  # exact, and clearly faster than the milder one
        ((1.055, 1.05, 1.00), "conservative"),  # as fast, and milder; the fastest may round
        ((None, 1.30, 1.10), "balanced"),
        ((None, None, 1.10), "aggressive"),
        ((None, None, None), None),
    ],
)
def test_the_fastest_exact_mode_is_recommended(slowdowns: tuple[float | None, ...], expected: str | None) -> None:
    """None: the mode does not fit."""
    entry = memscale.estimate(small(), SAMPLE).by_mode[OptimizationMode.BALANCED]
    by_mode = {
        mode: dataclasses.replace(entry, predicted_slowdown=slowdown or 9.0, fits=slowdown is not None)
        for mode, slowdown in zip(OptimizationMode, slowdowns, strict=True)
    }
    assert recommended_of(by_mode) == (None if expected is None else OptimizationMode(expected))


def test_nothing_fits_a_tiny_budget() -> None:
    estimate = memscale.estimate(small(), SAMPLE, config=Config(memory_budget_gb=1e-6))
    assert not estimate.baseline_fits
    assert estimate.recommended_mode is None
    assert not any(result.fits for result in estimate.by_mode.values())


def test_the_estimate_is_the_plan_of_wrap() -> None:
    config = Config(force_optimize=True, enable_logging=False)
    estimate = memscale.estimate(small(), SAMPLE, config=config)
    model = memscale.wrap(small(), config, SAMPLE)
    plan = model._memscale_executor.plan
    assert estimate.baseline_peak_bytes == plan.baseline_peak_bytes
    assert estimate.by_mode[config.mode].predicted_peak_bytes == plan.predicted_peak_bytes


def test_no_trace_and_no_weights() -> None:
    model = small()
    before = snapshot(model)
    here = Hardware.detect("cpu")
    real_peak_bytes = memscale.estimate(model, SAMPLE, hardware=here).baseline_peak_bytes
    assert snapshot(model) == before
    with torch.device("meta"):
        meta = small()
    assert memscale.estimate(meta, SAMPLE, hardware=here).baseline_peak_bytes == real_peak_bytes


def test_a_card_that_is_elsewhere() -> None:
    model = case("gpt2").build()
    here = memscale.estimate(model, case("gpt2").batch(0))
    there = memscale.estimate(model, case("gpt2").batch(0), hardware=Hardware.from_name("RTX 3090"))
    assert there.device_name == "RTX 3090"
    assert there.baseline_peak_bytes != here.baseline_peak_bytes, "its kernels save other tensors"
    card = Hardware.from_name("RTX 3090")
    assert there.budget_bytes == int((24 * 2**30 - card.context_bytes) * 0.85)
    assert here.baseline_reserved_bytes is None, "a CPU reserves nothing"
    assert there.baseline_reserved_bytes is not None
    assert there.baseline_reserved_bytes > there.baseline_peak_bytes + 2 * card.workspace_bytes


@pytest.mark.parametrize("name", ["none", "sgd", "sgd_momentum", "adam", "adamw", "adagrad", "adafactor", "rmsprop"])
def test_optimizers_by_name(name: str) -> None:
    estimate = memscale.estimate(small(), SAMPLE, optimizer=name)
    parameters = sum(p.nbytes for p in small().parameters())
    slots = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1}
    if name in slots:
        assert round(estimate.breakdown["optimizer"] / parameters, 1) == slots[name]
    assert estimate.optimizer_name == name


def test_unknown_optimizers_are_named() -> None:
    with pytest.raises(ValueError, match=r"'lion'.*adamw"):
        memscale.estimate(small(), SAMPLE, optimizer="lion")


def test_inputs_must_come_from_somewhere() -> None:
    with pytest.raises(MemScaleError, match="sample_input"):
        memscale.estimate(small())
    assert memscale.estimate(case("bert").build()).baseline_peak_bytes > 0


def test_json() -> None:
    data = json.loads(memscale.estimate(small(), SAMPLE).to_json())
    assert set(data["by_mode"]) == {"conservative", "balanced", "aggressive"}


def test_a_model_without_blocks() -> None:
    model = nn.Linear(16, 16)
    estimate = memscale.estimate(model, SAMPLE, config=Config(force_optimize=True, enable_offloading=False))
    assert estimate.by_mode[OptimizationMode.CONSERVATIVE].plan.actions == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": None}, "takes an nn.Module, not NoneType"),
        ({"config": {}}, "config must be a memscale.Config or None, not dict"),
        ({"hardware": "RTX 3090"}, r"not str; a card by its name is Hardware.from_name"),
        ({"optimizer": 5}, "optimizer must be a name or a torch.optim.Optimizer, not int"),
    ],
)
def test_arguments_of_another_kind_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        memscale.estimate(**{"model": nn.Linear(2, 2), "sample_input": torch.zeros(1, 2), **arguments})


def test_lazy_models_are_refused() -> None:
    with pytest.raises(MemScaleError, match="lazy"):
        memscale.estimate(nn.Sequential(nn.LazyLinear(2)), torch.zeros(1, 2))
