"""The second start's benchmark: only later starts are held against the bar."""

from __future__ import annotations

import pytest

from benchmarks import second_start

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("seconds", "code"), [([9.0, 0.9, 1.0], 0), ([0.5, 1.1, 0.5], 1), ([9.0, 0.5, 1.1], 1)])
def test_later_starts_are_held_against_the_bar(
    seconds: list[float], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(second_start, "seconds_of_starts", lambda num_starts: seconds[:num_starts])
    assert second_start.main(["--starts", "3"]) == code
    assert f"first start {seconds[0]:.2f} s" in capsys.readouterr().out
