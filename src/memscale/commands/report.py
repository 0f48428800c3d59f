"""`memscale report`: one HTML page about a plan, made now or saved before, or about a run that has written its data."""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING

from memscale._config import Config
from memscale._errors import ConfigError
from memscale.commands import files
from memscale.commands.plan import make_plan_of, planner_of
from memscale.commands.progress import progress, quiet
from memscale.commands.subject import Asked, Subject, open_subject

if TYPE_CHECKING:
    from memscale.report.page import Report


def run(asked: Asked, config: Config, *, has_options: bool, output: pathlib.Path) -> None:
    """Write the page; `has_options` says that there are options which a plan that was saved cannot follow."""
    from memscale.report.charts import plotly
    from memscale.report.page import Report

    files.check_writable("--output", output)
    files.refuse_own_source(asked.name, "--output", output)
    plotly()
    if asked.name.endswith(".json"):
        if has_options:
            raise ConfigError(f"{asked.name} was made already: of the options only --output applies to it")
        path = pathlib.Path(asked.name)
        made = Report.load(path) if files.is_of_a_run(path) else Report(files.read_plan(path))
    else:
        made = _report_of(open_subject(asked), config)
    files.write("--output", output, made.html())
    print(f"written to {output}", file=sys.stderr)


def _report_of(subject: Subject, config: Config) -> Report:
    from memscale._planning.questions.shown_steps import shown_steps
    from memscale.report.page import Report

    with progress(f"planning {subject.name} on fake tensors"), quiet():
        made, weighed = make_plan_of(subject, config, weighs_all=True)
    with progress("rehearsing a step with the plan and one without"), quiet():
        plain, under, times = shown_steps(planner_of(subject, config, made), made)
        return Report(made, plain, under, times=times, weighed=weighed)
