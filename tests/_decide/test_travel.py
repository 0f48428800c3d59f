"""How tensors may travel: what a config leaves open, and what overlapping can cost at most."""

from __future__ import annotations

import dataclasses

import pytest

from memscale import AsyncOffloadConfig, Config, Hardware
from memscale._decide.eligible import resolve
from memscale._decide.policy.strategies import STRATEGIES
from memscale._decide.travel import Travel, travels

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
