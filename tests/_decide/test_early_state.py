"""State that comes back under backward, and state that leaves under the next forward, by the models of peak and time.
See NOTE [under backward] and NOTE [under the next forward]."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale import Config
from memscale._decide import decide_on, find_candidates
from memscale._decide.choice import Choice, RunOptions, actions_of, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.early_state import early_candidates, late_candidates, room_for_early, room_for_late
from memscale._decide.eligible import resolve
from memscale._profile import STREAM, GuestCost, Profile
from tests._decide.test_bound import check
from tests._decide.test_search import models
from tests.profiles import MB, Block, full_profile, hardware_of

pytestmark = pytest.mark.unit
NUM_BLOCKS = 4
BLOCK = Block(gradients=50, parameters=50, keeps_checkpointed=20)
STREAMED = Choice(tuple((f"blocks.{index}", STREAM) for index in range(NUM_BLOCKS)), RunOptions(steps_on_device=True))
CARD = {"link_bytes_per_s": 1e9, "link_directions": 2, "has_caching_allocator": True}
SAVED = 200 + 37.5 - 50
"""Milliseconds, at most."""


def with_guests(profile: Profile, trained: int) -> Profile:
    """Guests come with their gradients and state, four times their bytes, and leave without the gradients."""
    work = profile.optimizer.moved_bytes
    guests = GuestCost(trained // 4, 4 * trained, 3 * trained, 8, 8, work // 1000, 4, trained // 4)
    return dataclasses.replace(profile, guests=guests)


def model_of(*, overlaps: bool = True, **hardware: object) -> CostModel:
    blocks = {f"blocks.{index}": BLOCK for index in range(NUM_BLOCKS)}
    profile = with_guests(full_profile(blocks), NUM_BLOCKS * BLOCK.parameters * MB)
    return CostModel(profile, hardware_of(**{**CARD, **hardware}), overlaps=overlaps)


def early(*sizes: int) -> Choice:
    """So many megabytes before the backward of the first blocks, which come last in backward."""
    return STREAMED.with_run(early_state=tuple((f"blocks.{index}", size * MB) for index, size in enumerate(sizes)))


def test_the_step_is_shorter_by_what_comes_before_it() -> None:
    """800 MB come in 800 ms, and 600 leave: 50 ms behind the first that comes, and 37.5 ms behind the last."""
    model = model_of()
    optimizer = model.optimizer
    assert optimizer.arriving_surplus(STREAMED.run, model.streamed_bytes(STREAMED)) == 200 * MB
    late_ms = model.evaluate(STREAMED).step_ms
    assert late_ms - model.evaluate(early(100)).step_ms == pytest.approx(100)
    assert late_ms - model.evaluate(early(100, 100)).step_ms == pytest.approx(SAVED)
    assert late_ms - model.evaluate(early(200, 200)).step_ms == pytest.approx(SAVED), "as much leaves as before"


def test_it_is_there_from_the_block_that_asks_to_the_step() -> None:
    model = model_of()
    late, walk = model.evaluate(STREAMED), model.walk(STREAMED)
    assert walk == model.walk(early(30, 7))
    heights = [
        height + sum(model.early_bytes_by_stretch(early(30, 7).run)[: place + 1])
        for place, height in enumerate(walk.heights)
    ]
    second, first = (model.places(f"blocks.{index}")[1] for index in (1, 0))
    expected = [7 * MB * (place >= second) + 30 * MB * (place >= first) for place in range(len(heights))]
    assert [a - b for a, b in zip(heights, walk.heights, strict=True)] == expected
    assert model.evaluate(early(3000, 7)).peak_bytes >= max(late.peak_bytes, walk.heights[first] + 3007 * MB)
    assert model.bytes_in_step(early(30, 7)) - model.bytes_in_step(STREAMED) == 37 * MB
    assert late.peak_bytes <= model.evaluate(early(30, 7)).peak_bytes <= late.peak_bytes + 37 * MB


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_what_there_is_room_for_does_not_raise_the_peak(num_blocks: int) -> None:
    model = model_of()
    blocks = [f"blocks.{index}" for index in reversed(range(num_blocks))]
    peak_bytes = model.evaluate(STREAMED).peak_bytes
    room_bytes = room_for_early(model, STREAMED, model.walk(STREAMED), blocks)
    assert room_bytes > num_blocks
    each = room_bytes // num_blocks

    def peak_with(num_bytes: int) -> int:
        return model.evaluate(STREAMED.with_run(early_state=tuple((fqn, num_bytes) for fqn in blocks))).peak_bytes

    assert peak_with(each) == peak_bytes
    assert peak_with(each + 2) > peak_bytes


def test_backward_waits_where_the_link_has_no_time_for_it() -> None:
    """The backward of one block takes 300 ms with its recompute, and its 50 MB of weights come on the same link."""
    model = model_of()
    times = [model.evaluate(early(size)).step_ms for size in (100, 200, 300, 400)]
    hidden = sum(s.ms for s in model._stretches_under(STREAMED)[model.places("blocks.0")[1] :])
    late_ms = model.evaluate(STREAMED).step_ms
    expected = [late_ms - min(size, SAVED) + max(0, size + 50 - hidden) for size in (100, 200, 300, 400)]
    assert times == pytest.approx(expected)
    assert hidden < 450, "the last one waits"


@pytest.mark.parametrize("change", [{"link_directions": 1}, {"has_caching_allocator": False}, {"overlaps": False}])
def test_it_is_tried_where_it_can_be(change: dict[str, object]) -> None:
    assert list(early_candidates(model_of(), [STREAMED]))
    assert not list(early_candidates(model_of(**change), [STREAMED]))  # type: ignore[arg-type]
    assert not list(early_candidates(model_of(), [Choice()])), "nothing travels for the step"
    compiled = model_of()
    compiled.is_compiled = True
    assert not list(early_candidates(compiled, [STREAMED]))


def test_the_search_asks_for_state_early_and_says_why() -> None:
    model = model_of()
    eligible = resolve(Config(memory_budget_gb=0.5, enable_logging=False), model.hardware)
    baseline = model.evaluate(Choice())
    candidates = find_candidates(model, baseline, eligible)
    found = [candidate for candidate in candidates if candidate.choice.run.early_state]
    assert found
    for candidate in found:
        assert candidate.outcome == model.evaluate(candidate.choice)
        assert choice_of(actions_of(candidate.choice, model.profile), model.profile) == candidate.choice
    others = [candidate for candidate in candidates if not candidate.choice.run.early_state]
    best = min(found, key=lambda candidate: candidate.outcome.step_ms)
    budget_gb = best.outcome.peak_bytes / 1e9
    within = [other.outcome.step_ms for other in others if other.outcome.peak_bytes <= best.outcome.peak_bytes]
    assert best.outcome.step_ms < min(within)
    plan = decide_on(model, resolve(Config(memory_budget_gb=budget_gb, enable_logging=False), model.hardware))
    assert plan.fits
    assert "optimizer state comes back under backward" in plan.explain()
    numbers = next(a.reason.numbers for a in plan.actions if "early_bytes" in a.reason.numbers)
    assert numbers["costs_ms"] < 0  # type: ignore[operator]
    without = resolve(Config(enable_offloading=False, enable_logging=False), model.hardware)
    assert not any(c.choice.run.early_state for c in find_candidates(model, baseline, without))


def test_what_is_to_go_as_low_as_it_can_leaves_the_room_empty() -> None:
    model = model_of()
    eligible = resolve(Config(force_optimize=True, enable_logging=False), model.hardware)
    candidates = find_candidates(model, model.evaluate(Choice()), eligible)
    lowest = min(candidate.outcome.peak_bytes for candidate in candidates)
    plan = decide_on(model, eligible)
    assert plan.predicted_peak_bytes == lowest
    assert any(c.choice.run.early_state and c.outcome.peak_bytes == lowest for c in candidates), "it would be faster"
    assert not any("early_bytes" in action.reason.numbers for action in plan.actions)


# ---- state that leaves late

WAITING = Choice(run=RunOptions(offloads_optimizer=1.0))
TURN = 10
"""Megabytes that leave at a time."""


def in_turns(*, overlaps: bool = True, **hardware: object) -> CostModel:
    """State in buckets of ten megabytes."""
    profile = model_of().profile
    num_buckets = profile.optimizer.state_bytes // (TURN * MB)
    sizes = {"bucket_bytes": (TURN * MB,) * num_buckets, "num_pieces": num_buckets, "piece_bytes": TURN * MB}
    profile = dataclasses.replace(profile, optimizer=dataclasses.replace(profile.optimizer, **sizes))
    return CostModel(profile, hardware_of(**{**CARD, **hardware}), overlaps=overlaps)


def both(early_bytes: int, *late: int) -> Choice:
    """So much early, before the backward of the last block, and so many megabytes late, by block."""
    late_state = tuple((f"blocks.{index}", size * MB) for index, size in enumerate(late))
    early_state = (("blocks.3", early_bytes * MB),) if early_bytes else ()
    return WAITING.with_run(early_state=early_state, late_state=late_state)


def test_state_that_comes_early_saves_as_much_as_leaves_late() -> None:
    model, turn_ms = in_turns(link_bytes_per_s=1e8), 100
    assert model.optimizer.arriving_surplus(WAITING.run, 0) == 0, "as much comes as leaves"
    assert model.optimizer.may_be_late(WAITING.run, 0)[1] == TURN * MB
    neither, early, late, two, less = (
        model.optimizer.step_ms(choice.run, 0)
        for choice in (WAITING, both(60), both(0, 60), both(60, 60), both(60, 69))
    )
    assert early == neither
    assert neither - late == pytest.approx(turn_ms), "nobody waits for the last departure"
    assert neither - two == pytest.approx(6 * turn_ms), "the first arrival is counted although it is early"
    assert less == two, "what is late are whole buckets"


def test_it_is_there_from_the_step_to_the_forward_of_the_block_that_lets_go() -> None:
    model = in_turns()
    walk, choice = model.walk(WAITING), both(0, 0, 30, 7)
    second, third = (model.places(f"blocks.{index}")[0] for index in (1, 2))
    held = model.late_bytes_by_stretch(choice.run)
    assert held == [MB * (30 * (place < second) + 7 * (place < third)) for place in range(len(walk.heights))]
    peaks = [height + more for height, more in zip(walk.heights, held, strict=True)]
    in_step = model.bytes_in_step(choice)
    assert in_step - model.bytes_in_step(WAITING) == 37 * MB
    assert model.evaluate(choice).peak_bytes == max(*peaks, in_step)
    assert model.bytes_in_step(both(20, 0, 30, 7)) == in_step, "what came early is gone by then"
    assert model.bytes_in_step(both(50, 0, 30, 7)) == in_step + 13 * MB


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_what_there_is_room_for_late_does_not_raise_the_peak(num_blocks: int) -> None:
    model = in_turns()
    blocks = [f"blocks.{index}" for index in range(num_blocks)]
    peak_bytes = model.evaluate(WAITING).peak_bytes
    room_bytes = room_for_late(model, WAITING, model.walk(WAITING), blocks)
    assert room_bytes > num_blocks
    each = room_bytes // num_blocks

    def peak_with(num_bytes: int) -> int:
        return model.evaluate(WAITING.with_run(late_state=tuple((fqn, num_bytes) for fqn in blocks))).peak_bytes

    assert peak_with(each) == peak_bytes
    assert peak_with(each + 2) > peak_bytes


def test_forward_waits_where_the_link_has_no_time_for_it() -> None:
    model = in_turns()
    walk = model.walk(WAITING)
    hidden = sum(walk.times_ms[: model.places("blocks.2")[0]])
    assert 0 < hidden < 400
    waits = [model._late_wait_ms(walk, both(0, 0, 0, size)) for size in (50, 400, 500)]
    assert waits == pytest.approx([0, 400 - hidden, 500 - hidden], abs=0.01)


def test_the_search_lets_state_leave_late_and_says_why() -> None:
    model = in_turns()
    eligible = resolve(Config(memory_budget_gb=0.5, enable_logging=False), model.hardware)
    candidates = find_candidates(model, model.evaluate(Choice()), eligible)
    found = [candidate for candidate in candidates if candidate.choice.run.late_state]
    assert found
    for candidate in found:
        assert candidate.outcome == model.evaluate(candidate.choice)
        assert choice_of(actions_of(candidate.choice, model.profile), model.profile) == candidate.choice
    others = [candidate for candidate in candidates if not candidate.choice.run.late_state]
    gains = {
        min(c.outcome.step_ms for c in others if c.outcome.peak_bytes <= one.outcome.peak_bytes)
        - one.outcome.step_ms: one
        for one in found
    }
    assert min(gains) > -1e-6, "what is beaten is no candidate"
    best = gains[max(gains)]
    budget_gb = best.outcome.peak_bytes / 1e9
    plan = decide_on(model, resolve(Config(memory_budget_gb=budget_gb, enable_logging=False), model.hardware))
    assert plan.fits
    assert "optimizer state leaves under the next forward" in plan.explain()
    numbers = next(a.reason.numbers for a in plan.actions if "late_bytes" in a.reason.numbers)
    assert numbers["costs_ms"] < 0  # type: ignore[operator]


@pytest.mark.parametrize("change", [{"link_directions": 1}, {"has_caching_allocator": False}, {"overlaps": False}])
def test_late_state_is_tried_where_it_can_be(change: dict[str, object]) -> None:
    assert list(late_candidates(in_turns(), [WAITING]))
    assert not list(late_candidates(in_turns(**change), [WAITING]))  # type: ignore[arg-type]
    assert not list(late_candidates(in_turns(), [STREAMED])), "guests are at home when the step ends"


@settings(max_examples=15, deadline=None, derandomize=True)
@given(found=models(max_size=4), link=st.sampled_from([1e7, 1e8, 1e10]))
def test_no_plan_with_it_is_below_the_bound(found: dict[str, Block], link: float) -> None:
    trained = sum(block.gradients for block in found.values()) * MB
    profile = with_guests(full_profile(found), trained)
    check(CostModel(profile, hardware_of(**{**CARD, "link_bytes_per_s": link}), overlaps=True))
