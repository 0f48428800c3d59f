"""The laws of planning on profiles of real models, not of invented ones: budgets, modes, policies."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memscale
from memscale import Config, Hardware, OptimizationMode
from memscale._decide import decide
from memscale._pipeline import Study
from memscale._plan import MixedPrecision, Plan, QuantizeOptimizer
from memscale._profile import Profile
from memscale._profile.inputs import Inputs
from tests.models import case

NAMES = ("mlp", "gpt2")
CARD = Hardware.from_name("RTX 3070")
MODES = tuple(OptimizationMode)


@functools.cache
def profile_of(name: str) -> Profile:
    """With all that the modes allow looked into."""
    entry = case(name)
    study = Study(entry.build(), Inputs.from_sample(entry.batch(0)), Config(device="cpu"), "adamw", CARD)
    for mode in MODES:
        study.look_into_everything(Config(mode=mode).resolved_for(has_fast_16bit=True))
    return study.profile


def plan_at(name: str, mode: OptimizationMode, budget_bytes: int) -> Plan:
    config = Config(mode=mode, memory_budget_gb=budget_bytes / 1e9).resolved_for(has_fast_16bit=True)
    return decide(profile_of(name), CARD, config, raise_if_unfit=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_as_it_is_is_left_alone_in_every_mode(name: str) -> None:
    for mode in MODES:
        plan = plan_at(name, mode, 10**12)
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
