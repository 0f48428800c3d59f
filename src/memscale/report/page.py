"""`Report`: a plan, and what is known of its steps, as one HTML file that opens without a network.

    Report(plan).write(pathlib.Path("plan.html"))
    Report(plan).write(pathlib.Path("run.json"))      # its data; `Report.load` reads it, where there is Plotly

The file carries Plotly itself. It is light or dark as the reader's system is, and everything that a chart shows by
hovering stands in a table below it as well.
"""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from memscale import _json
from memscale._plan import Plan
from memscale._units import show_bytes
from memscale.report import charts
from memscale.report.explain import reason_text, techniques_text, what_is_done, words_of_run
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.report.step_memory import KINDS, StepMemory
from memscale.report.step_times import LANES, StepTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What the page is made of. Whatever is None or empty is left out of it."""

    plan: Plan
    plain: StepMemory | None = None
    """A step of the unmodified model."""
    planned: StepMemory | None = None
    """A step under the plan."""
    measured: tuple[tuple[str, int | None, int | None], ...] = ()
    """Numbers of a run: the name of each, what was predicted and what was measured, in bytes."""
    times: StepTimes | None = None
    """What the step under the plan does when."""
    weighed: PeakAgainstTime | None = None
    """What there would be instead of the plan; None: what the plan itself carries of it."""
    measured_step_ms: float | None = None
    """How long a step of the run took."""
    elsewhere: tuple[tuple[str, int | None, int | None], ...] = ()
    """The same as `measured`, of what waits on the host and on disk."""
    without_steps: str = ""
    """Why a report of a run has neither of the two steps; "": it was made of a plan alone."""

    def write(self, path: pathlib.Path) -> None:
        """The page; to a file that ends with ".json", the data that it is made of."""
        if path.suffix == ".json":
            _json.save(self, path)
        else:
            path.write_text(self.html(), encoding="utf-8")

    @classmethod
    def load(cls, path: pathlib.Path) -> Report:
        """What `write` wrote as data; `MemScaleError` says why a file is none."""
        return _json.load(cls, path, "what a run has written as JSON")

    def html(self) -> str:
        """The whole page. Raises `MemScaleError` where Plotly is not installed."""
        charts.plotly()
        from plotly.offline import get_plotlyjs

        figures: dict[str, Any] = {}
        parts = (self._memory, self._lanes, self._layers, self._front, self._measured, self._elsewhere)
        sections = [section for part in parts for section in part(figures)]
        specs = ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in figures.items())
        return _PAGE.format(
            title=html.escape(self._title),
            style=_STYLE,
            head=self._head(),
            sections="\n".join(sections),
            explained=html.escape(self.plan.explain()),
            plotly=get_plotlyjs(),
            specs=specs.replace("</", "<\\/"),
            script=_SCRIPT,
        )

    def summary(self) -> str:
        """The plan's numbers and its choices, as a piece of HTML without charts: what a notebook shows."""
        rows = [
            (row.module_fqn or "(model)", techniques_text(row), reason_text(row.reason))
            for row in self.plan.rows
            if row.techniques
        ]
        table = _table(("layer", "what is done", "why"), rows) if rows else ""
        return f"<h4>{html.escape(self._title)}</h4>{self._head()}{table}"

    @property
    def _title(self) -> str:
        return f"{self.plan.model_class} on {self.plan.device_name}"

    def _head(self) -> str:
        plan = self.plan
        held = plan.predicted_reserved_bytes
        cards = [
            ("plain peak", show_bytes(plan.baseline_peak_bytes)),
            ("planned peak", f"{show_bytes(plan.predicted_peak_bytes)} ({plan.reduction:.1%} less)"),
            *([("reserved", show_bytes(held))] if held is not None else []),
            *([("total on the card", show_bytes(plan.predicted_total_bytes))] if plan.predicted_total_bytes else []),
            ("budget", f"{show_bytes(plan.budget_bytes)}: {'fits' if plan.fits else 'does not fit'}"),
            (
                "step time, predicted",
                f"{_ms_before(plan.predicted_step_ms)}{plan.predicted_slowdown:.2f}x the plain step",
            ),
            *([("of the bound", f"{plan.of_bound:.2f}x")] if plan.of_bound is not None else []),
            ("waits on the host or disk", show_bytes(plan.host_bytes + plan.movable_bytes)),
        ]
        batch = "; ".join(plan.inputs) or "batch unknown"
        words = f"{batch}. {plan.optimizer_name}, mode {plan.mode}: {what_is_done(plan)}."
        shown = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in cards)
        return f"<p>{html.escape(words)}</p><dl>{shown}</dl>"

    def _memory(self, figures: dict[str, Any]) -> Iterable[str]:
        steps = {"without MemScale": self.plain, "with this plan": self.planned}
        known = {name: step for name, step in steps.items() if step is not None and step.moments}
        top_bytes = max((_top_of(step) for step in known.values()), default=0)
        sections, beyond = [], ""
        for number, (name, step) in enumerate(known.items()):
            figures[f"memory{number}"] = charts.memory_chart(step, self.plan.budget_bytes, top_bytes)
            highest = max(step.moments, key=lambda moment: moment.total_bytes)
            cells = [(kind, show_bytes(count)) for kind, count in zip(KINDS, highest.live_bytes, strict=True) if count]
            where = f" of {highest.module_fqn}" if highest.module_fqn else ""
            note = f"Live bytes by kind, {step.source}: {show_bytes(step.peak_bytes)} at the peak, in "
            if not charts.shows_budget(self.plan.budget_bytes, top_bytes):
                beyond = f" The budget, {show_bytes(self.plan.budget_bytes)}, is far above what is drawn."
            table = _table(("at the peak", "bytes"), cells)
            promised = self._promised(step) if step is self.planned else ""
            words = f"{note}{highest.phase}{where}.{promised}{beyond}"
            sections.append(_section(f"One step {name}", f"memory{number}", words, table))
        if sections:
            yield f'<div class="pair">{"".join(sections)}</div>'
        else:
            yield _section("Memory over a step", "", f"Not shown: {self.without_steps or _NO_MODEL}.", "")

    def _promised(self, step: StepMemory) -> str:
        """Why the plan promises more than is drawn; "": it promises just that."""
        first = ""
        if step.earlier_peak_bytes > step.peak_bytes:
            first = f" The first step, which makes the optimizer's state, takes {show_bytes(step.earlier_peak_bytes)}."
        promised, drawn = self.plan.predicted_reserved_bytes, max(moment.reserved_bytes or 0 for moment in step.moments)
        if promised is None or promised <= drawn or not drawn:
            return first
        why = "which covers its first steps and what the loop and other ranks hold, too"
        if self.plan.allocator is not None and promised <= 1.02 * drawn:
            why = "with a margin, as little is left unused and kernels may allocate in another order"
        return f"{first} Reserved reaches {show_bytes(drawn)} here; the plan promises {show_bytes(promised)}, {why}."

    def _layers(self, figures: dict[str, Any]) -> Iterable[str]:
        rows = self.plan.rows
        run = [action for action in self.plan.actions if not hasattr(action, "module_fqn")]
        if not rows:
            return
        figures["layers"] = charts.layers_chart(rows)
        cells = [
            (
                row.module_fqn or "(model)",
                techniques_text(row),
                show_bytes(row.param_bytes),
                show_bytes(row.activation_bytes),
                reason_text(row.reason),
            )
            for row in rows
        ]
        cells += [("the whole run", words_of_run(action), "", "", reason_text(action.reason)) for action in run]
        header = ("layer", "what is done", "parameters", "activations", "why")
        note = "Each bar is a layer; its height is what its forward leaves for backward when nothing is done."
        yield _section("The plan, layer by layer", "layers", note, _table(header, cells))

    def _front(self, figures: dict[str, Any]) -> Iterable[str]:
        weighed, front_note = self.weighed, ""
        if weighed is None:
            weighed, front_note = PeakAgainstTime(self.plan.front, (), 0), self.plan.front_note
        if not weighed.front:
            return
        figures["front"] = charts.front_chart(self.plan, weighed)
        cells = [
            (
                "this plan" if point.is_chosen else "",
                show_bytes(point.peak_bytes),
                f"{point.slowdown:.2f}x",
                point.what if point.is_exact else f"{point.what} (not exact)",
            )
            for point in weighed.front
        ]
        note = "On the line: plans that no other beats in both peak and time, by the peak model and the time model."
        if weighed.candidates:
            note += f" Faint dots: all {weighed.num_candidates:,} plans that were weighed; those that coincide are one."
        if not all(point.is_exact for point in weighed.candidates):
            note += " What is not exact is offered only below everything that is."
        if self.plan.predicted_reserved_bytes is not None:
            note += " Peaks are live bytes; the budget bounds what is reserved, which is more."
        if front_note:
            note += f" {front_note[0].upper()}{front_note[1:]}."
        yield _section("Peak against time", "front", note, _table(("", "peak", "time", "what is done"), cells))

    def _lanes(self, figures: dict[str, Any]) -> Iterable[str]:
        times = self.times
        if times is None or not times.spans:
            return
        figures["lanes"] = charts.lanes_chart(times)
        cells = []
        for lane in LANES:
            busy_ms, moved_bytes = times.busy_ms(lane), times.moved_bytes(lane)
            share = f"{busy_ms / times.total_ms:.0%}" if times.total_ms else ""
            cells.append((lane, f"{busy_ms:.2f} ms", share, show_bytes(moved_bytes) if moved_bytes else ""))
        note = (
            f"One step of {times.total_ms:.1f} ms by the time model: the device, both ways of the link, and the host."
        )
        promised_ms = self.plan.predicted_step_ms
        if promised_ms is not None and abs(times.total_ms - promised_ms) > 0.01 * promised_ms:
            note += f" The plan, which adds up its layers one by one, says {promised_ms:.1f} ms."
        if not any(times.moved_bytes(lane) for lane in LANES):
            note += " This plan moves nothing."
        yield _section("What travels when", "lanes", note, _table(("lane", "at work", "of the step", "moved"), cells))

    def _measured(self, figures: dict[str, Any]) -> Iterable[str]:
        cells = [(name, *map(_bytes_or_dash, (predicted, seen))) for name, predicted, seen in self.measured]
        if self.measured_step_ms is not None:
            predicted_ms = self.plan.predicted_step_ms
            cells.append(("step", _ms_before(predicted_ms).rstrip(", ") or "–", f"{self.measured_step_ms:.1f} ms"))
        if not cells:
            yield _section("Predicted and measured", "", _OF_A_RUN if self.elsewhere else _OF_A_PLAN, "")
            return
        if self.measured:
            figures["measured"] = charts.measured_chart(self.measured)
        header = ("number", "predicted", "measured")
        note = "Peaks of this run beside what the plan promised."
        chart = "measured" if self.measured else ""
        yield _section("Predicted and measured", chart, note, _table(header, cells))

    def _elsewhere(self, figures: dict[str, Any]) -> Iterable[str]:
        """What waits on the host and on disk."""
        plan = self.plan
        planned = (
            ("parameters, gradients and their state at home on the host", plan.host_bytes, None),
            ("activations and optimizer state, on the host or on disk", plan.movable_bytes, None),
        )
        numbers = [row for row in (*planned, *self.elsewhere) if any(row[1:])]
        if not numbers:
            return
        cells = [(name, *map(_bytes_or_dash, (predicted, seen))) for name, predicted, seen in numbers]
        figures["elsewhere"] = charts.waiting_chart(numbers)
        note = "What waits beside the device, at most."
        yield _section("Host and disk", "elsewhere", note, _table(("what", "predicted", "measured"), cells))


_NO_MODEL = (
    "this page was made of a plan, and a step is rehearsed with its model; memscale report MODEL draws its memory and "
    "what travels when"
)
_OF_A_PLAN = (
    "Nothing was measured: this page was made of a plan. Of a run, executor.report(...) and a Trainer's "
    "memscale_report write one with what the device's allocator counted."
)
_OF_A_RUN = (
    "Nothing was measured in this run: its device has no allocator that counts, as a CPU has none, and nobody told. "
    "memscale.measure() counts live bytes: executor.report(path, live_peak_bytes=measured.peak_bytes, step_ms=...) "
    "shows them here."
)


def _ms_before(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f} ms, "


def _top_of(step: StepMemory) -> int:
    return max(max(moment.total_bytes, moment.reserved_bytes or 0) for moment in step.moments)


def _bytes_or_dash(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else show_bytes(num_bytes)


def _section(title: str, chart: str, note: str, table: str) -> str:
    drawn = f'<div class="chart" id="{chart}" role="img" aria-label="{html.escape(title)}"></div>' if chart else ""
    told = f"<details{'' if chart else ' open'}><summary>as a table</summary>{table}</details>" if table else ""
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>{drawn}{told}</section>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: MemScale</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{head}
{sections}
<section><h2>In words</h2>
<details><summary>every choice, with its rule and numbers</summary><pre>{explained}</pre></details></section>
<footer>Bytes and times are predicted unless a table says measured. GB = 1e9 bytes. Written by MemScale.</footer>
</main>
<script>{plotly}</script>
<script>const FIGURES = {{{specs}}};
{script}</script>
</body>
</html>
"""
_STYLE = """
:root { --text: #1f2430; --faint: #5b6272; --page: #ffffff; --card: #f4f5f8; --line: #d9dce3; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ee; --faint: #a3a9b8; --page: #16181d; --card: #21242c; --line: #3a3f4b; }
}
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(150px, 22%), 1fr)); gap: 8px; }
dl div { background: var(--card); border-radius: 8px; padding: 10px 12px; }
dt { color: var(--faint); font-size: .85rem; } dd { margin: 0; font-weight: 600; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 0 24px; }
.pair section { min-width: 0; display: grid; grid-template-rows: subgrid; grid-row: span 4; }
.pair p { margin-top: 0; } footer { margin-top: 2rem; }
.chart { height: 380px; } .chart + details { margin-top: 8px; }
#elsewhere { height: 260px; } .wide { overflow-x: auto; }
@media (max-width: 600px) { .pair .chart { height: 520px; } }  /* the legend takes a line a kind there */
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: 3px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
pre { overflow-x: auto; font-size: .8rem; } footer, section > p { color: var(--faint); }
summary { cursor: pointer; } summary:focus-visible { outline: 2px solid #4c78a8; }
"""
_SCRIPT = """
const scheme = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const paper = style.getPropertyValue("--page").trim();
  const card = style.getPropertyValue("--card").trim();
  for (const [name, figure] of Object.entries(FIGURES)) {
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    const layout = { ...figure.layout, font: { color: text }, hoverlabel: { bgcolor: card, font: { color: text } } };
    if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;  // a finger scrolls the page
    const notes = layout.annotations ?? [];
    layout.annotations = notes.map((note) => ({ ...note, bgcolor: paper, borderpad: 1, opacity: 0.85 }));
    layout.xaxis = { ...layout.xaxis, ...axis };
    layout.yaxis = { ...layout.yaxis, ...axis };
    Plotly.react(name, figure.data, layout, { responsive: true, displayModeBar: false });
  }
}
scheme.addEventListener("change", draw);
draw();
"""
