"""The search benchmark: its brute force is the cost model's, and its bars can be missed."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from benchmarks import search as benchmark
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._profile import KEEP


def test_brute_force_is_what_the_model_says() -> None:
    profile, hardware = benchmark.make_model(benchmark.random_blocks(random.Random(3), 3, 2))
    model = CostModel(profile, hardware)
    for run in benchmark.RUNS:
        peaks, times = benchmark.all_outcomes(model, run)
        ways = itertools.product(benchmark.TREATMENTS, repeat=3)
        for row, way in enumerate(ways):
            blocks = tuple((f"b.{i}", t) for i, t in enumerate(way) if t != KEEP)
            outcome = model.evaluate(Choice(blocks, run))
            assert peaks[row] == outcome.peak_bytes
            assert times[row] == pytest.approx(outcome.step_ms, rel=1e-9)


@pytest.mark.full
def test_the_bars_hold_on_a_few(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "MAX_SECONDS", math.inf)  # how busy the machine is now decides nothing here
    assert benchmark.main(["--profiles", "2", "--max-blocks", "3", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert "seed 1" in printed
    assert "100 blocks, no two alike" in printed


def test_a_search_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "MAX_SECONDS", 0.0)
    assert benchmark.main(["--profiles", "1", "--max-blocks", "1"]) == 1


def test_a_worse_plan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the plain step is offered."""
    monkeypatch.setattr(benchmark, "search", lambda model, *_, **__: _plain_only(model))
    assert benchmark.compare(2, 1, random.Random(0)).lowest_missed == 1


def _plain_only(model: CostModel) -> list[object]:
    from memscale._decide.search import Candidate

    return [Candidate(Choice(), model.evaluate(Choice()))]
