"""The charts of a report, as Plotly's figures. Colours of text and background are the page's, which may be dark.

Plotly takes some tags in a text for markup, so names are escaped.
"""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memscale._errors import MemScaleError, install_command
from memscale._plan import FrontPoint, LayerRow, Plan
from memscale._units import show_bytes
from memscale.report.explain import reason_text, techniques_text
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.report.step_memory import KINDS, Moment, StepMemory
from memscale.report.step_times import LANES, Span, StepTimes

if TYPE_CHECKING:
    from types import ModuleType

_KIND_COLORS = dict(zip(KINDS, ("#4c78a8", "#b279a2", "#f58518", "#54a24b", "#eeca3b", "#9d9da1"), strict=True))
_TREATMENT_COLORS = ("#54a24b", "#eeca3b", "#f58518", "#e45756", "#b279a2", "#72b7b2", "#9d755d", "#ff9da6")
_KEPT_COLOR, _BUDGET_COLOR, _CHOSEN_COLOR = "#4c78a8", "#e45756", "#e45756"
_PHASE_COLORS = {"forward": "#4c78a8", "backward": "#f58518", "optimizer": "#b279a2"}
_PREDICTED_COLOR, _MEASURED_COLOR = "#4c78a8", "#54a24b"
_LINES = {
    "live": ("total_bytes", "#17a2b8", "solid", 1),
    "allocated": ("allocated_bytes", "#888888", "dot", 1.5),
    "reserved": ("reserved_bytes", "#888888", "solid", 1.5),
}
"""The lines above the stacked kinds: of which field of a moment, and how each is drawn."""
_LABEL_WIDTH = 22
"""Characters in a line of a label beside bars: a phone has room for no more."""
MOST_MOMENTS = 900
"""The most moments of a step that are drawn; thinning keeps the peaks."""


def plotly() -> ModuleType:
    """Plotly, or an error that says how to get it."""
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise MemScaleError(
            f"reports are drawn by Plotly, which is not installed: {install_command('report')}"
        ) from error
    module: ModuleType = plotly.graph_objects
    return module


def memory_chart(step: StepMemory, budget_bytes: int, top_bytes: int) -> Any:
    """Live bytes by kind, stacked, from the beginning of a step to its end; their sum, what is reserved, the budget."""
    graph = plotly()
    moments = step.thinned(MOST_MOMENTS).moments
    told = {"hovertemplate": "%{y:.4s}B"}
    figure = graph.Figure(layout=_layout("", top_bytes))
    for index, kind in enumerate(KINDS):
        heights = [moment.live_bytes[index] for moment in moments]
        if any(heights):
            area = {"stackgroup": "live", "mode": "lines", "line": {"width": 0.5, "shape": "hv"}}
            figure.add_scatter(
                y=heights, name=kind, fillcolor=_KIND_COLORS[kind], line_color=_KIND_COLORS[kind], **area, **told
            )
    for name, (field, color, dash, width) in _LINES.items():
        heights = [getattr(moment, field) for moment in moments]
        if heights and heights[0] is not None:
            line = {"dash": dash, "width": width, "shape": "hv", "color": color}
            figure.add_scatter(y=heights, name=name, mode="lines", line=line, **told)
    _tell_places(figure, moments)
    if shows_budget(budget_bytes, top_bytes):
        figure.update_layout(yaxis={"range": [0, max(top_bytes, budget_bytes) * 1.08]})
        _draw_budget(figure, budget_bytes)
    _draw_phases(figure, moments)
    bare = {"showticklabels": False, "showgrid": False, "tickprefix": "moment "}
    bare["range"] = [0, max(1, len(moments) - 1)]
    figure.update_layout(hovermode="x unified", xaxis={"title": "allocations, in order", **bare})
    return figure


def _tell_places(figure: Any, moments: Sequence[Moment]) -> None:
    """A line that nobody sees: hovering says on top of its box where in the step and in the model one is."""
    figure.add_scatter(
        y=[0] * len(moments),
        mode="lines",
        line={"width": 0},
        name="place",
        showlegend=False,
        customdata=[_place(moment) for moment in moments],
        hovertemplate="<b>%{customdata}</b><extra></extra>",
    )


def _place(moment: Moment) -> str:
    return html.escape(f"{moment.phase}{f', {moment.module_fqn}' if moment.module_fqn else ''}")


def _draw_phases(figure: Any, moments: Sequence[Moment]) -> None:
    for number, (earlier, later) in enumerate(itertools.pairwise(moments), 1):
        begins = later.phase in ("backward", "optimizer") and later.phase != earlier.phase
        if begins and not any(moment.phase == later.phase for moment in moments[:number]):
            figure.add_vline(
                x=number,
                line={"width": 1, "dash": "dot", "color": "#888888"},
                annotation_text=later.phase,
                annotation_position="top right" if number < 0.8 * len(moments) else "top left",
            )


def shows_budget(budget_bytes: int, top_bytes: int) -> bool:
    """Whether its line is drawn: where it is far above everything else, nothing could be read of that."""
    return budget_bytes <= 2 * top_bytes


def _draw_budget(figure: Any, budget_bytes: int) -> None:
    line = {"dash": "dash", "width": 1.5, "color": _BUDGET_COLOR}
    figure.add_hline(y=budget_bytes, line=line, annotation_text=f"budget {show_bytes(budget_bytes)}")


def layers_chart(rows: Sequence[LayerRow]) -> Any:
    """A bar a layer, in the order of the model: what its forward leaves behind, in the colour of what is done."""
    figure = plotly().Figure(layout=_layout("activations", max((row.activation_bytes for row in rows), default=0)))
    names = sorted({techniques_text(row) for row in rows}, key=lambda name: (name != "keep", name))
    colors = dict(zip([name for name in names if name != "keep"], _TREATMENT_COLORS * len(names), strict=False))
    for name in names:
        mine = [(number, row) for number, row in enumerate(rows) if techniques_text(row) == name]
        figure.add_bar(
            x=[number for number, _ in mine],
            y=[row.activation_bytes for _, row in mine],
            width=0.92,  # said, because Plotly takes it from the gaps between bars of one colour
            name=name,
            marker_color=colors.get(name, _KEPT_COLOR),
            text=[_layer_words(row) for _, row in mine],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )
    # The range is said, because Plotly leaves room for a bar on both sides of one that is alone in its colour.
    bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "range": [-0.6, len(rows) - 0.4]}
    figure.update_layout(barmode="overlay", showlegend=True, xaxis={"title": "layers, in order", **bare})
    return figure


def _layer_words(row: LayerRow) -> str:
    return (
        f"<b>{html.escape(row.module_fqn or '(model)')}</b> {html.escape(row.class_name)}<br>{techniques_text(row)}<br>"
        f"parameters {show_bytes(row.param_bytes)}, activations {show_bytes(row.activation_bytes)}<br>"
        f"{html.escape(reason_text(row.reason))}"
    )


def front_chart(plan: Plan, weighed: PeakAgainstTime) -> Any:
    """Peak against time: all that was weighed, what no other beats in both, this plan, and the bound of exact plans."""
    points = [*weighed.front, *weighed.candidates]
    highest = max([point.peak_bytes for point in points] + [plan.predicted_peak_bytes])
    figure = plotly().Figure(layout=_layout("peak of live bytes", highest))
    for is_exact, name, color in ((True, "exact", _KEPT_COLOR), (False, "not exact", "#f58518")):
        _draw_candidates(figure, name, color, [point for point in weighed.candidates if point.is_exact == is_exact])
        _draw_points(figure, name, color, [point for point in weighed.front if point.is_exact == is_exact])
    _draw_points(figure, "this plan", _CHOSEN_COLOR, [point for point in weighed.front if point.is_chosen])
    if plan.budget_bytes <= highest * 1.02:
        _draw_budget(figure, plan.budget_bytes)
    if plan.least_slowdown is not None:
        _draw_bound(figure, plan, plan.least_slowdown, [point.slowdown for point in points])
    figure.update_layout(xaxis={"title": "step time over the plain step (predicted)", "ticksuffix": "x"})
    return figure


def _draw_bound(figure: Any, plan: Plan, least_slowdown: float, times: Sequence[float]) -> None:
    """The least time of any exact plan within the budget. Its words go to where there is more room."""
    times = [*times, plan.predicted_slowdown]
    is_left = least_slowdown <= (min(times) + max(times)) / 2
    figure.add_vline(
        x=least_slowdown,
        line={"dash": "dot", "width": 1.5, "color": "#888888"},
        annotation_text=f"within {show_bytes(plan.budget_bytes)}<br>no exact plan is faster",
        annotation_align="left" if is_left else "right",
        annotation_position="bottom right" if is_left else "bottom left",
    )


def _draw_candidates(figure: Any, name: str, color: str, points: Sequence[FrontPoint]) -> None:
    """What was weighed, behind what is better."""
    if points:
        marker = {"size": 4, "color": color, "opacity": 0.4}
        figure.add_scatter(name=f"{name}, weighed", mode="markers", marker=marker, **_placed(points))


def _placed(points: Sequence[FrontPoint]) -> dict[str, Any]:
    """Where the points lie, and what hovering says of each."""
    words = [f"{show_bytes(point.peak_bytes)}, {point.slowdown:.2f}x<br>{html.escape(point.what)}" for point in points]
    return {
        "x": [point.slowdown for point in points],
        "y": [point.peak_bytes for point in points],
        "text": words,
        "hovertemplate": "%{text}<extra></extra>",
    }


def _draw_points(figure: Any, name: str, color: str, points: Sequence[FrontPoint]) -> None:
    if not points:
        return
    is_chosen = name == "this plan"
    marker = {"size": 14 if is_chosen else 8, "color": color, "symbol": "star" if is_chosen else "circle"}
    figure.add_scatter(
        name=name,
        mode="markers" if is_chosen else "lines+markers",
        line={"shape": "hv", "width": 1},
        marker=marker,
        **_placed(points),
    )


def lanes_chart(times: StepTimes) -> Any:
    """What the device, both ways of the link and the host do when: a bar a stretch, in the colour of its phase."""
    figure = plotly().Figure(layout=_layout("", 0))
    for phase, color in _PHASE_COLORS.items():
        spans = [span for span in times.spans if span.phase == phase]
        if spans:
            figure.add_bar(
                orientation="h",
                base=[span.start_ms for span in spans],
                x=[span.ms for span in spans],
                y=[span.lane for span in spans],
                name=phase,
                marker={"color": color, "line": {"width": _edges(spans, times), "color": "rgba(255,255,255,0.6)"}},
                text=[_span_words(span) for span in spans],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
            )
    lanes = list(reversed(LANES))
    figure.update_layout(
        barmode="overlay",
        bargap=0.25,
        xaxis={"title": "ms since the step began (predicted)", "range": [0, times.total_ms * 1.02 or 1]},
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": lanes, "title": "", "range": [-0.5, 3.5]},
    )
    figure.layout.yaxis.tickformat = figure.layout.yaxis.ticksuffix = None
    return figure


def _edges(spans: Sequence[Span], times: StepTimes) -> list[float]:
    """An edge tells two neighbours apart; of a bar that is no wider than its edge nothing would be left."""
    return [0.5 if span.ms > times.total_ms / 250 else 0 for span in spans]


def _span_words(span: Span) -> str:
    where = f", {html.escape(span.module_fqn)}" if span.module_fqn else ""
    travels = f"<br>{show_bytes(span.num_bytes)}" if span.num_bytes is not None else ""
    return f"<b>{span.lane}</b>, {span.phase}{where}<br>{span.start_ms:.2f} to {span.end_ms:.2f} ms{travels}"


def measured_chart(numbers: Sequence[tuple[str, int | None, int | None]]) -> Any:
    """What was predicted and what was measured, number by number; those with both, if there are any."""
    numbers = [row for row in numbers if None not in row] or numbers
    top_bytes = max((value for _, *values in numbers for value in values if value is not None), default=0)
    figure = plotly().Figure(layout=_layout("", top_bytes))
    names = [name for name, _, _ in numbers]
    predicted, measured = [row[1] for row in numbers], [row[2] for row in numbers]
    for label, color, heights in (
        ("predicted", _PREDICTED_COLOR, predicted),
        ("measured", _MEASURED_COLOR, measured),
    ):
        texts = ["" if value is None else show_bytes(value) for value in heights]
        figure.add_bar(x=names, y=heights, name=label, marker_color=color, text=texts, hovertemplate="%{x}: %{text}")
    figure.update_layout(barmode="group", xaxis={"type": "category"})
    return figure


def waiting_chart(numbers: Sequence[tuple[str, int | None, int | None]]) -> Any:
    """What waits on the host and on disk: a bar for what was predicted, and one for what was measured."""
    figure = plotly().Figure(layout=_layout("", 0))
    names = ["<br>".join(textwrap.wrap(name, _LABEL_WIDTH)) for name, _, _ in numbers]
    top_bytes = max(value for _, *values in numbers for value in values if value is not None)
    predicted, measured = [row[1] for row in numbers], [row[2] for row in numbers]
    for label, color, widths in (
        ("predicted", _PREDICTED_COLOR, predicted),
        ("measured", _MEASURED_COLOR, measured),
    ):
        mine = [(name, num_bytes) for name, num_bytes in zip(names, widths, strict=True) if num_bytes]
        if mine:
            figure.add_bar(
                orientation="h",
                y=[name for name, _ in mine],
                x=[num_bytes for _, num_bytes in mine],
                name=label,
                marker_color=color,
                text=[show_bytes(num_bytes) for _, num_bytes in mine],
                textposition="auto",
                hovertemplate=f"{label}: %{{text}}<extra></extra>",
            )
    figure.update_layout(
        barmode="group",
        showlegend=True,
        xaxis={"range": [0, top_bytes * 1.08], "tickformat": "~s", "ticksuffix": "B", "nticks": 5},
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "range": None},
    )
    figure.layout.yaxis.tickformat = figure.layout.yaxis.ticksuffix = None
    return figure


def _layout(title: str, top_bytes: int) -> dict[str, Any]:
    return {
        "template": "none",
        "margin": {"l": 64, "r": 24, "t": 24, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "yaxis": {
            "title": {"text": title, "standoff": 12},
            "range": [0, top_bytes * 1.08 or 1],
            "tickformat": "~s",
            "ticksuffix": "B",
        },
    }
