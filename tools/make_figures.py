"""Draw the pictures of docs/images from the data of docs/results, and write the table of the measured demo.

    python -m tools.make_figures              draw from the data; needs Chromium (Debian: apt-get install chromium)
    python -m tools.make_figures --measure    run examples/demo.py first, and keep its numbers in docs/results/demo.json
    python -m tools.make_figures --table      the table only

Plotly draws, in a browser (`benchmarks/pictures.py`). Each picture says from which figure it was drawn, so that
`tests/test_docs.py` finds one that is not that of its data.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import growth, pictures, precision, technique_steps, tiling
from benchmarks.full_stack import loss

ROOT = pathlib.Path(__file__).parent.parent
RESULTS, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "images"
DATA, PAGE = RESULTS / "demo.json", RESULTS / "measured.md"
NUM_BINS = 120
_TABLE_START, _TABLE_END = "<!-- written by tools/make_figures.py -->", "<!-- end -->"

COLORS = {
    "parameters": "#4c566a",
    "optimizer state": "#8f7ab8",
    "gradients": "#d08770",
    "activations": "#5e9fd4",
    "temporaries": "#e5c07b",
    "other": "#a3be8c",
}
"""In the order in which they are stacked; what is always there lies at the bottom."""

WIDTH, HEIGHT = 860, 360


def reduce_timeline(kinds: Sequence[str], timeline: list[list[float]]) -> list[dict[str, int]]:
    """The highest moment of each of a fixed number of equal stretches of time, so that the peak is kept."""
    start, end = timeline[0][0], timeline[-1][0]
    bins: list[list[float] | None] = [None] * NUM_BINS
    for sample in timeline:
        index = min(NUM_BINS - 1, int((sample[0] - start) / max(end - start, 1e-9) * NUM_BINS))
        highest = bins[index]
        if highest is None or sum(sample[1:]) > sum(highest[1:]):
            bins[index] = sample
    reduced: list[dict[str, int]] = []
    for sample_or_none in bins:
        values = sample_or_none[1:] if sample_or_none is not None else None
        reduced.append(dict(zip(kinds, map(int, values), strict=True)) if values is not None else reduced[-1])
    return reduced


def measure() -> None:
    with tempfile.TemporaryDirectory() as directory:
        raw = pathlib.Path(directory) / "demo.json"
        subprocess.run([sys.executable, ROOT / "examples" / "demo.py", "--json", raw], check=True)
        data = json.loads(raw.read_text())
    for side in ("plain", "wrapped"):
        data[side]["timeline"] = reduce_timeline(data["kinds"], data[side]["timeline"])
    DATA.write_text(json.dumps(data) + "\n")


def demo_figure(data: dict[str, Any]) -> Any:
    """Live bytes by kind over a step, plain and wrapped, side by side."""
    from plotly.subplots import make_subplots

    size, highest = data["size"], data["plain"]["peak_bytes"]
    title = (
        f"One training step of GPT-2 ({size['layers']} layers of width {size['width']}, batch {size['batch']} x "
        f"{size['length']}): live bytes by kind, measured on {data['device'].upper()}"
    )
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    for column, side in enumerate(("plain", "wrapped"), 1):
        _draw_side(figure, data[side], column)
    budget = data["budget_bytes"]
    line = {"dash": "dash", "width": 1.2, "color": "#2e3440"}
    label = f"budget {budget / 1e6:.0f} MB"
    figure.add_hline(y=budget, row=1, col=2, line=line, annotation_text=label, annotation_position="top right")
    figure.update_layout(pictures.layout(title), hovermode=False)
    figure.layout.title.font.size = 13
    for column, name in enumerate(("plain", "memscale.wrap(model)"), 1):
        figure.update_xaxes(title_text=f"{name}, over time →", showticklabels=False, col=column)
    figure.update_yaxes(range=[0, highest * 1.12], ticksuffix="B", exponentformat="SI", gridcolor="#e5e9f0")
    return figure


def _draw_side(figure: Any, side: dict[str, Any], column: int) -> None:
    timeline = side["timeline"]
    for kind, color in COLORS.items():
        heights = [sample[kind] for sample in timeline]
        if kind != "other" and any(heights):  # the batch is too thin to be seen
            figure.add_scatter(
                y=heights,
                name=kind,
                stackgroup=f"side{column}",
                mode="none",
                fillcolor=color,
                legendgroup=kind,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    sums = [sum(sample.values()) for sample in timeline]
    at = max(range(len(sums)), key=sums.__getitem__)
    figure.add_scatter(
        x=[at],
        y=[sums[at]],
        mode="markers+text",
        text=[f"peak {side['peak_bytes'] / 1e6:.0f} MB"],
        textposition="top center",
        marker={"color": "#bf616a", "size": 7},
        textfont={"color": "#bf616a"},
        showlegend=False,
        row=1,
        col=column,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A file of docs/images and what it is drawn from."""

    name: str
    data: str
    figure: Callable[[Any], Any]
    width: int
    height: int

    @property
    def path(self) -> pathlib.Path:
        return IMAGES / self.name

    def make(self) -> Any:
        """The figure, from its data."""
        return self.figure(json.loads((RESULTS / self.data).read_text()))


def _full_stack_figure(data: Any) -> Any:
    return pictures.loss_curves({run["name"]: run["losses"] for run in data}, loss.COLORS)


def _tiling_figure(data: Any) -> Any:
    return tiling.figure_of([tiling.Peak(**row) for row in data["sweep"]])


def _precision_figure(data: Any) -> Any:
    return pictures.loss_curves({run["precision"]: run["losses"] for run in data}, precision.COLORS)


def _growth_figure(data: Any) -> Any:
    return growth.figure_of(growth.points_of(data))


PICTURES = (
    Picture("demo.svg", "demo.json", demo_figure, WIDTH, HEIGHT),
    Picture("full_stack.svg", "full_stack_loss.json", _full_stack_figure, 640, 320),
    Picture("growth.svg", "growth.json", _growth_figure, 1000, 720),
    Picture("precision.svg", "precision.json", _precision_figure, 640, 320),
    Picture("tiling.svg", "tiling.json", _tiling_figure, 720, 380),
    *(
        Picture(
            f"{name}.svg", "technique_steps.json", functools.partial(technique_steps.figure_of, name=name), 860, 340
        )
        for name in technique_steps.WAYS
    ),
)


def table(data: dict[str, Any]) -> str:
    """The table of docs/results/measured.md, in Markdown."""

    def row(name: str, plain: str, wrapped: str, change: str) -> str:
        return f"| {name} | {plain} | {wrapped} | {change} |"

    def in_mb(name: str, plain_bytes: int, wrapped_bytes: int) -> str:
        change = f"{wrapped_bytes / plain_bytes - 1:+.1%}" if plain_bytes > 1e5 else ""
        return row(name, f"{plain_bytes / 1e6:.1f} MB", f"{wrapped_bytes / 1e6:.1f} MB", change)

    plain, wrapped = data["plain"], data["wrapped"]
    same = {True: "identical, bit for bit", False: "different"}
    return "\n".join(
        [
            row("at the peak", "plain", "`memscale.wrap(model)`", "change"),
            row("---", "---:", "---:", "---:"),
            *(in_mb(kind, plain["by_kind"][kind], wrapped["by_kind"][kind]) for kind in COLORS if kind != "other"),
            in_mb("**peak**", plain["peak_bytes"], wrapped["peak_bytes"]),
            row("time of a step", "1.00 x", f"{data['wrapped_s'] / data['plain_s']:.2f} x", ""),
            row("losses and weights", "", "", same[data["losses_identical"] and data["weights_identical"]]),
        ]
    )


def write_table(data: dict[str, Any]) -> None:
    before, _, rest = PAGE.read_text().partition(_TABLE_START)
    _, _, after = rest.partition(_TABLE_END)
    PAGE.write_text(f"{before}{_TABLE_START}\n{table(data)}\n{_TABLE_END}{after}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure again before drawing")
    parser.add_argument("--table", action="store_true", help="draw nothing")
    options = parser.parse_args(argv)
    if options.measure:
        measure()
    write_table(json.loads(DATA.read_text()))
    for picture in () if options.table else PICTURES:
        pictures.write_svg(picture.make(), picture.path, width=picture.width, height=picture.height)


if __name__ == "__main__":
    main()
