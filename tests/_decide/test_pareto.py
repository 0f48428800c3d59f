"""The Pareto front: what no other plan beats, with the chosen one on it; and what explain says about it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale import Config
from memscale._decide import decide, find_candidates, peak_against_time
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.pareto import TimeKey, describe, pareto_front, scattered, unbeaten
from memscale._plan import FrontPoint, OffloadOptimizer, Plan, TileAttention, TileHead, TileMlp
from memscale._profile import CHECKPOINT, STREAM, Profile, TraceKey
from memscale.report.charts import front_chart
from memscale.report.peak_against_time import PeakAgainstTime
from tests.profiles import MB, Block, full_profile, hardware_of, trace_of

pytestmark = pytest.mark.unit
HARDWARE = hardware_of(link_bytes_per_s=1e9)
PROFILE = full_profile(8)
BASELINE = CostModel(PROFILE, HARDWARE).evaluate(Choice()).peak_bytes


def plan_within(num_bytes: float, profile: Profile = PROFILE, **fields: bool) -> Plan:
    """With transfers that block: whoever waits for nothing has a front of few points."""
    config = Config(memory_budget_gb=num_bytes / 1e9, async_offload=False, **fields)  # type: ignore[arg-type]
    return decide(profile, resolve(config, HARDWARE), raise_if_unfit=False)


blocks = st.builds(
    Block,
    keeps=st.integers(20, 400),
    keeps_selective=st.integers(5, 200),
    keeps_checkpointed=st.integers(1, 50),
    temporaries=st.integers(0, 100),
    parameters=st.integers(1, 80),
    time=st.integers(1, 500),
)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.lists(blocks, min_size=1, max_size=6), st.integers(1, 3000))
def test_the_front_falls_and_no_candidate_is_below_it(found: list[Block], budget_mb: int) -> None:
    profile = full_profile({f"b.{index}": block for index, block in enumerate(found)})
    plan = plan_within(budget_mb * MB, profile)
    for higher, lower in itertools.pairwise(plan.front):
        assert higher.peak_bytes > lower.peak_bytes
        assert higher.slowdown <= lower.slowdown
    assert [point.is_chosen for point in plan.front].count(True) == 1
    chosen = next(point for point in plan.front if point.is_chosen)
    assert (chosen.peak_bytes, chosen.slowdown) == (plan.predicted_peak_bytes, plan.predicted_slowdown)
    assert Plan.from_json(plan.to_json()).explain() == plan.explain()


def test_thinned_or_not_nothing_beats_a_point_of_the_front() -> None:
    plan = plan_within(0.7 * BASELINE)
    model, config = CostModel(PROFILE, HARDWARE), Config(async_offload=False)
    baseline = model.evaluate(Choice())
    candidates = find_candidates(model, baseline, resolve(config, HARDWARE))
    assert 5 < len(plan.front) <= 24 < len(candidates)
    for point in plan.front:
        for candidate in candidates:
            faster = max(1.0, round(candidate.outcome.step_ms / baseline.step_ms, 4)) < point.slowdown
            assert not (faster and candidate.outcome.peak_bytes <= point.peak_bytes)
    assert plan.front[0].peak_bytes == BASELINE
    assert plan.front[-1].peak_bytes == min(candidate.outcome.peak_bytes for candidate in candidates)


def test_the_neighbours_are_what_the_next_budgets_give() -> None:
    plan = plan_within(0.7 * BASELINE)
    cheaper, smaller = plan.next_cheaper, plan.next_smaller
    assert cheaper is not None
    assert smaller is not None
    assert cheaper.peak_bytes > plan.budget_bytes >= plan.predicted_peak_bytes > smaller.peak_bytes
    again = plan_within(cheaper.peak_bytes)
    assert (again.predicted_peak_bytes, again.predicted_slowdown) == (cheaper.peak_bytes, cheaper.slowdown)
    again = plan_within(smaller.peak_bytes)
    assert (again.predicted_peak_bytes, again.predicted_slowdown) == (smaller.peak_bytes, smaller.slowdown)
    text = plan.explain()
    assert (
        f"next cheaper: {(cheaper.peak_bytes - plan.predicted_peak_bytes) / 1e6:.1f} MB more, above the budget" in text
    )
    assert f"next smaller: {(plan.predicted_peak_bytes - smaller.peak_bytes) / 1e6:.1f} MB less" in text
    assert text.count("\n> ") == 1


def test_the_ends_have_one_neighbour() -> None:
    lowest = plan_within(BASELINE, force_optimize=True)
    assert lowest.next_smaller is None
    assert "next smaller: none" in lowest.explain()
    assert lowest.next_cheaper is not None


def test_what_fits_as_it_is_says_that_nothing_else_was_looked_into() -> None:
    plan = plan_within(2 * BASELINE)
    assert [point.what for point in plan.front] == ["nothing"]
    assert "nothing else was looked into" in plan.explain()
    eligible = resolve(Config(memory_budget_gb=2 * BASELINE / 1e9), HARDWARE)
    front = peak_against_time(CostModel(PROFILE, HARDWARE), eligible, plan).front
    assert front[0].is_chosen
    assert len(front) > 5


def test_a_plan_without_a_front_says_so() -> None:
    bare = dataclasses.replace(plan_within(0.7 * BASELINE), front=(), front_note="")
    assert "does not carry one" in bare.explain()
    assert bare.next_cheaper is bare.next_smaller is None


def test_what_is_not_exact_is_offered_only_below_what_is() -> None:
    quantized = dataclasses.replace(PROFILE.optimizer, state_bytes=PROFILE.optimizer.state_bytes // 4)
    profile = dataclasses.replace(PROFILE, eight_bit_optimizer=quantized)
    config = Config(mode="aggressive", enable_offloading=False, force_optimize=True)
    plan = decide(profile, resolve(config, HARDWARE))
    assert not plan.front[-1].is_exact
    exact = [point.peak_bytes for point in plan.front if point.is_exact]
    assert exact
    assert all(point.peak_bytes < min(exact) for point in plan.front if not point.is_exact)
    assert "(not exact)" in plan.explain()


def test_by_force_an_exact_plan_is_taken_where_a_lossy_one_gains_nothing() -> None:
    """State that is on the host need not be small."""
    faster = dataclasses.replace(PROFILE.optimizer, moved_bytes=0)
    profile = dataclasses.replace(PROFILE, eight_bit_optimizer=faster)
    plan = decide(profile, resolve(Config(mode="aggressive", force_optimize=True), HARDWARE))
    assert next(point for point in plan.front if point.is_chosen).is_exact


# ---- each choice with its numbers


def test_parts_of_the_run_say_what_they_free() -> None:
    plan = plan_within(0.2 * BASELINE, force_optimize=True)
    offload = next(action for action in plan.actions if isinstance(action, OffloadOptimizer))
    assert offload.reason.numbers["frees_bytes"] > 0  # type: ignore[operator]
    assert "offload optimizer" in plan.explain()


INSIDE = (TileAttention("blocks.0.attention", rows=8), TileMlp("blocks.0.mlp", 2), TileMlp("blocks.1.mlp", 2))


def test_tiles_inside_blocks_are_shown_with_their_numbers() -> None:
    found = {f"blocks.{index}": Block(temporaries=300) for index in range(2)}
    tiled = {name: dataclasses.replace(block, temporaries=100) for name, block in found.items()}
    variants = {TraceKey(CHECKPOINT, num_tiles=size): trace_of(tiled, CHECKPOINT) for size in (2, 4)}
    profile = full_profile(found, inside=INSIDE)
    profile = dataclasses.replace(profile, variants={**profile.variants, **variants})
    config = Config(mode="aggressive", force_optimize=True, enable_offloading=False, use_8bit_optimizer=False)
    plan = decide(profile, resolve(config, HARDWARE))
    actions = [action for action in plan.actions if isinstance(action, TileAttention | TileMlp)]
    assert len(actions) == 3
    assert all(action.reason.numbers["frees_bytes"] > 0 for action in actions)  # type: ignore[operator]
    rows = {row.module_fqn: row for row in plan.rows}
    assert rows["blocks.0"].techniques == ("checkpoint", "tile attention", "tile the MLP")
    assert rows["blocks.1"].techniques == ("checkpoint", "tile the MLP")
    assert rows["blocks.1"].reason.numbers["tiles"] == actions[-1].num_tiles  # type: ignore[union-attr]
    assert "checkpoint + tile attention + tile the MLP" in plan.explain()


def test_choices_in_words() -> None:
    profile = dataclasses.replace(
        full_profile({name: Block() for name in "abc"}), head=TileHead("head", 512), rest=("d",)
    )
    assert describe(Choice(), profile) == "nothing"
    run = RunOptions(head_rows=128, precision="bfloat16", streams_rest=True)
    choice = Choice((("a", CHECKPOINT), ("b", CHECKPOINT), ("c", STREAM)), run)
    assert describe(choice, profile) == (
        "checkpoint: 2 layers, stream parameters: 1 layer, tile the head: 128 rows, compute in bfloat16, "
        "stream the rest"
    )


# ---- the drawing


def test_the_drawing_has_every_point_and_the_budget() -> None:
    plan = plan_within(0.7 * BASELINE)
    figure = front_chart(plan, PeakAgainstTime(plan.front, (), 0))
    drawn = {trace.name: list(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    exact = [(point.slowdown, point.peak_bytes) for point in plan.front if point.is_exact]
    assert drawn["exact"] == exact
    assert plan.chosen is not None
    assert drawn["this plan"] == [(plan.chosen.slowdown, plan.chosen.peak_bytes)]
    assert f"budget {plan.budget_bytes / 1e6:.1f} MB" in [note.text for note in figure.layout.annotations]
    assert front_chart(plan, PeakAgainstTime(plan.front, (), 0)).to_json() == figure.to_json()


def test_a_front_of_one_point_can_be_drawn() -> None:
    point = FrontPoint(10, 1.0, "a < b", is_chosen=True)
    plan = dataclasses.replace(plan_within(2 * BASELINE), predicted_peak_bytes=10)
    figure = front_chart(plan, PeakAgainstTime((point,), (), 0))
    assert "a &lt; b" in figure.data[-1].text[0]
    assert "budget" not in str(figure.layout.annotations)


def test_thinning_keeps_the_chosen_one_and_both_ends() -> None:
    profile = full_profile({f"b.{i}": Block(keeps=50 + 13 * i, time=60 + 7 * i) for i in range(12)})
    model, config = CostModel(profile, HARDWARE), Config()
    baseline = model.evaluate(Choice())
    found = find_candidates(model, baseline, resolve(config, HARDWARE))
    for chosen in sorted(found, key=lambda c: c.outcome.peak_bytes)[:: max(1, len(found) // 7)]:
        front = pareto_front(found, baseline, chosen, profile)
        assert len(front) <= 24
        assert any(point.is_chosen and point.peak_bytes == chosen.outcome.peak_bytes for point in front)
        assert front[-1].peak_bytes == min(c.outcome.peak_bytes for c in found)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6), st.integers(0, 2)), max_size=12))
def test_what_no_other_beats(keys: list[TimeKey]) -> None:
    """Nothing is both as fast and as low; of equals the first is left."""
    front = unbeaten(keys)
    assert [keys[index] for index in front] == sorted(keys[index] for index in front)
    for index, key in enumerate(keys):
        others = [other for number, other in enumerate(keys) if (other, number) < (key, index)]
        assert (index in front) == (not any(other[1] <= key[1] for other in others))


def test_all_candidates_are_drawn_and_none_lies_below_the_front() -> None:
    model, eligible = CostModel(PROFILE, HARDWARE), resolve(Config(mode="aggressive"), HARDWARE)
    plan = plan_within(0.7 * BASELINE)
    weighed = peak_against_time(model, eligible, plan)
    found = find_candidates(model, model.evaluate(Choice()), eligible)
    assert weighed.num_candidates == len(found) >= len(weighed.candidates) > len(weighed.front) / 2
    peaks = [candidate.outcome.peak_bytes for candidate in found]
    assert min(point.peak_bytes for point in weighed.candidates) == min(peaks)
    exact = [point for point in weighed.front if point.is_exact]
    step_bytes = 0.05 * BASELINE  # points of the front are so far apart at most
    for point in weighed.candidates:
        faster = [other.peak_bytes for other in exact if other.slowdown <= point.slowdown]
        assert not point.is_exact or not faster or point.peak_bytes >= min(faster) - step_bytes
    figure = front_chart(plan, weighed)
    drawn = {trace.name: set(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    dots = {(point.slowdown, point.peak_bytes) for point in weighed.candidates if point.is_exact}
    assert drawn["exact, weighed"] == dots


def test_candidates_that_would_be_one_dot_are_drawn_once() -> None:
    model, eligible = CostModel(PROFILE, HARDWARE), resolve(Config(), HARDWARE)
    found = find_candidates(model, model.evaluate(Choice()), eligible)
    once, twice = (scattered(some, model.evaluate(Choice()), PROFILE) for some in (found, [*found, *found]))
    assert once == twice
    assert not any(point.is_chosen for point in once)
