"""How do peak, step time and planning time grow with layers, batch, sequence and vocabulary?

    python -m benchmarks.growth [--axis NAME ...] [--points N] [--out FILE]
    python -m benchmarks.growth --page-only --out docs/results/growth.md    # from the data beside it, which stays

One size of a small GPT-2 grows at a time, and the others stay. Each point is predicted for an RTX 3090, plain and
within 60 % of what the plain step reserves (BALANCED, exact), from a model without weights and an empty cache. "slope"
is that of a straight line through the logarithms: 1 means in proportion, 2 as the square. Peaks and step times are
predictions; planning time is the processor's, measured here. `--out` writes a page such as docs/results/growth.md, and
its data beside it; `python -m tools.make_figures` draws that.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import pathlib
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.pictures import layout
from memscale import _json
from memscale._config import Config
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale.report.explain import what_is_done

CARD = "RTX 3090"
SHARE = 0.6
"""The budget, as a share of what the plain step reserves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A GPT-2 of width 512 with eight heads, and its batch."""

    layers: int = 8
    batch: int = 4
    sequence: int = 256
    vocabulary: int = 8192


AXES: dict[str, tuple[int, ...]] = {
    "layers": (4, 8, 16, 32, 64),
    "batch": (1, 2, 4, 8, 16, 32),
    "sequence": (128, 256, 512, 1024, 2048),
    "vocabulary": (4096, 8192, 16384, 32768, 65536, 131072),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One size, predicted plain and planned. Planned figures are None where nothing fits."""

    axis: str
    value: int
    plain_bytes: int
    planned_bytes: int | None
    plain_ms: float | None
    planned_ms: float | None
    planning_s: float
    what: str


MEASURES = {
    "plain_bytes": "plain: reserved",
    "planned_bytes": "planned: reserved",
    "plain_ms": "plain: step",
    "planned_ms": "planned: step",
    "planning_s": "planning",
}
_ABOUT = f"""A GPT-2 of {Size().layers} layers, width 512, {Size().vocabulary} tokens, batch {Size().batch} x
{Size().sequence}, fp32, AdamW: one of these sizes grows, the others stay. Peaks (reserved bytes) and step times are
predicted for an {CARD}: the plain step's, and those of the exact plan (BALANCED) within {SHARE:.0%} of what the plain
step reserves. Planning is processor time on one core, measured, from a model without weights and an empty cache. The
slope is that of a straight line through the logarithms: 1 means in proportion."""
COLORS = {"plain": "#bf616a", "planned": "#5e81ac", "planning": "#a3be8c"}


def build(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.sequence,
        n_embd=512,
        n_layer=size.layers,
        n_head=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config).train()


def measure(axis: str, value: int) -> Point:
    """What a model of this size comes to."""
    size = dataclasses.replace(Size(), **{axis: value})
    ids = torch.zeros(size.batch, size.sequence, dtype=torch.long, device="meta")
    inputs, hardware = Inputs((), {"input_ids": ids, "labels": ids}), Hardware.from_name(CARD)
    model = build(size)
    plain = Planner(Job(model, Config(), hardware), inputs).held((), Config())
    assert plain is not None, "a card has a caching allocator"
    config = Config(memory_budget_gb=SHARE * plain.reserved_bytes / 1e9)
    gc.collect()
    start = time.process_time()
    try:
        plan = make_plan(Job(model, config, hardware), inputs)
    except DoesNotFitError as refused:
        return Point(axis, value, plain.reserved_bytes, None, None, None, _since(start), f"does not fit: {refused}")
    return Point(
        axis,
        value,
        plain.reserved_bytes,
        plan.predicted_reserved_bytes,
        plan.baseline_step_ms,
        plan.predicted_step_ms,
        _since(start),
        what_is_done(plan),
    )


def _since(start: float) -> float:
    return round(time.process_time() - start, 2)


def slope(points: Sequence[Point], name: str) -> float | None:
    """Of the straight line through the logarithms of size and measure; None where fewer than two points have it."""
    known = [(point.value, getattr(point, name)) for point in points if getattr(point, name)]
    if len(known) < 2:
        return None
    sizes, values = ([math.log(each) for each in column] for column in zip(*known, strict=True))
    return statistics.linear_regression(sizes, values).slope


def page(points: Sequence[Point]) -> str:
    """docs/results/growth.md."""
    lines = [
        "# How peak, time and planning grow",
        "",
        "Written by `python -m benchmarks.growth`; nothing here was measured on a real card.",
        "",
        textwrap.fill(_ABOUT, 120),
        "",
        "![Growth](../images/growth.svg)",
        "",
        "| grows | " + " | ".join(f"slope of {name}" for name in MEASURES.values()) + " |",
        "| --- |" + " ---: |" * len(MEASURES),
    ]
    by_axis = _by_axis(points)
    lines += [
        f"| {axis} | " + " | ".join(_figure(slope(of, name)) for name in MEASURES) + " |"
        for axis, of in by_axis.items()
    ]
    for axis, of in by_axis.items():
        lines += ["", f"## {axis.capitalize()}", ""]
        lines += [f"| {axis} | plain GB | planned GB | plain ms | planned ms | planning s | what is done |"]
        lines += ["| ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
        lines += [_line(point) for point in of]
    return "\n".join(lines) + "\n"


def _line(point: Point) -> str:
    gb = [_figure(value, 1e9, 3) for value in (point.plain_bytes, point.planned_bytes)]
    ms = [_figure(value, 1, 1) for value in (point.plain_ms, point.planned_ms)]
    return f"| {' | '.join([str(point.value), *gb, *ms, f'{point.planning_s:.1f}', point.what])} |"


def _by_axis(points: Sequence[Point]) -> dict[str, list[Point]]:
    return {axis: of for axis in AXES if (of := [point for point in points if point.axis == axis])}


def _figure(value: float | None, unit: float = 1, digits: int = 2) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def figure_of(points: Sequence[Point]) -> Any:
    """Three rows (peak, step, planning) by an axis each, all logarithmic."""
    from plotly.subplots import make_subplots

    by_axis = _by_axis(points)
    rows = {"GB": ("plain_bytes", "planned_bytes"), "ms": ("plain_ms", "planned_ms"), "s to plan": ("planning_s",)}
    units = {"GB": 1e9, "ms": 1, "s to plan": 1}
    figure = make_subplots(rows=len(rows), cols=len(by_axis), vertical_spacing=0.08, horizontal_spacing=0.06)
    for column, (axis, of) in enumerate(by_axis.items(), start=1):
        for row, (unit, names) in enumerate(rows.items(), start=1):
            for name in names:
                title = MEASURES[name].partition(":")[0]
                figure.add_scatter(
                    row=row,
                    col=column,
                    x=[point.value for point in of],
                    y=[None if (value := getattr(point, name)) is None else value / units[unit] for point in of],
                    name=title,
                    legendgroup=title,
                    showlegend=column == 1 and row in (1, len(rows)),
                    mode="lines+markers",
                    line={"color": COLORS[title], "width": 1.8},
                )
            grid = {"type": "log", "gridcolor": "#e5e9f0", "dtick": 1}
            figure.update_xaxes(grid, title_text=axis if row == len(rows) else None, row=row, col=column)
            figure.update_yaxes(grid, title_text=unit if column == 1 else None, row=row, col=column)
    figure.update_layout(layout(f"Predicted for an {CARD}; planning measured"))
    return figure


def points_of(data: Sequence[dict[str, Any]]) -> list[Point]:
    """The points that an earlier run wrote as JSON."""
    return [Point(**{name: value for name, value in row.items() if name != "type"}) for row in data]


def run(axes: Sequence[str], num_points: int | None) -> Iterator[Point]:
    for axis in axes:
        for value in AXES[axis][:num_points]:
            found = measure(axis, value)
            print(f"{axis} {value}: {found.planning_s:.1f} s to plan: {found.what}", file=sys.stderr, flush=True)
            yield found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", action="append", choices=list(AXES), help="only this size (may be repeated)")
    parser.add_argument("--points", type=int, metavar="N", help="only the N smallest sizes of each")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", help="write the page here, and its data beside it (.json)"
    )
    parser.add_argument("--page-only", action="store_true", help="predict nothing: write the page from its data")
    options = parser.parse_args(arguments)
    if options.points is not None and options.points < 1:
        parser.error("--points must be at least 1")
    if options.page_only and options.out is None:
        parser.error("--page-only needs --out, beside which the data lies")
    if options.page_only:
        points = points_of(json.loads(options.out.with_suffix(".json").read_text()))
    else:
        points = list(run(options.axis or list(AXES), options.points))
    if options.out is not None:
        _json.save(points, options.out.with_suffix(".json"))
        options.out.write_text(page(points), encoding="utf-8")
    else:
        print(page(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
