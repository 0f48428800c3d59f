"""How tensors may travel: what a config leaves open, and what overlapping can cost at most."""

from __future__ import annotations

import dataclasses

import pytest

from memscale import AsyncOffloadConfig, Config, Hardware
from memscale._decide import decide_on, find_candidates, may_be_faster_one_ahead
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.pareto import slowdown
from memscale._decide.policy.strategies import STRATEGIES
from memscale._decide.travel import Travel, one_ahead, one_layer_bytes, travels
from memscale._profile import STREAM
from tests.profiles import MB, Block, full_profile, hardware_of

pytestmark = pytest.mark.unit
CARD = Hardware.from_name("RTX 3090")
CPU = dataclasses.replace(CARD, device_type="cpu")
UNIFIED = dataclasses.replace(CARD, unified_memory=True)
OWN = AsyncOffloadConfig(window_bytes=1234)


DEFAULT = AsyncOffloadConfig()


def test_left_open_it_is_overlapped_first_on_a_card_and_blocking_elsewhere() -> None:
    assert travels(Config(), CARD) == (Travel(True, DEFAULT), Travel(False, DEFAULT))
    for hardware in (CPU, UNIFIED):
        assert travels(Config(), hardware) == (Travel(False, DEFAULT),)


def test_windows_that_the_user_chose_are_the_only_ones() -> None:
    assert travels(Config(async_config=OWN), CARD) == (Travel(True, OWN), Travel(False, OWN))
    assert travels(Config(async_config=OWN), CPU) == (Travel(False, OWN),)
    assert travels(Config(async_config=OWN, async_offload=True), CARD) == (Travel(True, OWN),)


def test_who_asks_for_one_way_gets_that_one() -> None:
    for hardware in (CARD, CPU):
        assert travels(Config(async_offload=True), hardware) == (Travel(True, DEFAULT),)
    for hardware in (CARD, CPU):
        assert travels(Config(async_offload=False), hardware) == (Travel(False, DEFAULT),)


def test_where_nothing_travels_there_is_nothing_to_choose() -> None:
    assert len(resolve(Config(mode="conservative"), CARD).travels) == 1
    assert len(resolve(Config(), CARD).travels) == 2
    assert len(resolve(Config(mode="conservative", enable_kept_offload=True), CARD).travels) == 2


def test_a_config_with_a_way_said_in_it_is_otherwise_the_same() -> None:
    """Also where a policy has chosen a mode, whose techniques the user has not asked for by name."""
    config = STRATEGIES["aggressive"].under(resolve(Config(enable_checkpointing=False), CARD)).config
    said = Travel(False, OWN).said_in(config)
    assert travels(said, CARD) == (Travel(False, OWN),)
    assert said.enable_tiling
    assert not said.asks_for("enable_tiling")
    assert not said.enable_checkpointing
    fields = {"async_offload": None, "async_config": None}
    assert said.replace(**fields, enable_tiling=True) == config.replace(**fields, enable_tiling=True)


def test_weights_come_one_layer_ahead_where_nobody_says_how_far() -> None:
    overlapping, blocking = travels(Config(), CARD)
    near = one_ahead(overlapping, Config())
    assert near == Travel(True, AsyncOffloadConfig(prefetch_depth=1))
    assert one_ahead(near, Config()) is None
    assert one_ahead(blocking, Config()) is None
    assert one_ahead(Travel(True, OWN), Config(async_config=OWN)) is None, "the user says how far"


def test_one_layer_less_on_its_way_takes_the_weights_of_the_largest_less() -> None:
    blocks = {"small": Block(parameters=5), "large": Block(parameters=40), "other": Block(parameters=90)}
    profile = dataclasses.replace(full_profile(blocks), rest_param_bytes=60 * MB)
    model = CostModel(profile, hardware_of(), overlaps=True)
    streamed = Choice((("small", STREAM), ("large", STREAM)))
    assert one_layer_bytes(model, Choice()) == 0
    assert one_layer_bytes(model, streamed) == 40 * MB
    assert one_layer_bytes(model, streamed.with_run(streams_rest=True)) == 60 * MB


def test_it_is_asked_whether_a_faster_plan_fits_with_the_weights_of_a_layer_less() -> None:
    """The fastest plan that streams is a little too high, or by more than a layer."""
    model = CostModel(full_profile({f"blocks.{index}": Block(parameters=50) for index in range(4)}), hardware_of())
    eligible = resolve(Config(allow_host_step=True), model.hardware)
    baseline = model.evaluate(Choice())
    streaming = [c for c in find_candidates(model, baseline, eligible) if one_layer_bytes(model, c.choice)]
    fastest = min(streaming, key=lambda candidate: candidate.outcome.step_ms)
    limit = slowdown(fastest, baseline) + 1e-6
    for too_high, expected in ((1, True), (50 * MB, True), (50 * MB + 1, False)):
        budget_gb = (fastest.outcome.peak_bytes - too_high) / 1e9
        tighter = resolve(Config(allow_host_step=True, memory_budget_gb=budget_gb), model.hardware)
        plan = decide_on(model, tighter)
        assert may_be_faster_one_ahead(model, tighter, plan, limit) == expected
