"""benchmarks/growth.py: sizes that grow, and the page about them."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil

import pytest

from benchmarks import growth
from benchmarks.growth import Point

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"


def points(axis: str = "batch", power: float = 1.0) -> list[Point]:
    return [
        Point(axis, n, int(1e9 * n**power), int(5e8 * n**power), 2.0 * n, 3.0 * n, 1.5, "nothing") for n in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_slope_is_the_power(power: float) -> None:
    assert growth.slope(points(power=power), "plain_bytes") == pytest.approx(power, abs=1e-6)


def test_what_does_not_fit_has_no_slope_and_no_figure() -> None:
    missed = [Point("layers", n, 10**9, None, None, None, 1.0, "does not fit: x") for n in (4, 8)]
    assert growth.slope(missed, "planned_bytes") is None
    assert "| 4 | 1.000 | - | - | - | 1.0 | does not fit: x |" in growth.page(missed)


def test_the_page_has_every_point_and_the_slopes() -> None:
    text = growth.page([*points("batch"), *points("layers")])
    assert text.count("| nothing |") == 8
    assert "| layers | 1.00 | 1.00 | 1.00 | 1.00 | 0.00 |" in text
    assert text.index("## Layers") < text.index("## Batch")


def test_the_page_is_what_its_data_says(tmp_path: pathlib.Path) -> None:
    for suffix in (".md", ".json"):
        shutil.copy((RESULTS / "growth").with_suffix(suffix), tmp_path)
    out = tmp_path / "growth.md"
    assert growth.main(["--page-only", "--out", str(out)]) == 0
    for suffix in (".md", ".json"):
        kept = (RESULTS / "growth").with_suffix(suffix).read_bytes()
        assert out.with_suffix(suffix).read_bytes() == kept, (
            "run `python -m benchmarks.growth --page-only --out docs/results/growth.md`"
        )


def test_a_page_alone_is_written_beside_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        growth.main(["--page-only"])
    assert "--page-only needs --out" in capsys.readouterr().err


@pytest.mark.slow
def test_one_point_is_planned_within_its_budget(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "Size", functools.partial(growth.Size, layers=2))
    out = tmp_path / "growth.md"
    assert growth.main(["--axis", "batch", "--points", "1", "--out", str(out)]) == 0
    (found,) = json.loads(out.with_suffix(".json").read_text())
    assert found["planned_bytes"] <= growth.SHARE * found["plain_bytes"] + 1
    assert found["planned_ms"] >= found["plain_ms"] > 0
    assert "batch 1:" in capsys.readouterr().err


def test_too_few_points_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        growth.main(["--points", "0"])
    assert stopped.value.code == 2
    assert "--points must be at least 1" in capsys.readouterr().err
