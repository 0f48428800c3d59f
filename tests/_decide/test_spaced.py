"""Activations that wait elsewhere, from blocks far apart, against numbers worked out by hand. See NOTE [far apart]."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import pytest

from memscale import Config
from memscale._decide import decide_on, find_candidates
from memscale._decide.choice import Choice, RunOptions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.link_clock import held_bytes
from memscale._decide.spaced import spaced_choices, thinned
from memscale._decide.travel import travels, wider
from memscale._profile import CHECKPOINT, CHECKPOINT_OFFLOAD, KEEP, OFFLOAD, SELECTIVE, STREAM, OptimizerCost
from tests.profiles import MB, Block, full_profile, hardware_of, profile_of

pytestmark = pytest.mark.unit
FREE = OptimizerCost("none", 0, 0, 0)
SIZE = 30
"""MB that a block saves: 300 ms on the link, beside the 100 ms of its forward and the 200 ms of its backward."""
BLOCK = Block(keeps=SIZE + 2, keeps_checkpointed=4, temporaries=5, time=100)


def model_of(num_blocks: int, *, window: int = SIZE, block: Block = BLOCK, **hardware: object) -> CostModel:
    blocks = {f"blocks.{index}": block for index in range(num_blocks)}
    profile = profile_of(blocks, variants=(CHECKPOINT, OFFLOAD, STREAM), optimizer=FREE)
    found = hardware_of(link_directions=2, **hardware)
    return CostModel(profile, found, overlaps=True, window_bytes=window * MB)


def offloading(*places: int) -> Choice:
    return Choice(tuple((f"blocks.{place}", OFFLOAD) for place in places))


@pytest.mark.parametrize(
    ("places", "waited"),
    [
        ((0, 3, 6), 0),  # 300 ms to leave beside three blocks, and 300 of 400 to come back
        ((0, 4), 0),
        ((0, 2, 4), 2 * 100 + 100),  # each leaves beside two blocks; the first is asked for one block ahead
        ((0, 1), 200 + 100),  # the second waits for the window; the first is asked for when the second begins
        ((7,), 0),  # it is still there, and leaves beside the backward of the others
    ],
)
def test_what_is_far_apart_is_hidden(places: tuple[int, ...], waited: float) -> None:
    model = model_of(8)
    plain = model.evaluate(Choice()).step_ms
    found = model.evaluate(offloading(*places)).step_ms
    side_by_side = CostModel(model.profile, model.hardware, overlaps=True).evaluate(offloading(*places)).step_ms
    assert found - plain == pytest.approx(min(waited, side_by_side - plain))
    assert found <= side_by_side


def treated(pattern: str) -> Choice:
    """A letter for each block: o(ffloaded), s(treamed), c(heckpointed), or kept."""
    ways = {"o": OFFLOAD, "s": STREAM, "c": CHECKPOINT}
    return Choice(tuple((f"blocks.{place}", ways[way]) for place, way in enumerate(pattern) if way in ways))


@pytest.mark.parametrize(
    ("pattern", "parameters", "waited"),
    [
        ("osssosss", 5, 0),  # 300 ms leave beside the streamed blocks, and come beside their backward
        ("s-o-s-o-", 5, 0),
        ("ossossos", 5, 50),  # the weights of 1 are asked for when the activations of 0 are, and come behind them
        ("sossosso", 5, 50),
        ("osso", 20, 0),  # the weights of 1 come behind the activations of 0: both are there when 2 is done
        ("osso", 30, 100),  # and now 100 ms later
        ("oosso", 5, 200 + 300),  # in forward 1 waits for the window, in backward 0 is asked for when 1 is done
    ],
)
def test_activations_and_weights_share_the_link(pattern: str, parameters: int, waited: float) -> None:
    """What comes back comes in the order in which it is asked for, not in that in which it is used."""
    model = model_of(len(pattern), block=dataclasses.replace(BLOCK, parameters=parameters))
    unwaiting = model.evaluate(treated(pattern.replace("o", "-"))).step_ms
    assert model.evaluate(treated(pattern)).step_ms - unwaiting == pytest.approx(waited)


def test_a_window_that_holds_less_than_a_block_hides_nothing_new() -> None:
    narrow = model_of(8, window=SIZE - 1)
    assert not list(spaced_choices(narrow, [Choice()]))
    assert model_of(8, window=SIZE).window_bytes
    assert not CostModel(narrow.profile, hardware_of(link_directions=1), overlaps=True, window_bytes=SIZE).window_bytes


def test_what_the_window_holds_is_counted_where_no_stretch_shows_it() -> None:
    """The first block's stretch shows it in the trace of all blocks; here none of the traces has a window."""
    model = model_of(8)
    early, late = (model.evaluate(offloading(*places)).peak_bytes for places in ((0, 3), (1, 4)))
    assert late - early == SIZE * MB


WIDE = 100
"""MB that a larger block saves, in windows that are wider than the default."""


@pytest.mark.parametrize(
    ("places", "forward", "backward"),
    [
        ((0, 3), [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]),  # what 3 has sent is let go of when 0 has waited
        ((1, 3), [0, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0]),
        ((0, 2, 5), [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, -1, -1]),  # the trace shows what 5 fetches ahead, to its end
        (
            (2, 4),
            [0, 0, 1, 1, 1, 1],
            [1, 2, 3, 3, 1, 1],
        ),  # and that 4 lets go of what 5 has sent, which has sent nothing
        ((2,), [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]),  # nothing is waited for
        (range(6), [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),  # as the trace shows it
    ],
)
def test_wide_windows_hold_what_is_used_and_what_comes_next(
    places: Sequence[int], forward: list[int], backward: list[int]
) -> None:
    """By block, the last one first in backward. See NOTE [the window in backward]."""
    block = dataclasses.replace(BLOCK, keeps=WIDE + 2)
    profile = profile_of({f"blocks.{i}": block for i in range(6)}, variants=(CHECKPOINT, OFFLOAD), optimizer=FREE)
    model = CostModel(profile, hardware_of(link_directions=2), overlaps=True, window_bytes=WIDE * MB)
    offloaded = [f"blocks.{place}" for place in places]
    held = held_bytes(model.owners, model.sent_by_blocks(RunOptions()), offloaded, model.window_bytes)
    visits = zip(*(model.places(f"blocks.{index}") for index in range(6)), strict=True)
    found = [[held[place] // (WIDE * MB) for place in direction] for direction in visits]
    assert found == [forward, backward[::-1]]


def test_blocks_are_replaced_as_far_apart_as_the_link_needs() -> None:
    found = [tuple(int(fqn[-1]) for fqn, _ in choice.blocks) for choice in spaced_choices(model_of(8), [Choice()])]
    assert found == [(0, 3, 6), (1, 4, 7), (0, 3), (4, 7), (0, 6), (1, 7)]


def shown(choice: Choice, num_blocks: int) -> str:
    found = dict(choice.blocks)
    letters = {KEEP: "-", SELECTIVE: "k", OFFLOAD: "o", STREAM: "s", CHECKPOINT: "c", CHECKPOINT_OFFLOAD: "w"}
    return "".join(letters[found.get(f"blocks.{place}", KEEP)] for place in range(num_blocks))


def test_streamed_and_waiting_blocks_are_as_many_as_before() -> None:
    waiting = (("blocks.1", CHECKPOINT_OFFLOAD), *treated("---c-sss").blocks)
    for choice in spaced_choices(model_of(8), [Choice(waiting)]):
        found = shown(choice, 8)
        assert (found.count("s"), found.count("w")) == (3, 1)
        assert list(dict(choice.blocks)) == sorted(dict(choice.blocks))
    assert not list(spaced_choices(model_of(8), [treated("sssssss-")])), "one alone is in the window all the time"


def test_blocks_between_streamed_ones_are_replaced_too() -> None:
    """The others move up. What is computed again makes way for them before what is kept does."""
    found = [shown(choice, 10) for choice in spaced_choices(model_of(10), [treated("-cccccssss")])]
    assert found[:2] == ["occoccssss", "-coccossss"], "among those that are not streamed"
    assert found[2] == "o-cossosso", "every third of all"
    assert {"o-cocsosss", "-ccossosso", "-ccocsssso"} <= set(found)


def test_bases_are_thinned_to_both_ends() -> None:
    choices = [Choice(run=RunOptions(head_rows=rows)) for rows in range(1, 101)]
    kept = thinned(choices, 16)
    assert len(kept) == 16
    assert (kept[0], kept[-1]) == (choices[0], choices[-1])
    assert thinned(choices[:3], 16) == choices[:3]


def test_the_search_finds_plans_that_recompute_less() -> None:
    """Within three quarters of the plain peak there is a plan that takes no longer than the plain step."""
    model = model_of(12)
    config = Config(memory_budget_gb=0.75 * model.evaluate(Choice()).peak_bytes / 1e9)
    plan = decide_on(model, resolve(config, model.hardware))
    before = decide_on(CostModel(model.profile, model.hardware, overlaps=True), resolve(config, model.hardware))
    assert plan.fits
    assert plan.predicted_slowdown < before.predicted_slowdown - 0.01
    assert any(type(action).__name__ == "OffloadActivations" for action in plan.actions)


def test_the_search_finds_plans_that_send_between_streamed_blocks() -> None:
    """With half of the blocks streamed side by side, only every third of the others could send theirs away."""
    model = model_of(12, block=dataclasses.replace(BLOCK, parameters=20, gradients=20))
    top = model.evaluate(Choice()).peak_bytes
    for share in (0.4, 0.5, 0.6):
        plan = decide_on(model, resolve(Config(memory_budget_gb=share * top / 1e9), model.hardware))
        assert plan.fits
        assert re.search("so+s", shown(choice_of(plan.actions, model.profile), 12))


def test_a_larger_budget_is_never_slower_and_no_plan_is_below_the_bound() -> None:
    model = CostModel(full_profile({f"b{i}": BLOCK for i in range(10)}), hardware_of(link_directions=2), overlaps=True)
    model = CostModel(model.profile, model.hardware, overlaps=True, window_bytes=SIZE * MB)
    top = model.evaluate(Choice()).peak_bytes
    plans = [
        decide_on(model, resolve(Config(memory_budget_gb=share * top / 100 / 1e9), model.hardware))
        for share in range(30, 101, 5)
    ]
    times = [plan.predicted_slowdown for plan in plans if plan.fits]
    assert times == sorted(times, reverse=True)
    assert all(plan.least_slowdown is None or plan.least_slowdown <= plan.predicted_slowdown for plan in plans)


def test_windows_are_widened_to_what_a_block_saves() -> None:
    model, config = model_of(8, window=SIZE - 10), Config()
    travel = travels(config, model.hardware)[0]
    transfers = dataclasses.replace(travel.transfers, window_bytes=MB, prefetch_bytes=MB)
    travel = dataclasses.replace(travel, transfers=transfers)
    wide = wider(model, travel, config)
    assert wide is not None
    assert wide.transfers.window_bytes == wide.transfers.prefetch_bytes == SIZE * MB
    assert wider(model, wide, config) is None
    assert wider(model, travel, Config(async_config=travel.transfers)) is None, "the user says how large they are"


def test_candidates_do_not_depend_on_the_budget() -> None:
    model = model_of(8)
    base = model.evaluate(Choice())
    small, large = (
        find_candidates(CostModel(model.profile, model.hardware, overlaps=True, window_bytes=SIZE * MB), base, eligible)
        for eligible in (resolve(Config(memory_budget_gb=gb), model.hardware) for gb in (0.1, 1.0))
    )
    assert small == large


def test_few_choices_are_tried_on_long_models() -> None:
    """A search of a hundred blocks takes less than a second, and each choice takes about half a millisecond."""
    assert len(set(spaced_choices(model_of(100), [Choice()]))) <= 24
    bases = [Choice(((f"blocks.{place}", CHECKPOINT),)) for place in range(100)]
    found = list(spaced_choices(model_of(100), bases))
    assert len(found) <= 16 * 24 + 80 * 2
    assert max(len(choice.blocks) for choice in found) == 35, "every third, and the one of the base"
