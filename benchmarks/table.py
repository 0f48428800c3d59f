"""The published table: what five models peak at, plain and under MemScale, predicted and measured.

    python -m benchmarks [--fake | --quick] [--results FILE] [--only MODEL] [--json] [PATH.py:FACTORY]

`--fake` predicts every row for an RTX 3090, without running or allocating anything. `--quick` trains BERT-Base and a
small GPT-2 for real; without either all rows are trained. "For real" is on simgpu, the simulated device of the tests
(it must be installed): its bytes are its allocator's, exact; it computes on the CPU, so times are processor time. Every
run is a process of its own; `--results` keeps what is done, and a second call goes on from there.

Each model is trained with AdamW: as it is; BALANCED and AGGRESSIVE as low as they go (`force_optimize`); AGGRESSIVE
without what is not exact; and within the peak that was published. The published figures, measured by others on an RTX
3090, stand beside ours. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import memscale
from benchmarks.runs import GB, VARIANTS, Result, Subject, measure_apart, predict_apart
from memscale import zoo
from memscale._errors import quoted, shown
from memscale._hardware import Hardware
from memscale.report.tables import table

SUBJECTS = (
    Subject("BERT-Base", "bert-base", 16, 128, 3.14, 0.84, 0.40),
    Subject("BERT-Large", "bert-large", 16, 128, 7.60, 2.02, 0.66),
    Subject("GPT-2 Medium", "gpt2-medium", 4, 512, 10.87, 2.61, 0.84),
    Subject("GPT-2 Large", "gpt2-large", 2, 512, 14.87, 4.68, 0.94),
    Subject("GPT-2 XL", "gpt2-xl", 1, 512, None, 9.25, 1.05, cap_gb=10.0, host_gb=13.0, host_gb_at_budget=10.0),
)
QUICK = (SUBJECTS[0], Subject("GPT-2 small", "gpt2", 1, 256))


# ---- showing it


def to_text(results: Sequence[Result], subjects: Sequence[Subject]) -> str:
    header = (
        *("model", "batch", "variant", "device GB", "predicted", "error"),
        *("host GB", "disk GB", "less", "time", "of bound", "training"),
    )
    rows: list[tuple[str, ...]] = [header]
    for subject in subjects:
        own = by_variant(results, subject)
        rows += [_cells(result, own.get("plain")) for result in own.values()]
    notes = ["Times in brackets: predicted. Host, where nothing was measured: what waits there or on disk."]
    return "\n".join([*table(rows, left=(0, 1, 2, 11)), "", *notes, "", *_published_lines(results, subjects)]).rstrip()


def by_variant(results: Sequence[Result], subject: Subject) -> dict[str, Result]:
    """A row's results, in the order of the variants."""
    found = {result.variant: result for result in results if result.title == subject.title}
    return {variant: found[variant] for variant in VARIANTS if variant in found}


def _cells(result: Result, plain: Result | None) -> tuple[str, ...]:
    head = (result.title, result.shape, result.variant)
    predicted = _gb(result.predicted_bytes or None)
    if result.failure:
        return (*head, "-", predicted, *["-"] * 6, result.failure)
    error = f"{result.predicted_bytes / result.measured_bytes - 1:+.2%}" if result.measured_bytes else "-"
    host_bytes = result.predicted_waiting_bytes if result.host_bytes is None else result.host_bytes
    return (
        *head,
        _gb(result.measured_bytes),
        predicted,
        error,
        _gb(host_bytes),
        _gb(result.disk_bytes),
        less(result, plain),
        time_ratio(result, plain),
        "-" if result.predicted_of_bound is None else f"({result.predicted_of_bound:.2f}x)",
        training(result, plain),
    )


def _gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GB:.3f}"


def device_bytes(result: Result | None) -> int:
    """As measured, else as predicted; 0: unknown."""
    return 0 if result is None else result.measured_bytes or result.predicted_bytes


def less(result: Result, plain: Result | None) -> str:
    base = device_bytes(plain)
    return f"{1 - device_bytes(result) / base:.1%}" if base and result.variant != "plain" else "-"


def time_ratio(result: Result, plain: Result | None) -> str:
    if result.measured_bytes is None:
        return f"({result.predicted_slowdown:.2f}x)"
    if result.cpu_seconds is not None and plain is not None and plain.cpu_seconds:
        return f"{result.cpu_seconds / plain.cpu_seconds:.2f}x"
    return "-"


def training(result: Result, plain: Result | None) -> str:
    """How its losses and weights compare with those of the plain run."""
    if not result.losses or plain is None or not plain.losses or result is plain:
        return "-"
    if result.losses == plain.losses and result.weights_hash == plain.weights_hash:
        return "bit for bit"
    distance = max(abs(a - b) / abs(b) for a, b in zip(result.losses, plain.losses, strict=True))
    return f"losses within {distance:.0e}" if distance else "losses bit for bit"


def _published_lines(results: Sequence[Result], subjects: Sequence[Subject]) -> list[str]:
    header = ("published, on an RTX 3090", "plain", "optimised", "ours: balanced", "aggressive exact", "its bar")
    rows: list[tuple[str, ...]] = [header]
    for subject in subjects:
        if subject.published_optimised_gb is not None:
            own = by_variant(results, subject)
            cells = [_gb(device_bytes(own.get(variant)) or None) for variant in ("balanced", "aggressive exact")]
            published = f"{subject.published_optimised_gb:.2f}"
            rows.append((subject.title, published_plain(subject), published, *cells, f"{subject.bar_gb:.2f}"))
    return table(rows, left=(0,)) if len(rows) > 1 else []


def published_plain(subject: Subject) -> str:
    return "out of memory" if subject.published_gb is None else f"{subject.published_gb:.2f}"


# ---- keeping it


@functools.cache
def commit() -> str:
    here = pathlib.Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False).stdout.strip()
    except OSError:  # no git
        found = ""
    return found or "unknown"


def provenance() -> dict[str, Any]:
    """On what and with what this ran."""
    hardware = Hardware.detect("cpu")
    names = ("torch", "transformers", "numpy")
    return {
        "machine": hardware.device_name,
        "num_cores": os.cpu_count(),
        "host_gb": round(hardware.host_total_bytes / GB, 1),
        "python": platform.python_version(),
        "versions": {"memscale": memscale.__version__, **{name: importlib.metadata.version(name) for name in names}},
    }


def to_json(results: Sequence[Result]) -> str:
    return json.dumps({**provenance(), "results": [dataclasses.asdict(result) for result in results]}, indent=1) + "\n"


def read_results(path: pathlib.Path) -> list[Result]:
    try:
        return [Result.from_dict(entry) for entry in json.loads(path.read_text())["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise memscale.MemScaleError(f"{path} does not hold results of this benchmark: {quoted(error)}") from error


class Store:
    """Results so far, in a file that is whole at any time."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.results: list[Result] = read_results(path) if path is not None and path.exists() else []

    def find(self, subject: Subject, variant: str) -> Result | None:
        return by_variant(self.results, subject).get(variant)

    def add(self, results: Sequence[Result]) -> None:
        if self.path is not None and self.path.exists():
            self.results = read_results(self.path)  # another process may do other rows
        self.results += [dataclasses.replace(result, commit=commit()) for result in results]
        if self.path is not None:
            partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            try:
                partial.write_text(to_json(self.results))
                partial.replace(self.path)
            except OSError as error:
                raise memscale.MemScaleError(f"{self.path} cannot be written: {error.strerror}") from error


# ---- running it


def run_fake(subjects: Sequence[Subject], store: Store) -> None:
    """Several at once: each is one core's work."""
    left = [subject for subject in subjects if store.find(subject, "plain") is None]
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        # The deepest takes longest.
        futures = {pool.submit(predict_apart, subject): subject for subject in reversed(left)}
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            store.add(future.result())
            _say(f"[{number}/{len(left)}] {futures[future].title}: predicted")


def run_real(subjects: Sequence[Subject], store: Store) -> None:
    todo = [(subject, variant) for subject in subjects for variant in subject.variants]
    for number, (subject, variant) in enumerate(todo, 1):
        label = f"[{number}/{len(todo)}] {subject.title}, {variant}"
        if store.find(subject, variant) is not None:
            _say(f"{label}: done before")
            continue
        _say(f"{label} ...")
        start = time.perf_counter()
        result = measure_apart(subject, variant)
        store.add([result])
        said = result.failure or f"{device_bytes(result) / GB:.3f} GB"
        _say(f"{label}: {said} ({time.perf_counter() - start:.0f} s)")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(
    *,
    fake: bool = False,
    quick: bool = False,
    factory: str | None = None,
    only: str | None = None,
    results: pathlib.Path | None = None,
    as_json: bool = False,
) -> None:
    """The table, on stdout; progress on stderr. `MemScaleError` for what cannot be run."""
    subjects = choose_subjects(fake=fake, quick=quick, factory=factory, only=only)
    if results is not None:
        _check_results(results)
    if not fake and importlib.util.find_spec("simgpu") is None:
        raise memscale.MemScaleError("real runs need simgpu, the simulated device: pip install ./simgpu; or use --fake")
    store = Store(results)
    (run_fake if fake else run_real)(subjects, store)
    found = [store.find(subject, variant) for subject in subjects for variant in subject.variants]
    failures = [result.failure for result in found if result is not None]
    if factory is not None and failures and all(failures):
        raise memscale.MemScaleError(f"nothing could be measured: {failures[0]}")
    print(to_json(store.results) if as_json else to_text(store.results, subjects))


def _check_results(path: pathlib.Path) -> None:
    """Before anything that takes long."""
    try:
        has_parent, is_other = path.absolute().parent.is_dir(), path.exists() and not path.is_file()
    except OSError as error:  # a name that is too long
        raise memscale.MemScaleError(f"--results {shown(str(path))} cannot be used: {error.strerror}") from error
    if not has_parent:
        raise memscale.MemScaleError(f"--results {path}: there is no directory {path.parent}")
    if is_other:
        raise memscale.MemScaleError(f"--results {path}: that is not a regular file")


def choose_subjects(*, fake: bool, quick: bool, factory: str | None, only: str | None) -> tuple[Subject, ...]:
    if fake and quick:
        raise memscale.MemScaleError("--fake predicts, --quick measures: choose one")
    if factory is not None:
        if fake:
            raise memscale.MemScaleError("--fake is for the models of the table; `memscale estimate` predicts yours")
        if not zoo.is_factory(factory):
            raise memscale.MemScaleError(
                f"{shown(factory)} is no path/to/file.py:factory; rows of the table: --only MODEL"
            )
        if only is not None:
            raise memscale.MemScaleError("--only is for the rows of the table, and the factory is your own model")
        zoo.check_name(factory)
        return (Subject(factory, factory, 0, 0),)
    rows = QUICK if quick else SUBJECTS
    if only is None:
        return rows
    chosen = tuple(subject for subject in rows if only in (subject.title, subject.name))
    if not chosen:
        raise memscale.MemScaleError(f"no row called {shown(only)}; there are: {', '.join(s.name for s in rows)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fake", action="store_true", help="predict only, for an RTX 3090")
    how.add_argument("--quick", action="store_true", help="BERT-Base and a small GPT-2, for real")
    parser.add_argument("factory", nargs="?", help="your own model: path/to/file.py:factory")
    parser.add_argument("--only", metavar="MODEL", help="one row, by its name")
    parser.add_argument("--results", type=pathlib.Path, help="keep results here, and go on from what is there")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    try:
        run(**vars(parser.parse_args(argv)))
    except memscale.MemScaleError as error:
        print(f"memscale: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
