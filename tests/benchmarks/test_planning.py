"""The clock of planning: by stage, inner stages not counted twice."""

from __future__ import annotations

import pytest

from benchmarks import planning
from memscale._progress import stage

pytestmark = pytest.mark.unit


def test_stages_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(planning.time, "process_time", lambda: float(next(ticks)))
    with planning.clocked() as clock, stage("planning a model"):
        with stage("recording a step"), stage("rehearsing inside"):
            pass
        with stage("rehearsing another"):
            pass
    assert sum(clock.seconds.values()) == next(ticks) - 1
    assert clock.counts == {"other": 1, "recording": 1, "rehearsing": 2}
    assert clock.seconds["rehearsing"] == 2
    row = planning.Row("m", "cpu", "loose", 12.0, 10.0, dict(clock.seconds), dict(clock.counts), "fits")
    assert "2.00 (2)" in planning.show([row])
    assert "10 missed" in planning.show([row])
