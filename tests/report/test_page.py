"""A report: one file that needs no network, shows every number of the plan, and lets nothing of a name run as code."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import pathlib
import re
import weakref
from typing import Any

import pytest
import torch

import memscale
from memscale import Config, Hardware, MemScaleError, Plan
from memscale._plan import OPTIMIZER_BUCKET_BYTES, AllocatorUse, Checkpoint, OffloadOptimizer
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.questions.step_memory import step_memory
from memscale._planning.questions.step_times import step_times
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes
from memscale.cli import main
from memscale.report.page import Report
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.report.step_memory import KINDS, Moment, StepMemory
from tests.models import WIDTH, features, small

pytestmark = pytest.mark.unit
CARD = Hardware.from_name("RTX 3090")


@pytest.fixture(scope="module")
def planned() -> tuple[Planner, Plan]:
    job = Job(small(), Config(mode="conservative", force_optimize=True), CARD, "adamw")
    inputs = Inputs((features(0, 4096, WIDTH),), {})
    return Planner(job, inputs), make_plan(job, inputs)


@pytest.fixture(scope="module")
def report(planned: tuple[Planner, Plan]) -> Report:
    planner, plan = planned
    config = planner.job.config
    return Report(
        plan,
        step_memory(planner, (), config),
        step_memory(planner, plan.actions, config, plan.allocator),
        times=step_times(planner, plan.actions, planner.job.eligible.under(config)),
    )


class Page(html.parser.HTMLParser):
    """What a browser would load, show and run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.charts: list[str] = []
        self.scripts: list[str] = []
        self.shown: list[str] = []
        self._tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.loaded += [str(found[name]) for name in ("src", "href") if name in found]
        if found.get("class") == "chart":
            self.charts.append(str(found["id"]))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link"):
            self._tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._tags and self._tags[-1] == "script":
            self.scripts[-1] += data
        elif self._tags and self._tags[-1] != "style":
            self.shown.append(data)

    @property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(re.search(r"^const FIGURES = (\{.*\});$", self.scripts[-1], re.M)[1])  # type: ignore[index]
        return found


def test_the_page_stands_alone_and_draws_what_it_has_a_place_for(report: Report) -> None:
    page = Page(report.html())
    assert page.loaded == ["data:,"]
    assert page.charts == list(page.figures) == ["memory0", "memory1", "lanes", "layers", "front"]
    assert len(page.scripts) == 2
    assert "Plotly" in page.scripts[0]


def test_the_page_shows_the_numbers_of_the_plan(report: Report) -> None:
    plan, text = report.plan, " ".join(Page(report.html()).shown)
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_total_bytes is not None
    numbers = (plan.baseline_peak_bytes, plan.predicted_reserved_bytes, plan.predicted_total_bytes, plan.budget_bytes)
    for num_bytes in numbers:
        assert show_bytes(num_bytes) in text
    assert f"{plan.predicted_slowdown:.2f}x the plain step" in text
    assert all(row.module_fqn in text for row in plan.rows)
    assert plan.explain() in text


def test_memory_over_a_step_peaks_where_the_plan_says(report: Report) -> None:
    plan = report.plan
    assert report.plain is not None
    assert report.planned is not None
    assert report.plain.peak_bytes == plan.baseline_peak_bytes
    assert report.planned.peak_bytes == plan.predicted_peak_bytes < plan.baseline_peak_bytes
    assert max(moment.reserved_bytes or 0 for moment in report.planned.moments) == plan.predicted_reserved_bytes
    assert max(moment.allocated_bytes or 0 for moment in report.planned.moments) == plan.predicted_allocated_bytes


def test_kinds_are_what_they_are(planned: tuple[Planner, Plan], report: Report) -> None:
    """Parameters and state are there all the time; gradients when the optimizer steps; checkpoints take activations."""
    planner, _ = planned
    profile = planner.profile
    assert report.plain is not None
    assert report.planned is not None
    for step in (report.plain, report.planned):
        for moment in step.moments:
            by_kind = dict(zip(KINDS, moment.live_bytes, strict=True))
            assert by_kind["parameters"] == profile.parameter_bytes + profile.buffer_bytes
            assert by_kind["optimizer state"] == profile.optimizer.state_bytes
            assert by_kind["gradients"] == (
                profile.parameter_bytes if moment.phase == "optimizer" else by_kind["gradients"]
            )
        assert {moment.phase for moment in step.moments} == {"forward", "backward", "optimizer"}
    held = [
        max(moment.live_bytes[KINDS.index("activations")] for moment in s.moments)
        for s in (report.plain, report.planned)
    ]
    assert held[1] < held[0]


def test_on_a_cpu_there_is_nothing_reserved(planned: tuple[Planner, Plan]) -> None:
    job = Job(small(), Config(), Hardware.detect("cpu"), "adamw")
    planner = Planner(job, Inputs((features(0, 4096, WIDTH),), {}))
    step = step_memory(planner, (Checkpoint("blocks.0"),), job.config)
    assert {moment.reserved_bytes for moment in step.moments} == {None}
    assert "reserved" not in [
        trace.get("name") for trace in Page(Report(planned[1], step).html()).figures["memory0"]["data"]
    ]


def test_state_that_travels_is_not_there_all_the_time() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    planner = Planner(Job(model, Config(), CARD, "adamw"), Inputs((torch.randn(2, 512),), {}))
    step = step_memory(planner, (OffloadOptimizer(1 << 20),), planner.job.config)
    state = {moment.live_bytes[KINDS.index("optimizer state")] for moment in step.moments}
    assert max(state) < planner.profile.optimizer.state_bytes // 2


def test_thinning_keeps_the_peaks() -> None:
    moments = tuple(Moment("forward", "", (number % 97, 0, 0, 0, 0, 0), 0, number % 89) for number in range(5000))
    step = StepMemory(moments, "predicted")
    thinned = step.thinned(100)
    assert len(thinned.moments) <= 104
    assert thinned.peak_bytes == step.peak_bytes == 96
    assert max(moment.reserved_bytes or 0 for moment in thinned.moments) == 88
    assert step.thinned(5000) is step


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "{0} %s \\u2028"]
)
def test_a_name_is_shown_and_never_run(report: Report, name: str) -> None:
    rows = tuple(dataclasses.replace(row, module_fqn=name, class_name=name) for row in report.plan.rows)
    hostile = dataclasses.replace(report.plan, model_class=name, device_name=name, inputs=(name,), rows=rows)
    page = Page(Report(hostile).html())
    assert len(page.scripts) == 2
    assert page.loaded == ["data:,"]
    assert any(name in text for text in page.shown)
    for text in page.figures["layers"]["data"][0]["text"]:  # Plotly takes some tags in a text for markup
        assert "<script" not in text
        assert "<img" not in text


def test_measured_numbers_stand_beside_the_predicted_ones(report: Report) -> None:
    numbers = (("reserved", 1_000_000_000, 999_000_000), ("live", None, 5))
    page = Page(Report(report.plan, measured=numbers).html())
    assert page.charts == ["layers", "front", "measured"]
    assert {"1.000 GB", "999.0 MB", "–"} <= set(page.shown)
    heights = {bar["name"]: bar["y"] for bar in page.figures["measured"]["data"]}
    assert heights == {"predicted": [1_000_000_000], "measured": [999_000_000]}, "what has no neighbour is in the table"


def test_a_page_says_that_nothing_was_measured(report: Report) -> None:
    of_a_plan = " ".join(Page(Report(report.plan).html()).shown)
    assert "Nothing was measured: this page was made of a plan" in of_a_plan
    of_a_run = " ".join(Page(Report(report.plan, elsewhere=(("on disk, in all", None, 0),)).html()).shown)
    assert "Nothing was measured in this run" in of_a_run
    assert "live_peak_bytes=measured.peak_bytes" in of_a_run
    assert "Nothing was measured" not in Page(Report(report.plan, measured_step_ms=1.0).html()).shown


def test_a_measured_step_stands_beside_the_predicted_one(report: Report) -> None:
    shown = Page(Report(report.plan, measured_step_ms=12.34).html()).shown
    assert "12.3 ms" in shown
    assert f"{report.plan.predicted_step_ms:.1f} ms" in shown


def test_what_waits_elsewhere_is_shown(report: Report) -> None:
    plan = dataclasses.replace(report.plan, host_bytes=3_000_000, movable_bytes=0)
    page = Page(Report(plan, elsewhere=(("on disk, in all", None, 2_000_000),)).html())
    shown = page.shown
    bars = {bar["name"]: bar["x"] for bar in page.figures["elsewhere"]["data"]}
    assert bars == {"predicted": [3_000_000], "measured": [2_000_000]}
    assert {"Host and disk", "3.0 MB", "2.0 MB"} <= set(shown)
    assert "Host and disk" not in Page(Report(dataclasses.replace(plan, host_bytes=0)).html()).shown


def test_a_measurement_shows_itself_in_a_notebook() -> None:
    with memscale.measure("cpu") as measured:
        small()(features(0, 64, WIDTH)).sum().backward()
    page = Page(measured._repr_html_())
    assert not page.loaded
    assert not page.scripts
    assert show_bytes(measured.breakdown["parameters"]) in page.shown
    assert show_bytes(measured.peak_bytes) in " ".join(page.shown)


def test_a_plan_shows_itself_in_a_notebook(report: Report) -> None:
    shown = report.plan._repr_html_()
    page = Page(shown)
    assert not page.loaded
    assert not page.scripts
    assert all(row.module_fqn in page.shown for row in report.plan.rows if row.techniques)
    assert show_bytes(report.plan.predicted_reserved_bytes or 0) in page.shown


def test_a_wrapped_model_reports_on_itself(tmp_path: pathlib.Path) -> None:
    model = small()
    with memscale.optimize(
        model, config=Config(force_optimize=True), sample_input=features(0, 4096, WIDTH)
    ) as executor:
        executor.report(tmp_path / "run.html")
        assert executor.plan is not None
        page = Page((tmp_path / "run.html").read_text())
        assert executor.plan.explain() in " ".join(page.shown)
    assert page.charts == ["memory0", "memory1", "lanes", "layers", "front"], "as of a plan"


def test_a_run_shows_the_step_of_its_last_plan_and_holds_no_batch(tmp_path: pathlib.Path) -> None:
    """Of a batch that has passed its shape is kept, not its memory."""
    model, data = small(), tmp_path / "run.json"
    optimizer = torch.optim.AdamW(model.parameters())
    with memscale.optimize(model, optimizer, Config(force_optimize=True)) as executor:
        batch = features(0, 4096, WIDTH)
        passed = weakref.ref(batch)
        model(batch).sum().backward()
        optimizer.step()
        del batch
        before = torch.get_rng_state(), [parameter.detach().clone() for parameter in model.parameters()]
        executor.report(data)
        assert executor.plan is not None
    assert passed() is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before[1], strict=True))
    made = Report.load(data)
    assert made.planned is not None
    assert made.planned.peak_bytes == executor.plan.predicted_peak_bytes
    assert made.plain is not None
    assert made.plain.peak_bytes == executor.plan.baseline_peak_bytes
    assert made.weighed is not None
    assert made.weighed.num_candidates > len(made.weighed.front) > 1


def test_a_run_whose_steps_cannot_be_shown_says_why(report: Report, tmp_path: pathlib.Path) -> None:
    model = small()
    with memscale.optimize(model, config=Config(force_optimize=True), sample_input=features(0, 64, WIDTH)) as executor:
        plan = executor.plan
    assert plan is not None
    executor = memscale.execute(model, plan)
    executor.report(tmp_path / "run.html")
    executor.detach()
    assert (
        "Not shown: the plan was made before, and no batch is known." in Page((tmp_path / "run.html").read_text()).shown
    )


def test_a_page_of_a_plan_alone_says_that_it_has_no_steps(report: Report) -> None:
    page = Page(Report(report.plan).html())
    assert any(text.startswith("Not shown: this page was made of a plan") for text in page.shown)
    assert not any("Not shown" in text for text in Page(report.html()).shown)


def test_live_bytes_are_a_line_of_their_own(report: Report) -> None:
    assert report.planned is not None
    lines = {trace["name"]: trace for trace in Page(report.html()).figures["memory1"]["data"]}
    assert max(lines["live"]["y"]) == report.planned.peak_bytes
    assert "stackgroup" not in lines["live"]


def test_layers_fill_their_chart(report: Report) -> None:
    axis = Page(report.html()).figures["layers"]["layout"]["xaxis"]
    assert axis["range"] == [-0.6, len(report.plan.rows) - 0.4]


def test_the_bound_says_for_which_budget_it_holds(report: Report) -> None:
    plan = dataclasses.replace(report.plan, least_slowdown=1.0, budget_bytes=7_057_000_000)
    texts = [note["text"] for note in Page(Report(plan).html()).figures["front"]["layout"]["annotations"]]
    assert "within 7.057 GB<br>no exact plan is faster" in texts


def test_all_that_was_weighed_is_drawn_around_the_front(report: Report) -> None:
    point = report.plan.front[0]
    lossy = dataclasses.replace(point, slowdown=1.5, is_exact=False, what="in 16 bits")
    weighed = PeakAgainstTime(report.plan.front, (point, lossy), 1234)
    page = Page(dataclasses.replace(report, weighed=weighed).html())
    dots = {trace["name"]: trace["x"] for trace in page.figures["front"]["data"]}
    assert dots["exact, weighed"] == [point.slowdown]
    assert dots["not exact, weighed"] == [1.5]
    assert any("all 1,234 plans that were weighed" in text for text in page.shown)
    assert not any("weighed" in text for text in Page(report.html()).shown)


def test_a_plan_that_promises_to_reserve_more_than_is_drawn_says_why(report: Report) -> None:
    """A chart that ended at 1.575 GB stood below a card with 1.599, without a word."""
    assert report.planned is not None
    drawn = max(moment.reserved_bytes or 0 for moment in report.planned.moments)
    cases = (
        (AllocatorUse(), 1.015, "with a margin"),
        (AllocatorUse(), 1.2, "which covers"),
        (None, 1.015, "which covers"),
    )
    for use, share, why in cases:
        promised = int(drawn * share)
        plan = dataclasses.replace(report.plan, predicted_reserved_bytes=promised, allocator=use)
        shown = " ".join(Page(dataclasses.replace(report, plan=plan).html()).shown)
        assert f"Reserved reaches {show_bytes(drawn)} here; the plan promises {show_bytes(promised)}, {why}" in shown
    assert "Reserved reaches" not in " ".join(Page(report.html()).shown)


def test_a_first_step_that_takes_more_than_the_one_that_is_drawn_is_named() -> None:
    """State that waits on the host is made on the device: the plan promises that peak, and a later step is lower."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    planner = Planner(Job(model, Config(force_optimize=True), CARD, "adamw"), Inputs((torch.randn(2, 512),), {}))
    plan = make_plan(planner.job, planner.inputs)
    actions = (OffloadOptimizer(OPTIMIZER_BUCKET_BYTES),)
    step = step_memory(planner, actions, planner.job.config)
    assert step.earlier_peak_bytes > step.peak_bytes
    told = f"which makes the optimizer's state, takes {show_bytes(step.earlier_peak_bytes)}"
    assert told in " ".join(Page(Report(plan, planned=step).html()).shown)
    assert "which makes the optimizer's state" not in " ".join(Page(Report(plan, plain=step).html()).shown)


@pytest.mark.parametrize(("share", "is_drawn"), [(0.5, True), (1.9, True), (3.0, False)])
def test_a_budget_above_the_peak_is_drawn_or_named(report: Report, share: float, is_drawn: bool) -> None:
    assert report.plain is not None
    top_bytes = max(moment.reserved_bytes or 0 for moment in report.plain.moments)
    budget_bytes = int(top_bytes * share)
    plan = dataclasses.replace(report.plan, budget_bytes=budget_bytes)
    page = Page(Report(plan, report.plain).html())
    layout = page.figures["memory0"]["layout"]
    lines = [note["text"] for note in layout["annotations"]]
    assert (f"budget {show_bytes(budget_bytes)}" in lines) == is_drawn
    assert (layout["yaxis"]["range"][1] > budget_bytes) == is_drawn
    assert ("is far above what is drawn" in " ".join(page.shown)) != is_drawn


def test_a_run_as_data_gives_the_same_page_elsewhere(tmp_path: pathlib.Path) -> None:
    """Plotly is needed where the page is made, not where the model is trained."""
    model, data = small(), tmp_path / "run.json"
    with memscale.optimize(
        model, config=Config(force_optimize=True), sample_input=features(0, 4096, WIDTH)
    ) as executor:
        executor.report(data, step_ms=12.5, live_peak_bytes=34_500_000)
        executor.report(tmp_path / "run.html", step_ms=12.5, live_peak_bytes=34_500_000)
    assert main(["report", str(data), "--output", str(tmp_path / "again.html")]) == 0
    again = Page((tmp_path / "again.html").read_text())
    assert again.shown == Page((tmp_path / "run.html").read_text()).shown
    assert "34.5 MB" in again.shown
    assert Report.load(data).measured_step_ms == 12.5


def test_what_a_run_did_not_write_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "run.json"
    data.write_text('{"type": "Report", "plan": 3}')
    assert main(["report", str(data), "--output", str(tmp_path / "page.html")]) == 2
    assert "is not what a run has written as JSON" in capsys.readouterr().err
    data.write_text('{"type": "Answer"}')
    assert main(["report", str(data), "--output", str(tmp_path / "page.html")]) == 2
    assert "this is not a plan" in capsys.readouterr().err


def test_what_is_no_path_is_a_clear_error() -> None:
    model = memscale.wrap(small())
    with pytest.raises(TypeError, match=r'path of a file, as in report\("run.html"\), not int'):
        model._memscale_executor.report(3)
    memscale.detach(model)


def test_without_a_plan_there_is_nothing_to_report(tmp_path: pathlib.Path) -> None:
    model = memscale.wrap(small())
    with pytest.raises(MemScaleError, match="no plan to report on yet"):
        model._memscale_executor.report(tmp_path / "run.html")
    memscale.detach(model)
    assert not (tmp_path / "run.html").exists()


def test_without_plotly_the_error_says_what_to_install(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(MemScaleError, match=r'pip install -c constraints.txt "\.\[report\]"'):
        report.html()
