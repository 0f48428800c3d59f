"""The search against brute force, and its laws."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import search as benchmark
from memscale import Config
from memscale._decide import decide, decide_on
from memscale._decide.choice import Choice, Outcome, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.lowest_peak import Room
from memscale._decide.partial_choices import Front
from memscale._decide.search import EXACT_BLOCKS, Candidate, search
from memscale._plan import Plan, TileHead
from memscale._profile import CHECKPOINT, KEEP, OFFLOAD, STREAM
from memscale.techniques import TECHNIQUES
from tests.profiles import Block, full_profile, hardware_of, trace_of, with_tiled_head

RUNS = (RunOptions(), RunOptions(offloads_optimizer=True))
SEARCH = sys.modules["memscale._decide.search"]
"""The module: as an attribute of the package, `search` is its function."""

blocks = st.builds(
    Block,
    keeps=st.integers(20, 400),
    keeps_selective=st.integers(5, 200),
    keeps_checkpointed=st.integers(1, 50),
    keeps_offloaded=st.integers(0, 20),
    temporaries=st.integers(0, 100),
    gradients=st.integers(0, 80),
    parameters=st.integers(1, 80),
    time=st.integers(1, 500),
)


@st.composite
def models(draw: st.DrawFn, max_size: int = 4) -> dict[str, Block]:
    """Some equal, some not, in any order."""
    kinds = draw(st.lists(blocks, min_size=1, max_size=3))
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=max_size))
    return {f"b.{index}": block for index, block in enumerate(order)}


def all_outcomes(model: CostModel) -> list[Outcome]:
    """Every treatment for every block, in every run."""
    names = tuple(model.blocks)
    return [
        model.evaluate(Choice(tuple((n, t) for n, t in zip(names, row, strict=True) if t != KEEP), run))
        for run in RUNS
        for row in itertools.product((KEEP, *model.treatments), repeat=len(names))
    ]


def fastest(outcomes: list[Outcome], budget: float) -> float:
    return min((outcome.step_ms for outcome in outcomes if outcome.peak_bytes <= budget), default=float("inf"))


def found_by(model: CostModel, *, counts_waiting: bool = False) -> list[Candidate]:
    return search(model, RUNS, model.treatments, counts_waiting=counts_waiting)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(models(), st.sampled_from([1e8, 1e9, 1e10]))
def test_as_good_as_brute_force(found: dict[str, Block], link: float) -> None:
    model = CostModel(full_profile(found), hardware_of(link_bytes_per_s=link))
    ours, everything = [c.outcome for c in found_by(model)], all_outcomes(model)
    lowest = min(outcome.peak_bytes for outcome in everything)
    assert min(outcome.peak_bytes for outcome in ours) == lowest
    highest = max(outcome.peak_bytes for outcome in everything)
    for step in range(31):
        budget = lowest + (highest - lowest) * step / 30
        assert fastest(ours, budget) == pytest.approx(fastest(everything, budget), rel=1e-9)


# ---- steps of any shape: an encoder and a decoder, shared blocks, blocks that are called twice


def shaped(seed: int, shape: str, most_blocks: int, fewest_blocks: int = 1) -> CostModel:
    chance = random.Random(seed)
    num_blocks = chance.randint(fewest_blocks, most_blocks)
    found = benchmark.random_blocks(chance, num_blocks, chance.randint(1, num_blocks))
    link = chance.choice([1e8, 1e9, 1e10])
    return CostModel(*benchmark.make_model(found, link, benchmark.Shape.named(shape, num_blocks, chance)))


shapes = st.sampled_from(benchmark.SHAPES)
seeds = st.integers(0, 10**6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds, shapes)
def test_as_good_as_brute_force_in_any_shape(seed: int, shape: str) -> None:
    model = shaped(seed, shape, 4)
    ours, everything = found_by(model), all_outcomes(model)
    lowest, highest = (f(outcome.peak_bytes for outcome in everything) for f in (min, max))
    assert min(candidate.outcome.peak_bytes for candidate in ours) == lowest
    for step in range(21):
        budget = lowest + (highest - lowest) * step / 20
        fastest_of_ours = fastest([candidate.outcome for candidate in ours], budget)
        assert fastest_of_ours == pytest.approx(fastest(everything, budget), rel=1e-9)
    for candidate in ours:
        again = model.evaluate(candidate.choice)
        assert again.peak_bytes == candidate.outcome.peak_bytes
        assert again.step_ms == pytest.approx(candidate.outcome.step_ms, rel=1e-9)


def only_the_fastest(front: Front, needs: object, limit: int) -> Front:
    return front.take(np.argsort(front.ms, kind="stable")[:1])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds, shapes)
def test_the_lowest_peak_is_found_whatever_is_thinned(seed: int, shape: str) -> None:
    model = shaped(seed, shape, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SEARCH, "on_grid", only_the_fastest)
        patch.setattr(SEARCH, "EXACT_BLOCKS", 0)
        patch.setattr(SEARCH, "_MAX_ROWS", 0)
        ours = found_by(model)
    assert min(c.outcome.peak_bytes for c in ours) == min(outcome.peak_bytes for outcome in all_outcomes(model))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seeds, shapes, st.floats(0.0, 1.0))
def test_the_lowest_peak_within_a_small_host(seed: int, shape: str, share: float) -> None:
    model = shaped(seed, shape, 4)
    room = Room(int(share * model.most_waiting_bytes()), 0)

    def is_placed(outcome: Outcome) -> bool:
        return outcome.host_bytes + outcome.movable_bytes <= room.host_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SEARCH, "on_grid", only_the_fastest)
        patch.setattr(SEARCH, "EXACT_BLOCKS", 0)
        ours = search(model, RUNS, model.treatments, counts_waiting=True, room=room)
    placed = [candidate.outcome.peak_bytes for candidate in ours if is_placed(candidate.outcome)]
    assert min(placed) == min(outcome.peak_bytes for outcome in all_outcomes(model) if is_placed(outcome))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds, shapes)
def test_the_lowest_peak_does_not_depend_on_times(seed: int, shape: str) -> None:
    """On long models, and it is no higher than with every block treated alike."""
    model = shaped(seed, shape, 30, fewest_blocks=EXACT_BLOCKS + 1)
    other = dataclasses.replace(
        model.hardware, memory_bytes_per_s=1e11, link_bytes_per_s=3e8, launch_s=1e-4, fp32_flops=1e9
    )
    lowest = {min(c.outcome.peak_bytes for c in found_by(m)) for m in (model, CostModel(model.profile, other))}
    assert len(lowest) == 1
    alike = [Choice(tuple((fqn, t) for fqn in model.blocks), run) for t in model.treatments for run in RUNS]
    assert lowest.pop() <= min(model.evaluate(choice).peak_bytes for choice in alike)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds, shapes, st.lists(st.floats(0.05, 1.05), min_size=2, max_size=5))
def test_no_shape_is_slower_with_a_larger_budget(seed: int, shape: str, shares: list[float]) -> None:
    """And what fits is not refused: the lowest peak is a plan's, and one byte less is nobody's."""
    model = shaped(seed, shape, 16)
    top = model.evaluate(Choice()).peak_bytes

    def plan_in(budget_bytes: float) -> Plan:
        return decide_on(model, resolve(Config(memory_budget_gb=budget_bytes / 1e9), model.hardware))

    plans = [plan_in(share * top) for share in sorted(shares)]
    for tighter, looser in itertools.pairwise(plans):
        if tighter.fits:
            assert looser.fits
            assert looser.predicted_slowdown <= tighter.predicted_slowdown
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans if plan.fits)
    lowest = decide_on(model, resolve(Config(force_optimize=True), model.hardware)).predicted_peak_bytes
    assert plan_in(lowest).fits
    assert not plan_in(lowest - 1).fits


def test_streaming_a_block_does_not_hide_ways_that_leave_the_optimizer_in_one_piece() -> None:
    """Streaming the first is better for the blocks than offloading the second: less time, and less of everything."""
    first = Block(keeps=70, keeps_checkpointed=10, temporaries=0, gradients=5, time=1, parameters=1)
    second = Block(keeps=60, keeps_offloaded=2, temporaries=0)
    tiny = Block(keeps=1, keeps_checkpointed=1, keeps_offloaded=1, temporaries=0, gradients=0, time=1, parameters=1)
    # The first two are compared with one another before they are put together with the others.
    found = {"first": first, "second": second, "third": tiny, "fourth": tiny}
    profile, treatments = full_profile(found), (OFFLOAD, STREAM)
    for split_launches, best in ((1, ("first", STREAM)), (1000, ("second", OFFLOAD))):
        optimizer = dataclasses.replace(profile.optimizer, num_launches=1, split_launches=split_launches)
        rest = dataclasses.replace(profile.rest_optimizer, split_launches=split_launches)
        changed = dataclasses.replace(profile, optimizer=optimizer, rest_optimizer=rest)
        model = CostModel(changed, hardware_of(link_bytes_per_s=1e9, launch_s=1e-2))
        budget = model.evaluate(Choice((("second", OFFLOAD),))).peak_bytes
        fitting = [
            candidate
            for candidate in search(model, [RunOptions()], treatments, counts_waiting=False)
            if candidate.outcome.peak_bytes <= budget
        ]
        assert min(fitting, key=lambda candidate: candidate.outcome.step_ms).choice.blocks == (best,)


@pytest.mark.parametrize("num_kinds", [1, 2, 8])
@pytest.mark.parametrize("num_blocks", [6, pytest.param(8, marks=[pytest.mark.full, pytest.mark.slow])])
def test_as_good_as_brute_force_on_many_blocks(num_blocks: int, num_kinds: int) -> None:
    """Treatments are limited to four a block, so that brute force ends within a test."""
    kinds = [
        Block(keeps=60 + 37 * i, temporaries=11 * i % 50, parameters=5 + 9 * i, time=40 + 53 * i % 200)
        for i in range(8)
    ]
    found = {f"b.{i}": kinds[i * num_kinds // num_blocks] for i in range(num_blocks)}
    model = CostModel(full_profile(found), hardware_of(link_bytes_per_s=2e9))
    treatments = (CHECKPOINT, OFFLOAD, STREAM)
    ours = [c.outcome for c in search(model, [RunOptions()], treatments, counts_waiting=False)]
    rows = itertools.product((KEEP, *treatments), repeat=num_blocks)
    everything = [
        model.evaluate(Choice(tuple((n, t) for n, t in zip(found, row, strict=True) if t != KEEP))) for row in rows
    ]
    lowest, highest = (f(outcome.peak_bytes for outcome in everything) for f in (min, max))
    for step in range(101):
        budget = lowest + (highest - lowest) * step / 100
        assert fastest(ours, budget) == pytest.approx(fastest(everything, budget), rel=1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(models(max_size=12), st.booleans())
def test_what_is_offered_is_what_the_model_says(found: dict[str, Block], counts_waiting: bool) -> None:
    model = CostModel(full_profile(found), hardware_of(link_bytes_per_s=1e9))
    for candidate in found_by(model, counts_waiting=counts_waiting):
        again = model.evaluate(candidate.choice)
        assert again.peak_bytes == candidate.outcome.peak_bytes
        assert (again.host_bytes, again.movable_bytes) == (
            candidate.outcome.host_bytes,
            candidate.outcome.movable_bytes,
        )
        assert again.step_ms == pytest.approx(candidate.outcome.step_ms, rel=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(models(max_size=16), st.lists(st.integers(50, 4000), min_size=2, max_size=5))
def test_a_larger_budget_is_never_slower_and_is_kept(found: dict[str, Block], budgets: list[int]) -> None:
    model = CostModel(full_profile(found), hardware_of(link_bytes_per_s=1e9))
    plans = [
        decide_on(model, resolve(Config(memory_budget_gb=budget / 1e3), model.hardware)) for budget in sorted(budgets)
    ]
    for tighter, looser in itertools.pairwise(plans):
        if tighter.fits:
            assert looser.fits
            assert looser.predicted_slowdown <= tighter.predicted_slowdown
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans if plan.fits)


def test_long_models_lose_little() -> None:
    """Equal blocks with two odd ones among them, thinned, against the best of all mixtures of two treatments."""
    found = {f"b.{i}": Block(time=100 + 50 * (i in (7, 20)), parameters=20) for i in range(EXACT_BLOCKS * 4)}
    model = CostModel(full_profile(found), hardware_of(link_bytes_per_s=1e9))
    ours = [c.outcome for c in found_by(model)]
    mixtures = []
    names = tuple(found)
    for first, second in itertools.permutations((KEEP, *model.treatments), 2):
        for length in range(len(names) + 1):
            row = [first] * length + [second] * (len(names) - length)
            choice = tuple((n, t) for n, t in zip(names, row, strict=True) if t != KEEP)
            mixtures += [model.evaluate(Choice(choice, run)) for run in RUNS]
    lowest, highest = (f(outcome.peak_bytes for outcome in mixtures) for f in (min, max))
    assert min(outcome.peak_bytes for outcome in ours) <= lowest
    for step in range(101):
        budget = lowest + (highest - lowest) * step / 100
        assert fastest(ours, budget) <= 1.01 * fastest(mixtures, budget)


# ---- waiting elsewhere has its price


def test_a_small_host_is_respected() -> None:
    profile = full_profile(6)
    hardware = hardware_of(link_bytes_per_s=1e9)
    for host_gb in (0.001, 0.05, 0.2, 1.0):
        config = Config(force_optimize=True, max_cpu_offload_gb=host_gb)
        plan = decide(profile, resolve(config, hardware), raise_if_unfit=False)
        assert plan.host_bytes + plan.movable_bytes <= host_gb * 1e9
    roomy = decide(profile, resolve(Config(force_optimize=True), hardware))
    tight = decide(profile, resolve(Config(force_optimize=True, max_cpu_offload_gb=0.05), hardware))
    assert roomy.predicted_peak_bytes < tight.predicted_peak_bytes


# ---- sizes of tiles

BLOCKS = {f"blocks.{index}": Block() for index in range(4)}
LARGE_HEAD = dataclasses.replace(full_profile(BLOCKS), plain=trace_of(BLOCKS, KEEP, head=3200))
TILED = with_tiled_head(LARGE_HEAD, BLOCKS, {128: 200, 1024: 1600})
TILING_ONLY = Config(
    mode="aggressive", enable_offloading=False, enable_checkpointing=False, use_mixed_precision=False,
    use_8bit_optimizer=False,
)  # fmt: skip


def rows_within(budget_bytes: float) -> int:
    """The rows that are chosen; 0: the head is not tiled."""
    config = TILING_ONLY.replace(memory_budget_gb=budget_bytes / 1e9)
    plan = decide(TILED, resolve(config, hardware_of()), raise_if_unfit=False)
    assert not plan.fits or plan.predicted_peak_bytes <= budget_bytes
    return next((action.rows for action in plan.actions if isinstance(action, TileHead)), 0)


def peak_with(rows: int) -> int:
    return CostModel(TILED, hardware_of()).evaluate(Choice((), RunOptions(head_rows=rows))).peak_bytes


def test_the_largest_tile_that_fits() -> None:
    traced, eligible = CostModel(TILED, hardware_of()).traced, resolve(TILING_ONLY, hardware_of())
    option = next(each.option for each in TECHNIQUES if each.option and each.option.field == "head_rows")
    assert option.values(traced, eligible) == (128, 256, 512, 1024)
    assert peak_with(0) > peak_with(1024) > peak_with(512) > peak_with(256) > peak_with(128)
    assert [rows_within(peak_with(rows)) for rows in (0, 1024, 512, 256, 128)] == [0, 1024, 512, 256, 128]
    assert [rows_within(peak_with(rows) - 1) for rows in (0, 1024, 512, 256)] == [1024, 512, 256, 128]


def test_force_takes_the_smallest_tile_that_gains() -> None:
    plan = decide(TILED, resolve(TILING_ONLY.replace(force_optimize=True), hardware_of()))
    assert [action.rows for action in plan.actions if isinstance(action, TileHead)] == [128]
    assert plan.predicted_peak_bytes == peak_with(128)


def test_the_chord_is_not_below_the_sizes_between() -> None:
    """What needs the larger of 400 and two a row lies on the chord or below it."""
    ends = {rows: max(400, 2 * rows) for rows in (128, 1024)}
    model = CostModel(with_tiled_head(LARGE_HEAD, BLOCKS, ends), hardware_of())
    for rows in (256, 512):
        truth = CostModel(with_tiled_head(LARGE_HEAD, BLOCKS, {rows: max(400, 2 * rows)}), hardware_of())
        choice = Choice((), RunOptions(head_rows=rows))
        assert model.evaluate(choice).peak_bytes >= truth.evaluate(choice).peak_bytes


def test_a_run_that_was_not_traced_is_not_considered() -> None:
    """The rest could be streamed, and its rehearsal failed: neither it nor the gaps between blocks are known."""
    profile = full_profile(3, rest=("stem", "head"))
    model = CostModel(profile, hardware_of())
    runs = (RunOptions(), RunOptions(streams_rest=True))
    found = search(model, runs, model.treatments, counts_waiting=False)
    assert {candidate.choice.run for candidate in found} == {RunOptions()}
    assert decide(profile, resolve(Config(force_optimize=True), hardware_of())).actions
