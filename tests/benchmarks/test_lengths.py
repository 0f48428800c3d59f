"""The run with lengths that vary, shortened: no step above the budget, and the plain run's bits."""

from __future__ import annotations

import gc

import pytest
import torch

import simgpu  # noqa: F401  (registers the device)
from benchmarks import lengths
from memscale._config import OptimizationMode


def test_lengths_are_the_same_in_every_run_and_the_longest_comes_late() -> None:
    found = lengths.lengths_of(300)
    assert found == lengths.lengths_of(300)
    assert found[250] == max(found) == lengths.LONGEST
    assert found.count(lengths.LONGEST) == 1
    assert min(found) >= lengths.SHORTEST
    assert 100 < sorted(found)[150] < 160


def test_no_step_is_above_the_budget_and_training_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "LONGEST", 256)
    monkeypatch.setattr(lengths, "DEPTH", 4)
    batches = lengths.lengths_of(12)
    config = lengths.config_for("simgpu", OptimizationMode.CONSERVATIVE)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    run = lengths.wrapped_run(batches, "simgpu", config, announced=False)
    plain = lengths.plain_run(batches, "simgpu")
    assert config.memory_budget_gb is not None
    assert max(run.peaks) - before <= config.memory_budget_gb * 1e9 < max(plain.peaks) - before
    assert run.losses == plain.losses
    assert all(map(torch.equal, run.weights, plain.weights))
    assert len({id(plan) for plan in run.plans}) > 1


def test_a_bar_that_is_missed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {
        "steps": 300, "device": "simgpu", "mode": "balanced", "announced": False, "plans": 9, "switches": 7,
        "budget_bytes": 100, "highest_bytes": 90, "plain_highest_bytes": 170, "exact": True, "planning_s": 14.0,
        "slowest_switch_ms": 3.0, "of_best": 1.0,
    }  # fmt: skip
    assert lengths.show(kept) == 0
    assert "MISSED" not in capsys.readouterr().out
    for name, value in (("highest_bytes", 101), ("exact", False), ("planning_s", 16.0), ("of_best", 1.2)):
        assert lengths.show({**kept, name: value}) == 1
        assert capsys.readouterr().out.count("MISSED") == 1
