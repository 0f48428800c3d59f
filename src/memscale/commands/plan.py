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
    from memscale._plan import FrontPoint, Plan
    from memscale._planning.planner import Planner


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
        made = make_plan_of(subject, config, with_front=pareto is not None)
    _write_plan(made, output, pareto)
    _print_plan(made, as_json=as_json, explain=explain)
    for path in (output, pareto):
        if path is not None:
            print(f"written to {path}", file=sys.stderr)


def make_plan_of(subject: Subject, config: Config, *, with_front: bool) -> Plan:
    """The plan; with the front of everything that the mode allows, where it is to be drawn."""
    from memscale._planning import make_plan

    fronts: list[tuple[FrontPoint, ...]] = []
    made = make_plan(subject.job(config), subject.inputs, on_front=fronts.append if with_front else None)
    return dataclasses.replace(made, front=fronts[0], front_note="") if with_front else made


def planner_of(subject: Subject, config: Config, planned: Plan | None) -> Planner:
    """What rehearses steps under this plan, with tensors that travel as the plan says."""
    from memscale._planning.planner import Planner

    job = subject.job(config)
    if planned is not None:
        job = job.under(job.eligible.travel_of(planned).said_in(config))
    return Planner(job, subject.inputs)


def _write_plan(made: Plan, output: pathlib.Path | None, pareto: pathlib.Path | None) -> None:
    if pareto is not None:
        from memscale.report.page import Report

        files.write("--pareto", pareto, Report(made).html())
    if output is not None:
        files.write("--output", output, made.to_json())


def _print_plan(made: Plan, *, as_json: bool, explain: bool) -> None:
    if as_json:
        print(made.to_json(), end="")
    elif explain:
        print(made.explain())
    else:
        print("\n".join(terminal.plan_lines(made)))
