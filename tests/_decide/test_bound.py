"""The bound: worked out by hand, and below every plan that the search finds, at every budget."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale import Config
from memscale._decide import decide, find_candidates
from memscale._decide.bound import least_blocking_ms, least_ms
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._profile import CHECKPOINT, KEEP, OFFLOAD, STREAM, BackwardStep, GuestCost, OptimizerCost, StateShare
from tests._decide.test_search import models, seeds, shaped, shapes
from tests.profiles import MB, Block, full_profile, hardware_of, profile_of

pytestmark = pytest.mark.unit
ONE = {"b": Block(keeps=100, keeps_checkpointed=10, temporaries=20, gradients=5, time=100)}
COST = OptimizerCost("adamw", 50 * MB, 10 * MB, 100 * MB, offloaded_step_bytes=10 * MB)


def test_where_everything_fits_it_is_what_computes() -> None:
    """402 ms forward and backward, 100 MB of the optimizer at a byte a nanosecond."""
    model = CostModel(profile_of(ONE, variants=(CHECKPOINT,), optimizer=COST), hardware_of())
    assert least_ms(model, 10_000 * MB, host_step=True) == pytest.approx(402 + 100) == model.evaluate(Choice()).step_ms


def test_what_does_not_fit_crosses_the_link() -> None:
    """25 MB of parameters, 1 of inputs, 50 of state and 101 of activations, of which 90 are computed again.

    Of the block's 5 + 10 MB of parameters and state, 5 come and 5 of gradients leave; all other state comes and leaves.
    """
    profile = profile_of(ONE, variants=(CHECKPOINT, STREAM), optimizer=COST)
    model = CostModel(profile, hardware_of(link_bytes_per_s=1e6))
    excess = 25 + 1 + 50 + 101 - 30
    crossing = 5 + (excess - 90 - 15)
    assert least_ms(model, 30 * MB, host_step=True) == pytest.approx(crossing * 1e3)
    by_turns = dataclasses.replace(model.hardware, link_directions=1)
    assert least_ms(CostModel(model.profile, by_turns), 30 * MB, host_step=True) == pytest.approx(2 * crossing * 1e3)


def test_what_does_not_fit_the_optimizers_step_crosses_the_link() -> None:
    """6 MB are left by backward beside 25 of parameters, 1 of inputs and 50 of state; no forward takes as much.

    Of the block's 5 + 5 + 10 MB of parameters, gradients and state, 5 come and 5 leave.
    """
    light = {"b": dataclasses.replace(ONE["b"], keeps=0, keeps_checkpointed=0)}
    profile = profile_of(light, variants=(CHECKPOINT,), optimizer=dataclasses.replace(COST, offloaded_step_bytes=None))
    model = CostModel(profile, hardware_of(link_bytes_per_s=1e6))
    excess = 25 + 1 + 6 + 50 - 20
    assert least_ms(model, 20 * MB, host_step=True) == pytest.approx(excess / 4 * 1e3)


def test_what_blocks_adds_up_on_the_slower_link() -> None:
    """502 ms of compute; 147 MB do not fit, of which 90 are computed again for 100 ms. Of the block's 5 + 10 MB of
    parameters and state 5 come and 5 leave, and all other state comes and leaves."""
    profile = profile_of(ONE, variants=(CHECKPOINT, STREAM), optimizer=COST)
    model = CostModel(profile, hardware_of(link_bytes_per_s=1e8, blocking_link_bytes_per_s=1e6))
    excess = 25 + 1 + 50 + 101 - 30
    crossing = 2 * (5 + (excess - 90 - 15))
    bound = least_blocking_ms(model, 30 * MB, host_step=True)
    assert bound == pytest.approx(402 + 100 + 100 + crossing * 1e3)
    assert bound > least_ms(model, 30 * MB, host_step=True)


@pytest.mark.parametrize("overlaps", [False, True])
@given(found=models(max_size=6), link=st.sampled_from([1e7, 1e8, 1e10]), host=st.sampled_from([None, 1e8, 1e10]))
def test_no_plan_of_the_search_beats_it(
    overlaps: bool, found: dict[str, Block], link: float, host: float | None
) -> None:
    profile = full_profile(found)
    size = profile.optimizer.state_bytes
    share = StateShare(0.5, size // 2, 30 * MB, (True, False))
    optimizer = dataclasses.replace(
        profile.optimizer, bucket_bytes=(size // 2, size // 2), shares=(share,), bucketed_step_bytes=MB
    )
    hardware = hardware_of(link_bytes_per_s=link, host_bytes_per_s=host)
    check(CostModel(dataclasses.replace(profile, optimizer=optimizer), hardware, overlaps=overlaps))


@given(seeds, shapes)
def test_nor_in_any_shape(seed: int, shape: str) -> None:
    check(shaped(seed, shape, most_blocks=5))


def check(model: CostModel, **wishes: bool) -> None:
    eligible = resolve(Config(memory_budget_gb=1.0, **wishes), model.hardware)
    candidates = find_candidates(model, model.evaluate(Choice()), eligible)
    for candidate in candidates:
        streams = candidate.choice.run.streams_rest or any(how.streams for _, how in candidate.choice.blocks)
        on_host = streams and not candidate.choice.run.steps_on_device
        for host_step in {True, on_host}:
            bound = least_ms(model, candidate.outcome.peak_bytes, host_step=host_step)
            assert candidate.outcome.step_ms >= bound * (1 - 1e-9), (candidate, host_step)
            if not model.pace.overlaps:
                bound = least_blocking_ms(model, candidate.outcome.peak_bytes, host_step=host_step)
                assert candidate.outcome.step_ms >= bound * (1 - 1e-9), (candidate, host_step)


@given(found=models(max_size=4), link=st.sampled_from([1e7, 1e8, 1e10]), overlaps=st.booleans())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_nor_one_that_steps_everything_on_the_device(found: dict[str, Block], link: float, overlaps: bool) -> None:
    profile = full_profile(found)
    assert profile.rest_optimizer is not None
    state_bytes = profile.optimizer.state_bytes - profile.rest_optimizer.state_bytes
    trained = sum(block.gradients for block in found.values()) * MB
    work = profile.optimizer.moved_bytes
    visiting = GuestCost(trained // 4, 2 * trained + state_bytes, trained + state_bytes, 8, 8, work, 4, MB)
    check(
        CostModel(dataclasses.replace(profile, guests=visiting), hardware_of(link_bytes_per_s=link), overlaps=overlaps)
    )


def test_what_the_device_steps_comes_behind_all_that_computes() -> None:
    """6 MB of gradients, as many of parameters and 50 of state, of which 20 fit when backward ends; 36 ms come behind
    402 ms of compute, in which the host's step of what is streamed could do with less."""
    profile = profile_of(ONE, variants=(CHECKPOINT, STREAM), optimizer=COST)
    model = CostModel(profile, hardware_of(link_bytes_per_s=1e8))
    trained = min(profile.trainable_bytes, profile.plain.end_bytes) // MB
    assert least_ms(model, 20 * MB, host_step=False) == pytest.approx(402 + 10 * (2 * trained + 50 - 20))
    assert least_ms(model, 20 * MB, host_step=True) < least_ms(model, 20 * MB, host_step=False)
    in_backward = dataclasses.replace(profile.optimizer, in_backward=BackwardStep(MB, 10, 2))
    released = CostModel(dataclasses.replace(profile, optimizer=in_backward), model.hardware)
    assert least_ms(released, 20 * MB, host_step=False) == least_ms(released, 20 * MB, host_step=True)


def test_a_smaller_budget_has_no_lower_bound() -> None:
    model = CostModel(full_profile(4), hardware_of(link_bytes_per_s=1e7))
    bounds = [least_ms(model, budget * MB, host_step=True) for budget in range(0, 600, 20)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_a_plan_says_how_far_from_it_it_is() -> None:
    plan = decide(full_profile(4), resolve(Config(memory_budget_gb=0.4, enable_logging=False), hardware_of()))
    assert plan.actions
    assert plan.least_slowdown is not None
    assert 1 <= plan.least_slowdown <= plan.predicted_slowdown
    assert f"{plan.predicted_slowdown / plan.least_slowdown:.2f}x of the least time" in plan.explain()
    plain = decide(full_profile(4), resolve(Config(enable_logging=False), hardware_of()))
    assert not plain.actions
    assert "least time" not in plain.explain()


def test_activations_that_do_not_fit_are_computed_again_or_cross_the_link() -> None:
    """31 MB of parameters and inputs, 50 of state and 101 of activations; checkpointed the block keeps 10.

    Of 100 ms of forward, computed again, 90 MB are freed; parameters and state are dear to move over this link.
    """
    profile = profile_of(ONE, variants=(CHECKPOINT,), optimizer=dataclasses.replace(COST, offloaded_step_bytes=None))
    model = CostModel(profile, hardware_of(link_bytes_per_s=1e3))
    fits = 26 + 50 + 101
    assert least_ms(model, fits * MB, host_step=True) == pytest.approx(402 + 100)
    assert least_ms(model, (fits - 45) * MB, host_step=True) == pytest.approx(402 + 100 + 50)
    checkpointed = Choice((("b", CHECKPOINT),))
    assert least_ms(model, (fits - 90) * MB, host_step=True) == pytest.approx(model.evaluate(checkpointed).step_ms)


def test_over_a_fast_link_they_cross_it() -> None:
    """Sent and fetched beside what computes: of 98 MB, at 1 MB in 10 ms, one direction is busy for 980 ms."""
    model = CostModel(profile_of(ONE, variants=(OFFLOAD,)), hardware_of(link_bytes_per_s=1e8), overlaps=True)
    offloaded = model.evaluate(Choice((("b", OFFLOAD),)))
    bound = least_ms(model, 26 * MB + model.profile.optimizer.state_bytes + 3 * MB, host_step=True)
    assert 980 <= bound + 1e-9 <= offloaded.step_ms


@settings(max_examples=20, deadline=None, derandomize=True)
@given(found=models(max_size=3), link=st.sampled_from([1e7, 1e8, 1e10]), in_backward=st.booleans())
def test_nothing_that_can_be_chosen_beats_it(found: dict[str, Block], link: float, in_backward: bool) -> None:
    """Every treatment of every block with every run, not only what a search keeps."""
    profile = full_profile(found)
    if in_backward:
        optimizer = dataclasses.replace(profile.optimizer, in_backward=BackwardStep(MB, 10, 2))
        profile = dataclasses.replace(profile, optimizer=optimizer)
    for overlaps in (False, True):
        model = CostModel(profile, hardware_of(link_bytes_per_s=link), overlaps=overlaps)
        runs = [
            RunOptions(steps_in_backward=in_backward),
            *([] if in_backward else [RunOptions(offloads_optimizer=1.0)]),
        ]
        treatments = [t for t in (KEEP, *model.treatments) if not (in_backward and t.streams)]
        for run, picked in itertools.product(runs, itertools.product(treatments, repeat=len(found))):
            chosen = tuple((fqn, how) for fqn, how in zip(found, picked, strict=True) if how != KEEP)
            outcome = model.evaluate(Choice(chosen, run))
            assert outcome.step_ms >= least_ms(model, outcome.peak_bytes, host_step=True) * (1 - 1e-9), (chosen, run)
