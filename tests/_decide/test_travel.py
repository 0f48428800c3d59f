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


@pytest.mark.parametrize("own", [None, OWN], ids=["default", "own"])
def test_left_open_it_is_both_on_a_card_and_blocking_elsewhere(own: AsyncOffloadConfig | None) -> None:
    config, transfers = Config(async_config=own), own or AsyncOffloadConfig()
    assert travels(config, CARD) == (Travel(True, transfers), Travel(False, transfers))
    for hardware in (CPU, UNIFIED):
        assert travels(config, hardware) == (Travel(False, transfers),)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("hardware", [CARD, CPU], ids=["card", "cpu"])
def test_who_asks_for_one_way_gets_that_one(hardware: Hardware, overlaps: bool) -> None:
    assert travels(Config(async_offload=overlaps), hardware) == (Travel(overlaps, AsyncOffloadConfig()),)


def test_where_nothing_travels_there_is_nothing_to_choose() -> None:
    assert len(resolve(Config(mode="conservative"), CARD).travels) == 1
    assert len(resolve(Config(), CARD).travels) == 2
    assert len(resolve(Config(mode="conservative", enable_kept_offload=True), CARD).travels) == 2


def test_a_config_with_a_way_said_in_it_is_otherwise_the_same() -> None:
    """Also where a policy has turned techniques on that neither the mode nor the user has."""
    config = STRATEGIES["conservative+tiling"].under(Config(enable_checkpointing=False), CARD)
    said = Travel(False, OWN).said_in(config)
    assert travels(said, CARD) == (Travel(False, OWN),)
    assert said.enable_tiling
    assert not said.asks_for("enable_tiling")
    assert said.rules_out("enable_checkpointing")
    fields = {"async_offload": None, "async_config": None}
    assert said.replace(**fields, enable_tiling=True) == config.replace(**fields, enable_tiling=True)
