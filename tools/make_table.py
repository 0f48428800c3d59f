"""Write README's table of five models from what the benchmark left in docs/results.

    python -m benchmarks --fake --results docs/results/table_fake.json    predict every row
    python -m benchmarks --results docs/results/table.json                measure them, one after the other
    python tools/make_table.py                                                      write README, and the same as text

Rows that nobody has measured yet show what was predicted. `tests/test_docs.py` checks that README and files agree.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from benchmarks.runs import Result, Subject

from benchmarks import table

DOCS = pathlib.Path(__file__).parent
README = DOCS.parent / "README.md"
MEASURED, PREDICTED = DOCS / "results" / "table.json", DOCS / "results" / "table_fake.json"
START, END = "<!-- written by tools/make_table.py -->", "<!-- end of the table -->"
SHOWN = ("plain", "balanced", "aggressive exact", "aggressive")


def readme_table(measured: list[Result], predicted: list[Result]) -> str:
    lines = [
        "| GB at the peak of a step, time | published: plain | published: optimised | plain | BALANCED "
        "| AGGRESSIVE, exact parts | AGGRESSIVE |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for subject in table.SUBJECTS:
        real, fake = table.by_variant(measured, subject), table.by_variant(predicted, subject)
        cells = [_cell(real.get(variant), fake.get(variant), real.get("plain")) for variant in SHOWN]
        lines.append(f"| {_title(subject)} | {_published(subject)} | {' | '.join(cells)} |")
    return "\n".join([START, *lines, END])


def _title(subject: Subject) -> str:
    return f"{subject.title}, {subject.shape}"


def _published(subject: Subject) -> str:
    return f"{table.published_plain(subject)} | {subject.published_optimised_gb:.2f}"


def _cell(real: Result | None, fake: Result | None, plain: Result | None) -> str:
    if real is not None and real.measured_bytes:
        ratio = table.time_ratio(real, plain) if real.variant != "plain" else "-"
        return f"**{real.measured_bytes / 1e9:.3f}**" + (f", {ratio}" if ratio != "-" else "")
    needed = real if real is not None and real.predicted_bytes else fake
    if needed is None:
        return ""
    suffix = " (out of memory)" if real is not None and real.failure.startswith("out of memory") else ""
    return f"{needed.predicted_bytes / 1e9:.3f}{suffix}"


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


def main() -> None:
    measured, predicted = table.read_results(MEASURED), table.read_results(PREDICTED)
    text = README.read_text()
    start, end = text.index(START), text.index(END) + len(END)
    README.write_text(text[:start] + readme_table(measured, predicted) + text[end:])
    for path, options in ((MEASURED, ""), (PREDICTED, " --fake")):
        path.with_suffix(".txt").write_text(as_text(path, f"python -m benchmarks{options}"))


if __name__ == "__main__":
    main()
