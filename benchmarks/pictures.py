"""Pictures for documents: figures of Plotly, drawn by a browser into SVG files that show in any page.

    write_svg(figure, pathlib.Path("docs/images/demo.svg"), width=860, height=360)
    is_drawn_from(figure, path)      # whether a file was drawn from just this figure

Plotly's own exporter starts a browser, too; this one uses Chromium from the system's packages through Playwright
(`pip install ".[pages]"`; Debian: `apt-get install chromium`). A file says in its first line what it was drawn from.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import statistics
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from memscale._errors import MemScaleError

BROWSER_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
_DRAW = """async ([figure, width, height]) => {
  const place = document.createElement("div");
  document.body.appendChild(place);
  await Plotly.newPlot(place, figure.data, figure.layout);
  return await Plotly.toImage(place, { format: "svg", width, height });
}"""


def find_browser() -> str:
    """The system's Chromium; an error says how to get it."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise MemScaleError("pictures are drawn by Chromium, which is not installed (Debian: apt-get install chromium)")
    return found


def digest(figure: Any) -> str:
    """Of everything that a figure shows."""
    return hashlib.sha256(figure.to_json().encode()).hexdigest()[:16]


def is_drawn_from(figure: Any, path: pathlib.Path) -> bool:
    """Whether the file was drawn from this figure."""
    return f"<!-- figure {digest(figure)} -->" in path.read_text(encoding="utf-8")


def write_svg(figure: Any, path: pathlib.Path, *, width: int, height: int) -> None:
    """Draw the figure into a file."""
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=list(BROWSER_FLAGS))
        page = browser.new_page(viewport={"width": width + 40, "height": height + 40})
        page.set_content("<!doctype html><body></body>")
        page.add_script_tag(content=get_plotlyjs())
        image = page.evaluate(_DRAW, [json.loads(figure.to_json()), width, height])
        browser.close()
    drawn = urllib.parse.unquote(image.partition(",")[2])
    path.write_text(f"{drawn}\n<!-- figure {digest(figure)} -->\n", encoding="utf-8")


def layout(title: str, **more: Any) -> dict[str, Any]:
    """What all pictures have in common. They are white: pages around them may be dark."""
    return {
        "template": "none",
        "title": {"text": title, "x": 0.02, "font": {"size": 15}},
        "font": {"family": "sans-serif", "size": 12, "color": "#2e3440"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "margin": {"l": 64, "r": 20, "t": 70, "b": 48},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        **more,
    }


def loss_curves(curves: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> Any:
    """Losses, each curve smoothed over ten steps."""
    from plotly.graph_objects import Figure

    num_steps = max(map(len, curves.values()))
    axis = {"title": {"text": f"training step (of {num_steps})"}, "gridcolor": "#e5e9f0"}
    figure = Figure(layout=layout("", xaxis=axis, yaxis={"title": {"text": "loss"}, "gridcolor": "#e5e9f0"}))
    dashes = ("solid", "dash", "dot", "dashdot")  # curves that are the same are all seen
    for number, (name, losses) in enumerate(curves.items()):
        line = {"color": colors[name], "width": 1.8, "dash": dashes[number % len(dashes)]}
        figure.add_scatter(y=_smooth(losses), name=name, mode="lines", line=line)
    return figure


def _smooth(losses: Sequence[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, index - 9) : index + 1]) for index in range(len(losses))]
