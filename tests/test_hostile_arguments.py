"""Values that no argument can have, given to every public verb: an error of ours in few words, and nothing changed.

What a command line can hand over is tried by `tests/commands/test_bad_options.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memscale
from memscale import AsyncOffloadConfig, Config, Hardware, Plan
from tests._torch.test_overrides import snapshot
from tests.models import small

SAMPLE = torch.ones(4, 16)
QUIET = Config(enable_logging=False)
MANY_LETTERS = 5000
MOST_WORDS = 1200


class Unspeakable:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]


HOSTILE: dict[str, Any] = {
    "unspeakable": Unspeakable(),
    "holds the unspeakable": {"x": [Unspeakable()]},
    "complex": 1j,
    "bytes": b"\xff",
    "ellipsis": ...,
    "function": lambda: 1,
    "class": int,
    "iterator": iter([1]),
    "not a number": float("nan"),
    "huge": 10**400,
    "negative": -1,
    "no letter": "\ud800",
    "zero byte": "a\0b",
    "nested": [[]],
}
LONG = "x" * MANY_LETTERS


def _context(made: Any) -> None:
    with contextlib.ExitStack() as undo:
        undo.enter_context(made)


def _verbs() -> dict[str, Callable[[Any, Any], Any]]:
    """What takes a model and a value."""
    wrap = functools.partial(memscale.wrap)
    return {
        "wrap.config": lambda model, value: wrap(model, value),
        "wrap.async_offload": lambda model, value: wrap(model, QUIET, SAMPLE, async_offload=value),
        "wrap.async_config": lambda model, value: wrap(model, QUIET, SAMPLE, async_config=value),
        "wrap.lengths": lambda model, value: wrap(model, QUIET, SAMPLE, lengths=[value]),
        "optimize.optimizer": lambda model, value: _context(memscale.optimize(model, value)),
        "optimize.config": lambda model, value: _context(memscale.optimize(model, config=value)),
        "execute.plan": lambda model, value: memscale.execute(model, value),
        "park.optimizer": lambda model, value: memscale.park(model, value),
        "apply_all.optimizer": lambda model, value: memscale.apply_all_optimizations(model, value),
        "estimate.optimizer": lambda model, value: memscale.estimate(model, SAMPLE, optimizer=value),
        "estimate.config": lambda model, value: memscale.estimate(model, SAMPLE, config=value),
        "estimate.hardware": lambda model, value: memscale.estimate(model, SAMPLE, hardware=value),
    }


def _others() -> dict[str, Callable[[Any], Any]]:
    """What takes a value alone."""
    return {
        "wrap": memscale.wrap,
        "detach": memscale.detach,
        "park": memscale.park,
        "resume": memscale.resume,
        "parked": lambda value: _context(memscale.parked(value)),
        "measure": lambda value: _context(memscale.measure(value)),
        "estimate": memscale.estimate,
        "from_name": Hardware.from_name,
        "detect": Hardware.detect,
        "detect.offload_dir": lambda value: Hardware.detect("cpu", value),
        "from_json": Plan.from_json,
        "load": Plan.load,
        **{f"Config.{name}": functools.partial(_set, Config, name) for name in _fields(Config)},
        **{f"Async.{name}": functools.partial(_set, AsyncOffloadConfig, name) for name in _fields(AsyncOffloadConfig)},
    }


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _set(kind: Any, name: str, value: Any) -> Any:
    return kind(**{name: value})


def _refused(call: Callable[[], Any]) -> None:
    """It raises an error of ours, from our own source, whose text is short."""
    with pytest.raises((memscale.MemScaleError, TypeError, ValueError)) as caught:
        call()
    raised_in = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert "memscale" in raised_in, f"{caught.value!r} comes from {raised_in}"
    assert 0 < len(str(caught.value)) < MOST_WORDS


@pytest.mark.parametrize("verb", list(_verbs()))
def test_a_verb_refuses_what_no_argument_can_be(verb: str) -> None:
    model = small()
    before = snapshot(model)
    for value in (*HOSTILE.values(), LONG):
        _refused(functools.partial(_verbs()[verb], model, value))
        assert snapshot(model) == before


@pytest.mark.parametrize("function", list(_others()))
def test_a_function_refuses_what_no_argument_can_be(function: str) -> None:
    for value in HOSTILE.values():
        _refused(functools.partial(_others()[function], value))


@pytest.mark.parametrize("function", ["measure", "detect", "from_name", "detect.offload_dir", "from_json"])
def test_long_texts_are_not_repeated(function: str) -> None:
    _refused(functools.partial(_others()[function], LONG))


@pytest.mark.parametrize("field", ["offload_dir", "log_file", "observability_host", "device"])
def test_what_only_the_machine_can_refuse_is_refused_by_wrap(field: str) -> None:
    model = small()
    before = snapshot(model)
    config = QUIET.replace(observability_port=0, **{field: LONG})
    _refused(functools.partial(memscale.wrap, model, config, SAMPLE))
    assert snapshot(model) == before


@pytest.mark.parametrize("field", [name for name in _fields(Hardware) if name.endswith(("_per_s", "_bytes", "_flops"))])
def test_hardware_that_no_step_can_be_counted_with(field: str) -> None:
    here = Hardware.from_name("RTX 3090")
    for value in (-1, float("nan"), 10**400, "8", True, Unspeakable()):
        with pytest.raises(memscale.ConfigError, match=field):
            dataclasses.replace(here, **{field: value})


def test_hardware_of_a_device_that_pytorch_does_not_know() -> None:
    for value in ("", LONG, "\0", "\ud800", "abacus"):
        there = dataclasses.replace(Hardware.from_name("RTX 3090"), device_type=value)
        with pytest.raises(memscale.ConfigError, match="device_type=") as caught:
            memscale.estimate(small(), SAMPLE, hardware=there)
        assert len(str(caught.value)) < MOST_WORDS


def test_a_run_is_resumed_from_its_own_state_or_not_at_all() -> None:
    model: Any = memscale.wrap(small(), QUIET, SAMPLE)
    executor = model._memscale_executor
    good = {"scale": 1024.0, "good_steps": 3, "num_skipped_steps": 1}
    executor.load_state_dict({"loss_scale": good})
    for name in good:
        without = {key: value for key, value in good.items() if key != name}
        for scale in (without, *({**without, name: value} for value in (None, -1, "x", float("nan"), 10**400, []))):
            _refused(functools.partial(executor.load_state_dict, {"loss_scale": {**scale}}))
    for state in (None, [], "state", Unspeakable(), {"loss_scale": 3}, {"loss_scale": torch.zeros(2)}):
        _refused(functools.partial(executor.load_state_dict, state))
    assert executor.state_dict() == {"loss_scale": good}
    memscale.detach(model)


def test_a_report_shows_numbers_alone(tmp_path: Any) -> None:
    model: Any = memscale.wrap(small(), QUIET, SAMPLE)
    executor = model._memscale_executor
    for figure in ("step_ms", "live_peak_bytes"):
        for value in (-1, float("nan"), float("inf"), "8", True, 1j, Unspeakable()):
            _refused(functools.partial(executor.report, tmp_path / "run.json", **{figure: value}))
    for path in ("a\0b", "\ud800", 3, Unspeakable()):
        _refused(functools.partial(executor.report, path))
    assert not list(tmp_path.iterdir())
    memscale.detach(model)
