"""Write README's table of five models from what the benchmarks left in docs/results.

    python -m benchmarks --fake --results docs/results/table_fake.json    predict every row
    python -m benchmarks --results docs/results/table.json                measure them, one after the other
    python -m tools.make_table --times [NAME ...]                         predict step times, minutes each
    python -m tools.make_table                                            write README and docs/results/measured.md

Step times are those of the plan within the published optimised peak, default `Config`: `benchmarks/bars.py` makes it. A
row that nobody has predicted yet says so. `tests/test_docs.py` checks that README and files agree.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import bars, table
from benchmarks.runs import Result, Subject
from memscale import OptimizationMode
from memscale.report.explain import what_is_done

ROOT = pathlib.Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results" / "measured.md"
RESULTS = ROOT / "docs" / "results"
MEASURED, PREDICTED = RESULTS / "table.json", RESULTS / "table_fake.json"
START, END = "<!-- written by tools/make_table.py -->", "<!-- end of the table -->"
SHOWN = ("plain", "balanced", "aggressive exact", "aggressive")
TIMES = RESULTS / "step_times.json"
HEADER = (
    "| RTX 3090, fp32, AdamW | plain: published GB | plain: predicted GB "
    "| optimised: published GB | MemScale: predicted GB | its step: predicted |"
)


def readme_table(predicted: list[Result], times: Sequence[dict[str, Any]]) -> str:
    lines = [HEADER, "| --- | ---: | ---: | ---: | ---: | ---: |"]
    known = {entry["name"]: entry for entry in times}
    for subject in table.SUBJECTS:
        cells = [
            table.published_plain(subject),
            _gb(table.by_variant(predicted, subject).get("plain")),
            f"{subject.published_optimised_gb:.2f}",
            *_time_cells(known.get(subject.name)),
        ]
        lines.append(f"| {_title(subject)} | {' | '.join(cells)} |")
    return "\n".join([START, *lines, END])


def measured_table(measured: list[Result], predicted: list[Result]) -> str:
    """Peaks on the simulated device, and the processor time of a step over the plain one's."""
    lines = [
        "| GB at the peak of a step, processor time | plain | BALANCED | AGGRESSIVE, exact parts | AGGRESSIVE |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for subject in table.SUBJECTS:
        real, fake = table.by_variant(measured, subject), table.by_variant(predicted, subject)
        cells = [_cell(real.get(variant), fake.get(variant), real.get("plain")) for variant in SHOWN]
        lines.append(f"| {_title(subject)} | {' | '.join(cells)} |")
    return "\n".join([START, *lines, END])


def _cell(real: Result | None, fake: Result | None, plain: Result | None) -> str:
    if real is not None and real.measured_bytes:
        ratio = table.time_ratio(real, plain) if real.variant != "plain" else "-"
        return f"**{real.measured_bytes / 1e9:.3f}**" + (f", {ratio}" if ratio != "-" else "")
    needed = real if real is not None and real.predicted_bytes else fake
    if needed is None:
        return ""
    suffix = " (out of memory)" if real is not None and real.failure.startswith("out of memory") else ""
    return f"{needed.predicted_bytes / 1e9:.3f}{suffix}"


def _title(subject: Subject) -> str:
    return f"{subject.title}, {subject.shape}"


def _gb(result: Result | None) -> str:
    return "" if result is None else f"{result.predicted_bytes / 1e9:.2f}"


def _time_cells(entry: dict[str, Any] | None) -> tuple[str, str]:
    """Reserved bytes, and the step as a multiple of the plain one."""
    if entry is None:
        return ("not planned yet", "")
    reserved = f"{entry['reserved_bytes'] / 1e9:.2f}"
    if not entry["fits"]:
        return (f"does not fit: {reserved}", "")
    return (reserved, f"{entry['step_ms']:.0f} ms, {entry['slowdown']:.2f}x")


# ---- predicting times


def read_times() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TIMES.read_text())["rows"] if TIMES.exists() else []
    return found


def predict_times(names: Sequence[str]) -> None:
    """Plan each row within its published optimised peak, in place of what was known of it."""
    budgets = {subject.name: subject.published_optimised_gb for subject in table.SUBJECTS}
    for bar in bars.BARS:
        if bar.name in names and bar.budget_gb == budgets.get(bar.name):
            row = bars.plan_bar(bar, OptimizationMode.BALANCED)
            rest = [entry for entry in read_times() if entry["name"] != bar.name]
            known = {"card": bar.card, "rows": [*rest, _entry(row)]}
            TIMES.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{bar.title}: {row.plan.predicted_slowdown:.2f}x", file=sys.stderr, flush=True)


def _entry(row: bars.Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "name": row.bar.name,
        "budget_gb": row.bar.budget_gb,
        "fits": plan.fits,
        "reserved_bytes": plan.predicted_reserved_bytes or plan.predicted_peak_bytes,
        "plain_ms": row.plain_ms,
        "step_ms": row.step_ms,
        "slowdown": plan.predicted_slowdown,
        "least_slowdown": plan.least_slowdown,
        "what": what_is_done(plan),
        "commit": table.commit(),
    }


def as_text(path: pathlib.Path, command: str) -> str:
    """The whole table, with where it ran."""
    data: dict[str, Any] = json.loads(path.read_text())
    results = table.read_results(path)
    titles = {result.title for result in results}
    subjects = [subject for subject in table.SUBJECTS if subject.title in titles]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    commits = ", ".join(sorted({result.commit for result in results}))
    where = f"# {data['machine']}, {data['num_cores']} cores, {data['host_gb']} GB; Python {data['python']}, {versions}"
    return f"$ {command}\n{where}\n# commit: {commits}\n\n{table.to_text(results, subjects)}\n"


def _put(path: pathlib.Path, written: str) -> None:
    text = path.read_text()
    start, end = text.index(START), text.index(END) + len(END)
    path.write_text(text[:start] + written + text[end:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.make_table", description=(__doc__ or "").split("\n")[0])
    names = [subject.name for subject in table.SUBJECTS]
    parser.add_argument("--times", nargs="*", metavar="NAME", help=f"predict these first: {', '.join(names)}")
    options = parser.parse_args(argv)
    if options.times is not None:
        predict_times(options.times or names)
    measured, predicted = table.read_results(MEASURED), table.read_results(PREDICTED)
    _put(README, readme_table(predicted, read_times()))
    _put(PAGE, measured_table(measured, predicted))
    for path, suffix in ((MEASURED, ""), (PREDICTED, " --fake")):
        path.with_suffix(".txt").write_text(as_text(path, f"python -m benchmarks{suffix}"))


if __name__ == "__main__":
    main()
