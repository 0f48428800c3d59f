"""Gradients that wait on the host until the step, by the models of peak and time, and in the search."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale import Config
from memscale._decide import decide_on, find_candidates
from memscale._decide.choice import Choice, RunOptions, actions_of, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.search import search
from memscale._plan import OPTIMIZER_BUCKET_BYTES, Plan
from memscale._profile import CHECKPOINT, KEEP, STREAM, GuestCost, Profile, StepTrace, TraceKey
from memscale.techniques.offload.optimizer.waiting_gradients import OffloadGradients
from tests._decide.test_bound import check
from tests._decide.test_search import models
from tests.profiles import MB, Block, full_profile, hardware_of

pytestmark = pytest.mark.unit
NUM_BLOCKS = 4
BLOCK = Block(gradients=50, parameters=50, keeps=10, keeps_checkpointed=2, keeps_selective=5)
AWAY = RunOptions(offloads_optimizer=1.0)
WAITING = dataclasses.replace(AWAY, waiting_gradients=1.0)
CARD = {"link_bytes_per_s": 1e9, "link_directions": 2, "has_caching_allocator": True}
ON = Config(memory_budget_gb=1.0, enable_gradient_offload=True)


def with_waiting(profile: Profile, *shares: float) -> Profile:
    """Also traced with gradients that leave at the end of each block's backward."""
    sizes = {layer.module_fqn: layer.trainable_bytes for layer in profile.layers if layer.is_block}

    def waits(trace: StepTrace, share: float) -> StepTrace:
        left = {fqn: round(share * num_bytes) for fqn, num_bytes in sizes.items()}
        segments = [
            dataclasses.replace(s, net_bytes=s.net_bytes - left[s.module_fqn], sent_bytes=left[s.module_fqn])
            if s.phase == "backward" and s.module_fqn in left
            else s
            for s in trace.segments
        ]
        return StepTrace(tuple(segments))

    found = {
        TraceKey(key.treatment, waits=share): trace if key.treatment.streams else waits(trace, share)
        for key, trace in {TraceKey(): profile.plain, **profile.variants}.items()
        for share in shares
    }
    return dataclasses.replace(profile, variants={**profile.variants, **found})


def model_of(blocks: dict[str, Block] | None = None, *, overlaps: bool = True, **hardware: object) -> CostModel:
    blocks = blocks or {f"blocks.{index}": BLOCK for index in range(NUM_BLOCKS)}
    profile = with_waiting(full_profile(blocks), 0.5, 1.0)
    trained = sum(block.parameters for block in blocks.values()) * MB
    guests = GuestCost(trained // 4, 4 * trained, 3 * trained, 8, 8, 7 * trained, 4, trained // 4)
    profile = dataclasses.replace(profile, guests=guests)
    return CostModel(profile, hardware_of(**{**CARD, **hardware}), overlaps=overlaps)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_waits_is_not_there_when_backward_is_over(share: float) -> None:
    model = model_of()
    run = dataclasses.replace(AWAY, waiting_gradients=share)
    waiting_bytes = round(share * NUM_BLOCKS * 50 * MB)
    assert model.optimizer.waiting_gradient_bytes(run, 0) == waiting_bytes
    here, away = model.walk(Choice(run=AWAY)), model.walk(Choice(run=run))
    assert here.live_bytes - away.live_bytes == waiting_bytes
    in_step = 2 * min(waiting_bytes, OPTIMIZER_BUCKET_BYTES)
    before, after = (model.bytes_in_step(Choice(run=one)) for one in (AWAY, run))
    assert before - after == waiting_bytes - in_step, "those of one turn are there, and of the next"


def test_what_waits_comes_in_the_step_and_takes_room_on_the_host() -> None:
    model = model_of()
    before, after = model.optimizer.costs_of(AWAY, 0), model.optimizer.costs_of(WAITING, 0)
    assert after.ms - before.ms == pytest.approx(NUM_BLOCKS * 50 + OPTIMIZER_BUCKET_BYTES / 1e6 - 30, abs=20)
    assert after.anywhere_bytes - before.anywhere_bytes >= NUM_BLOCKS * 50 * MB
    assert after.at_home_bytes == before.at_home_bytes
    half = model.optimizer.costs_of(WAITING, NUM_BLOCKS * 25 * MB)
    none = model.optimizer.costs_of(AWAY, NUM_BLOCKS * 25 * MB)
    assert half.anywhere_bytes - none.anywhere_bytes < NUM_BLOCKS * 26 * MB, "those of streamed blocks are at home"


def test_what_leaves_takes_the_link_in_backward() -> None:
    """50 MB leave in 50 ms: a backward of 200 ms hides them, and one of 20 ms does not."""
    for time, longer_ms in ((100, 0.0), (10, 30.0)):
        model = model_of({f"blocks.{index}": dataclasses.replace(BLOCK, time=time) for index in range(NUM_BLOCKS)})
        here, away = (model.walk(Choice(run=run)).total_ms for run in (AWAY, WAITING))
        assert away - here == pytest.approx(NUM_BLOCKS * longer_ms)


def test_they_wait_only_where_state_does() -> None:
    model = model_of()
    assert model.optimizer.can_step(WAITING)
    for run in (RunOptions(waiting_gradients=1.0), dataclasses.replace(WAITING, quantizes_optimizer=True)):
        assert not model.optimizer.can_step(run)


def test_what_was_not_rehearsed_is_not_chosen() -> None:
    model = CostModel(full_profile(4), hardware_of(**CARD), overlaps=True)
    assert not model.can_treat(WAITING, KEEP)
    found = find_candidates(model, model.evaluate(Choice()), resolve(ON, model.hardware))
    assert not any(candidate.choice.run.waiting_gradients for candidate in found)


def test_no_mode_turns_it_on() -> None:
    model = model_of()
    for mode in ("conservative", "balanced", "aggressive"):
        eligible = resolve(Config(memory_budget_gb=1.0, mode=mode), model.hardware)
        found = find_candidates(model, model.evaluate(Choice()), eligible)
        assert not any(candidate.choice.run.waiting_gradients for candidate in found)


def budget_where_it_pays(model: CostModel) -> int:
    """The budget at which plans with it gain most over plans without."""
    with_it, without = (
        [c.outcome for c in find_candidates(model, model.evaluate(Choice()), resolve(config, model.hardware))]
        for config in (ON, Config(memory_budget_gb=1.0))
    )
    peaks = sorted({outcome.peak_bytes for outcome in with_it})

    def fastest(outcomes: list, peak_bytes: int) -> float:
        return min((o.step_ms for o in outcomes if o.peak_bytes <= peak_bytes), default=float("inf"))

    for peak_bytes in peaks:
        assert fastest(with_it, peak_bytes) <= fastest(without, peak_bytes), "more may be chosen"
    plain_ms = model.evaluate(Choice()).step_ms
    slower = [peak for peak in peaks if plain_ms < fastest(with_it, peak) and fastest(without, peak) < float("inf")]
    best = max(slower, key=lambda peak: fastest(without, peak) / fastest(with_it, peak))
    assert fastest(with_it, best) < 0.98 * fastest(without, best)
    return best


def test_it_is_chosen_where_blocks_would_be_streamed_and_says_why() -> None:
    slow = dataclasses.replace(BLOCK, time=300, temporaries=2)
    model = model_of({f"blocks.{index}": slow for index in range(8)})
    budget = budget_where_it_pays(model) + 1000
    with_it, without = (
        decide_on(model, resolve(Config(memory_budget_gb=budget / 1e9, **more), model.hardware))
        for more in ({"enable_gradient_offload": True}, {})
    )
    assert with_it.predicted_slowdown < without.predicted_slowdown
    (first, *others) = [action for action in with_it.actions if isinstance(action, OffloadGradients)]
    assert [first.module_fqn, *(one.module_fqn for one in others)] == [f"blocks.{index}" for index in range(8)]
    assert first.reason.numbers["gradient_bytes"] > 0
    assert {"share", "frees_bytes", "costs_ms"} <= set(first.reason.numbers)
    assert "offload gradients" in with_it.explain()
    assert Plan.from_json(with_it.to_json()) == with_it
    choice = choice_of(with_it.actions, model.profile)
    assert choice.run.waiting_gradients == first.share
    assert choice_of(actions_of(choice, model.profile), model.profile) == choice
    assert not any(isinstance(action, OffloadGradients) for action in without.actions)


@given(found=models(max_size=4), link=st.sampled_from([1e7, 1e8, 1e10]), overlaps=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_nothing_is_below_the_bound(found: dict[str, Block], link: float, overlaps: bool) -> None:
    profile = with_waiting(full_profile(found), 0.5, 1.0)
    assert profile.rest_optimizer is not None
    state_bytes = profile.optimizer.state_bytes - profile.rest_optimizer.state_bytes
    trained = sum(block.gradients for block in found.values()) * MB
    work = profile.optimizer.moved_bytes
    visiting = GuestCost(trained // 4, 2 * trained + state_bytes, trained + state_bytes, 8, 8, work, 4, MB)
    hardware = hardware_of(link_bytes_per_s=link)
    check(
        CostModel(dataclasses.replace(profile, guests=visiting), hardware, overlaps=overlaps),
        enable_gradient_offload=True,
    )


@given(found=models(max_size=3), link=st.sampled_from([1e8, 1e9, 1e10]))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_the_search_is_as_good_as_brute_force(found: dict[str, Block], link: float) -> None:
    model = model_of(found, link_bytes_per_s=link)
    runs = [dataclasses.replace(AWAY, steps_on_device=True, waiting_gradients=share) for share in (0.0, 0.5, 1.0)]
    candidates = [c.outcome for c in search(model, runs, model.treatments, counts_waiting=False)]
    names = tuple(model.blocks)
    every = [
        model.evaluate(Choice(tuple((n, t) for n, t in zip(names, row, strict=True) if t != KEEP), run))
        for run in runs
        for row in itertools.product((KEEP, *model.treatments), repeat=len(names))
    ]
    for budget in sorted({outcome.peak_bytes for outcome in every})[::7]:
        best, mine = (
            min((o.step_ms for o in outcomes if o.peak_bytes <= budget), default=float("inf"))
            for outcomes in (every, candidates)
        )
        assert mine == pytest.approx(best, rel=1e-9)


def test_treatments_are_rehearsed_with_and_without() -> None:
    model = model_of()
    for treatment in (KEEP, CHECKPOINT, STREAM):
        assert model.can_treat(WAITING, treatment)
    assert WAITING.block_key(STREAM) == TraceKey(STREAM, waits=1.0)
    assert WAITING.rest_key == TraceKey(), "what lies between blocks is as it is"
