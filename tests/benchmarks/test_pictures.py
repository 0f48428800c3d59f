"""Pictures of documents: figures that show their data, and files that a browser drew from just these."""

from __future__ import annotations

import pathlib
import threading

import pytest

from benchmarks import pictures, tiling
from tests.lanes import full

pytestmark = pytest.mark.unit
CURVES = {"one": [3.0, 1.0], "other": [3.0, 2.0]}
COLORS = {"one": "#111111", "other": "#222222"}


def test_curves_are_smoothed_and_told_apart() -> None:
    figure = pictures.loss_curves(CURVES, COLORS)
    assert [list(line.y) for line in figure.data] == [[3.0, 2.0], [3.0, 2.5]]
    assert len({line.line.dash for line in figure.data}) == 2
    assert figure.layout.paper_bgcolor == "#ffffff", "a dark page must not show through"


def test_a_sweep_has_a_line_a_treatment() -> None:
    peaks = [tiling.Peak(treatment, length, length * 10, None) for treatment in tiling.TREATMENTS for length in (1, 2)]
    figure = tiling.figure_of(peaks)
    assert [line.name for line in figure.data] == list(tiling.TREATMENTS)
    assert list(figure.data[0].y) == [10, 20]


def test_a_file_of_another_figure_is_found(tmp_path: pathlib.Path) -> None:
    figure, other = pictures.loss_curves(CURVES, COLORS), pictures.loss_curves({"one": [1.0]}, COLORS)
    path = tmp_path / "x.svg"
    path.write_text(f"<svg/>\n<!-- figure {pictures.digest(figure)} -->\n")
    assert pictures.is_drawn_from(figure, path)
    assert not pictures.is_drawn_from(other, path)


@full
def test_a_browser_draws_it(tmp_path: pathlib.Path) -> None:
    figure, path = pictures.loss_curves(CURVES, COLORS), tmp_path / "x.svg"
    pictures.write_svg(figure, path, width=300, height=200)
    for (
        thread
    ) in threading.enumerate():  # asyncio's, which waits for the browser's driver to end, may outlive it a moment
        if thread.name.startswith("asyncio-waitpid"):
            thread.join(timeout=120)
    text = path.read_text()
    assert text.startswith("<svg")
    assert text.count('class="js-line"') == 4, "two curves, here and in the legend"
    assert pictures.is_drawn_from(figure, path)
