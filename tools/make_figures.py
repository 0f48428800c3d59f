"""Draw `docs/images/demo.svg` and write its table: the memory of a step with and without MemScale, measured.

    python -m tools.make_figures              draw from docs/results/demo.json
    python -m tools.make_figures --measure    run examples/demo.py first, and keep its numbers there

The SVG is written by hand: no plotting library is needed, and the same data gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
DATA, FIGURE = ROOT / "docs" / "results" / "demo.json", ROOT / "docs" / "images" / "demo.svg"
PAGE = ROOT / "docs" / "results" / "measured.md"
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
TOP, BOTTOM, LEFT, PANEL, GAP = 78, 44, 62, 370, 40


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


def draw(data: dict[str, Any]) -> str:
    size, highest = data["size"], data["plain"]["peak_bytes"]
    scale = (HEIGHT - TOP - BOTTOM) / (highest * 1.08)
    title = (
        f"One training step of GPT-2 ({size['layers']} layers of width {size['width']}, "
        f"batch {size['batch']} x {size['length']}): live bytes by kind, measured on {data['device'].upper()}"
    )
    right = LEFT + PANEL + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
            text(LEFT, 24, title, size=13),
            *legend(),
            *axis(highest, scale),
            *panel(LEFT, data["plain"], scale, "plain"),
            *panel(right, data["wrapped"], scale, "memscale.wrap(model)"),
            *budget_line(right, data["budget_bytes"], scale),
            "</svg>",
            "",
        ]
    )


def table(data: dict[str, Any]) -> str:
    """that table, in Markdown."""

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


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "start", color: str = "#2e3440") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{content}</text>'


def legend() -> list[str]:
    parts, x = [], float(LEFT)
    for kind, color in COLORS.items():
        if kind == "other":  # the batch: too thin to be seen
            continue
        parts.append(f'<rect x="{x:.1f}" y="38" width="11" height="11" fill="{color}"/>')
        parts.append(text(x + 16, 48, kind))
        x += 36 + 6.6 * len(kind)
    return parts


def axis(highest: int, scale: float) -> list[str]:
    step = next(step for step in (50e6, 100e6, 200e6, 500e6, 1e9, 2e9, 5e9) if highest / step <= 6)
    parts = []
    for number in range(int(highest * 1.08 / step) + 1):
        y = HEIGHT - BOTTOM - number * step * scale
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 18}" y2="{y:.1f}" stroke="#e5e9f0"/>')
        parts.append(text(LEFT - 6, y + 4, f"{number * step / 1e6:.0f} MB", size=11, anchor="end", color="#6b7280"))
    return parts


def panel(left: int, side: dict[str, Any], scale: float, name: str) -> list[str]:
    base = HEIGHT - BOTTOM
    floor = [0.0] * len(side["timeline"])
    parts = []
    for kind, color in COLORS.items():
        top = [low + sample[kind] for low, sample in zip(floor, side["timeline"], strict=True)]
        if any(top[index] > floor[index] for index in range(len(top))):
            outline = [*enumerate(top), *reversed(list(enumerate(floor)))]
            points = " ".join(f"{left + PANEL * i / (len(top) - 1):.1f},{base - v * scale:.1f}" for i, v in outline)
            parts.append(f'<polygon points="{points}" fill="{color}"/>')
        floor = top
    peak_at = max(range(len(floor)), key=floor.__getitem__)
    x, y = left + PANEL * peak_at / (len(floor) - 1), base - floor[peak_at] * scale
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#bf616a"/>')
    parts.append(text(x, y - 7, f"peak {side['peak_bytes'] / 1e6:.0f} MB", anchor="middle", color="#bf616a"))
    parts.append(f'<line x1="{left}" y1="{base}" x2="{left + PANEL}" y2="{base}" stroke="#2e3440"/>')
    parts.append(text(left, base + 18, name, size=13))
    parts.append(text(left + PANEL, base + 18, "time →", size=11, anchor="end", color="#6b7280"))
    return parts


def budget_line(left: int, budget_bytes: int, scale: float) -> list[str]:
    y = HEIGHT - BOTTOM - budget_bytes * scale
    return [
        f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL}" y2="{y:.1f}" stroke="#2e3440" stroke-dasharray="5 4"/>',
        text(left + PANEL, y - 5, f"budget {budget_bytes / 1e6:.0f} MB", size=11, anchor="end"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure again before drawing")
    if parser.parse_args(argv).measure:
        measure()
    data = json.loads(DATA.read_text())
    FIGURE.write_text(draw(data))
    write_table(data)


if __name__ == "__main__":
    main()
