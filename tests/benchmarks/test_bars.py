"""The command that holds plans against the times that they are to reach."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import bars
from memscale import Config, OptimizationMode
from memscale._decide import decide
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._profile import KEEP, STREAM
from tests.profiles import MB, full_profile, hardware_of


def test_a_row_says_budget_time_bar_and_bound() -> None:
    plan = decide(full_profile(4), resolve(Config(memory_budget_gb=0.4, enable_logging=False), hardware_of()))
    times = {"plain_ms": 100.0, "optimizer_ms": 30.0, "early_ms": 4.0, "home_ms": 5.0}
    row = bars.Row(dataclasses.replace(bars.BARS[1], most=1.5), plan, **times)
    assert plan.least_slowdown is not None
    found = dict(zip(bars.HEADER, bars.cells(row), strict=True))
    assert found["budget"] == "0.40"
    assert found["step"] == f"{100 * plan.predicted_slowdown:.1f} ms"
    assert (found["early"], found["home"], found["windows"]) == ("4.0 ms", "5.0 ms", "64 MiB")
    assert found["passes"] == f"{100 * plan.predicted_slowdown - 30:.1f} ms"
    assert (found["bar"], found["bound"]) == ("1.50x", f"{plan.least_slowdown:.2f}x")
    unfit = dataclasses.replace(row, plan=dataclasses.replace(plan, fits=False, predicted_reserved_bytes=500 * MB))
    assert bars.cells(unfit)[4] == "0.500 does not fit"


def test_state_that_comes_early_saves_what_there_is_room_for() -> None:
    """A link of 100 MB/s: what is left of the budget in the step, but no more than the step's transfers."""
    model = CostModel(full_profile(4), hardware_of(), overlaps=True)
    choice = Choice(run=RunOptions(offloads_optimizer=1.0))
    plan = decide(model.profile, resolve(Config(memory_budget_gb=1.0, enable_logging=False), model.hardware))
    within = dataclasses.replace(plan, budget_bytes=model.bytes_in_step(choice) + 2 * MB)
    assert bars.early_ms(model, choice, within, step_ms=5000.0) == pytest.approx(20)
    assert bars.early_ms(model, choice, dataclasses.replace(within, budget_bytes=MB), step_ms=5000.0) == 0
    assert bars.early_ms(model, choice, within, step_ms=1.0) == 0
    assert bars.early_ms(model, Choice(), within, step_ms=5000.0) == 0


def test_gradients_at_home_save_what_streamed_blocks_are_computed_again_for() -> None:
    """Of each block's 5 MB as many stay as other blocks have gradients; all of them gain alike."""
    model = CostModel(full_profile(4), hardware_of(), overlaps=True)
    names = list(model.blocks)

    def of(*streamed: int) -> float:
        return bars.home_ms(model, Choice(tuple((names[place], STREAM) for place in streamed)))

    stem_bytes = sum(layer.trainable_bytes for layer in model.profile.layers if not layer.is_block)
    one_ms = sum(model.treated(RunOptions(), STREAM)[place].ms for place in model.places(names[0]))
    one_ms -= sum(model.treated(RunOptions(), KEEP)[place].ms for place in model.places(names[0]))
    assert one_ms >= 100, "a forward"
    assert of() == 0
    assert of(0) == pytest.approx(one_ms)
    room = (stem_bytes + 5 * MB) / (5 * MB)
    assert of(0, 1, 2) == pytest.approx(min(3, room) * one_ms)
    bare = dataclasses.replace(model.profile, layers=tuple(layer for layer in model.profile.layers if layer.is_block))
    alone = CostModel(bare, hardware_of(), overlaps=True)
    every = Choice(tuple((name, STREAM) for name in names))
    assert bars.home_ms(alone, every) == 0, "no other block has gradients"


def test_a_bar_is_planned_for_its_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bar = dataclasses.replace(bars.BARS[-1], name="bert-tiny", batch=2, length=16)
    monkeypatch.setattr(bars, "BARS", (bar,))
    row = bars.plan_bar(bar, OptimizationMode.CONSERVATIVE)
    assert row.plan.device_name == "RTX 3070"
    assert row.plan.predicted_slowdown == 1.0
    assert 0 < row.optimizer_ms < row.step_ms
    monkeypatch.setattr(bars, "plan_bar", lambda bar, mode, *, gradients: row)
    assert bars.main(["--only", "bert-tiny"]) == 0
    assert "1.15x" in capsys.readouterr().out
