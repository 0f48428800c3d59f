"""`memscale plan`: the plan that `memscale.wrap` would attach."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING

from memscale._config import Config
from memscale.commands import files
from memscale.commands.progress import progress, quiet
from memscale.commands.subject import Asked, Subject, open_subject
from memscale.report import terminal

if TYPE_CHECKING:
    from memscale._plan import Plan
    from memscale._planning.planner import Planner
    from memscale.report.peak_against_time import PeakAgainstTime


def run(
    asked: Asked,
    config: Config,
    *,
    output: pathlib.Path | None,
    pareto: pathlib.Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Make a plan, write it where that was asked for, and print it."""
    for option, path in (("--output", output), ("--pareto", pareto)):
        files.check_writable(option, path)
        files.refuse_own_source(asked.name, option, path)
    files.refuse_same_file("--output", output, "--pareto", pareto)
    if pareto is not None:
        from memscale.report.charts import plotly

        plotly()  # before anything that takes long
    subject = open_subject(asked)
    with progress(f"planning {asked.name} on fake tensors"), quiet():
        made, weighed = make_plan_of(subject, config, weighs_all=pareto is not None)
    _write_plan(made, weighed, output, pareto)
    _print_plan(made, as_json=as_json, explain=explain)
    for path in (output, pareto):
        if path is not None:
            print(f"written to {path}", file=sys.stderr)


def make_plan_of(subject: Subject, config: Config, *, weighs_all: bool) -> tuple[Plan, PeakAgainstTime | None]:
    """The plan; and everything that the mode allows with its front, which the plan carries then, where it is drawn."""
    from memscale._planning import make_plan

    weighed: list[PeakAgainstTime] = []
    made = make_plan(subject.job(config), subject.inputs, on_weighed=weighed.append if weighs_all else None)
    if not weighed:
        return made, None
    return dataclasses.replace(made, front=weighed[0].front, front_note=""), weighed[0]


def planner_of(subject: Subject, config: Config, planned: Plan | None) -> Planner:
    """What rehearses steps under this plan, with tensors that travel as the plan says."""
    from memscale._planning.planner import Planner

    job = subject.job(config)
    if planned is not None:
        job = job.under(job.eligible.travel_of(planned).said_in(config))
    return Planner(job, subject.inputs)


def _write_plan(
    made: Plan, weighed: PeakAgainstTime | None, output: pathlib.Path | None, pareto: pathlib.Path | None
) -> None:
    if pareto is not None:
        from memscale.report.page import Report

        files.write("--pareto", pareto, Report(made, weighed=weighed).html())
    if output is not None:
        files.write("--output", output, made.to_json())


def _print_plan(made: Plan, *, as_json: bool, explain: bool) -> None:
    if as_json:
        print(made.to_json(), end="")
    elif explain:
        print(made.explain())
    else:
        print("\n".join(terminal.plan_lines(made)))
