"""What one `wrap` looks at, it looks at once: the hardware, the model's blocks, each profile's cost model, and what its
wishes come to on that hardware."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale._config import Config
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._hardware.detect import detect_hardware
from memscale._profile.layers import find_blocks


def calls_of(work: Callable[[], Any], *functions: Callable[..., Any]) -> list[list[Any]]:
    """The first arguments of all calls of these functions while something is done, in this thread."""
    seen: dict[Any, list[Any]] = collections.defaultdict(list)
    codes = [function.__code__ for function in functions]  # type: ignore[attr-defined]

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            seen[frame.f_code].append([frame.f_locals[name] for name in names])

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return [seen[code] for code in codes]


@pytest.mark.parametrize("mode", ["conservative", "balanced"])
def test_hardware_blocks_and_cost_models_are_looked_at_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_CACHE", "0")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    config = memscale.Config(mode=mode, force_optimize=True, enable_logging=False)
    detected, found, built = calls_of(
        lambda: memscale.wrap(model, config, sample_input=torch.rand(4, 32)),
        detect_hardware,
        find_blocks,
        CostModel.__init__,
    )
    memscale.detach(model)
    assert len(detected) == 1
    assert len(found) == 1
    profiles = [id(arguments[1]) for arguments in built]  # they are kept by `built`, so that no id comes back
    assert profiles
    assert len(set(profiles)) == len(profiles)


def resolved_by(work: Callable[[], Any]) -> list[Config]:
    """The configs that met a hardware meanwhile, in order."""
    return [config for config, _ in calls_of(work, resolve)[0]]


@pytest.mark.parametrize("mode", ["conservative", "balanced", "aggressive"])
def test_wishes_meet_the_hardware_once_for_each_config(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who changes the config resolves it anew, and hands the result on: nobody resolves the same config twice."""
    monkeypatch.setenv("MEMSCALE_CACHE", "0")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    config = memscale.Config(mode=mode, force_optimize=True, enable_logging=False)
    found = resolved_by(lambda: memscale.wrap(model, config, sample_input=torch.rand(4, 32)))
    memscale.detach(model)
    assert found[0] is config
    assert len({id(one) for one in found}) == len(found)
    assert sum(one == config for one in found) == 1


def test_an_estimate_resolves_its_config_once_and_each_mode_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    card, config = memscale.Hardware.from_name("RTX 3090"), memscale.Config(enable_logging=False)
    found = resolved_by(lambda: memscale.estimate(model, torch.rand(4, 32), config=config, hardware=card))
    assert found[0] is config
    assert len({id(one) for one in found}) == len(found)
    untravelled = [one for one in found[1:] if one.async_offload is None]
    assert [one.mode for one in untravelled] == list(memscale.OptimizationMode)
