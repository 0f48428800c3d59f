"""The published table: what five models peak at, plain and under MemScale, predicted and measured.

    python -m memscale.benchmarks [--fake | --quick] [--results FILE] [--only MODEL] [--json] [PATH.py:FACTORY]

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
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import memscale
from memscale import OptimizationMode, zoo
from memscale._execute import executor_of
from memscale._hardware import Hardware
from memscale._pipeline import Study
from memscale._plan import Plan
from memscale._policy import choose_strategy
from memscale._profile.inputs import Inputs, derive_inputs
from memscale.report.shell import table, what_is_done

GB = 1e9
NUM_STEPS = 2
EXACT = {"use_mixed_precision": False, "use_8bit_optimizer": False}
VARIANTS = ("plain", "balanced", "aggressive exact", "aggressive", "budget")


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """One row of the table."""

    title: str
    name: str
    batch: int
    length: int
    published_gb: float | None
    """Its plain peak, as published; None: out of memory."""
    published_optimised_gb: float | None
    floor_gb: float | None = None
    """1.25 times what a perfect, exact plan would need."""

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.length}"


SUBJECTS = (
    Subject("BERT-Base", "bert-base", 16, 128, 3.14, 0.84, 0.40),
    Subject("BERT-Large", "bert-large", 16, 128, 7.60, 2.02, 0.66),
    Subject("GPT-2 Medium", "gpt2-medium", 4, 512, 10.87, 2.61, 0.84),
    Subject("GPT-2 Large", "gpt2-large", 2, 512, 14.87, 4.68, 0.94),
    Subject("GPT-2 XL", "gpt2-xl", 1, 512, None, 9.25, 1.05),
)
QUICK = (SUBJECTS[0], Subject("GPT-2 small", "gpt2", 1, 256, None, None))


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One model under one variant."""

    title: str
    shape: str
    variant: str
    predicted_bytes: int
    measured_bytes: int | None
    host_bytes: int
    """Predicted; host and, where it does not suffice, disk."""
    predicted_slowdown: float
    cpu_seconds: float | None
    """Processor time of the measured step."""
    losses: tuple[float, ...]
    weights_hash: str
    what: str
    failure: str = ""


def config_of(variant: str, subject: Subject, **common: Any) -> memscale.Config:
    variants: dict[str, dict[str, Any]] = {
        "plain": {"mode": OptimizationMode.CONSERVATIVE, "enable_checkpointing": False},
        "balanced": {"force_optimize": True},
        "aggressive exact": {"mode": OptimizationMode.AGGRESSIVE, "force_optimize": True, **EXACT},
        "aggressive": {"mode": OptimizationMode.AGGRESSIVE, "force_optimize": True},
        "budget": {
            "mode": OptimizationMode.AGGRESSIVE, "memory_budget_gb": subject.published_optimised_gb, **EXACT,
        },
    }  # fmt: skip
    return memscale.Config(**variants[variant], **common)


# ---- predicting


def predict(subject: Subject, variants: Sequence[str] = VARIANTS) -> list[Result]:
    """The row for an RTX 3090, on fake tensors."""
    with zoo.quiet():
        model = zoo.build(subject.name)
        inputs = derive_inputs(model, subject.batch, subject.length)
        assert inputs is not None
        directory = tempfile.gettempdir()
        disk = shutil.disk_usage(directory).free
        hardware = dataclasses.replace(Hardware.from_name("RTX 3090"), disk_free_bytes=disk)
        common = {"offload_dir": directory, "enable_logging": False}
        study = Study(model, inputs, config_of("balanced", subject, **common), "adamw", hardware)
        results = []
        for variant in variants:
            if variant != "budget" or subject.published_optimised_gb is not None:
                plan = study.plan(choose_strategy(config_of(variant, subject, **common)))
                results.append(_predicted(subject, variant, plan))
    return results


def _predicted(subject: Subject, variant: str, plan: Plan) -> Result:
    is_plain = variant == "plain"
    return Result(
        title=subject.title,
        shape=subject.shape,
        variant=variant,
        predicted_bytes=plan.baseline_peak_bytes if is_plain else plan.predicted_peak_bytes,
        measured_bytes=None,
        host_bytes=0 if is_plain else plan.host_bytes + plan.movable_bytes,
        predicted_slowdown=1.0 if is_plain else plan.predicted_slowdown,
        cpu_seconds=None,
        losses=(),
        weights_hash="",
        what="nothing" if is_plain else what_is_done(plan),
    )


# ---- measuring: one variant of one model, in a process of its own


def measure(subject: Subject, variant: str, device_gb: float | None) -> Result:
    """Train for two steps on the simulated device; the second is measured."""
    import simgpu

    if device_gb is not None:
        simgpu.set_cap(int(device_gb * GB))
    with contextlib.ExitStack() as undo, zoo.quiet():
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="memscale-bench-"))
        torch.manual_seed(0)
        model, inputs = _real_model(subject)
        common = {"device": "simgpu", "offload_dir": directory, "enable_logging": False}
        if variant == "plain":
            model.to("simgpu")
        else:
            memscale.wrap(model, config_of(variant, subject, **common), inputs.kwargs)
        executor = executor_of(model)
        plan = executor.plan if executor is not None else None
        losses, seconds, peak_bytes = _train(model, inputs)
        if executor is not None:
            memscale.detach(model)
        return Result(
            title=subject.title,
            shape=subject.shape,
            variant=variant,
            predicted_bytes=plan.predicted_peak_bytes if plan is not None else 0,
            measured_bytes=peak_bytes,
            host_bytes=plan.host_bytes + plan.movable_bytes if plan is not None else 0,
            predicted_slowdown=plan.predicted_slowdown if plan is not None else 1.0,
            cpu_seconds=seconds,
            losses=tuple(losses),
            weights_hash=_hash_of(model),
            what=what_is_done(plan) if plan is not None else "nothing",
        )


def _real_model(subject: Subject) -> tuple[nn.Module, Inputs]:
    if zoo.is_factory(subject.name):
        own, sample = zoo.load_factory(subject.name, with_weights=True)
        return own.train(), Inputs.from_sample(sample)
    shape: Any = zoo.build(subject.name)
    model: Any = type(shape)(shape.config).train()
    meta = derive_inputs(model, subject.batch, subject.length)
    assert meta is not None
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (subject.batch, subject.length), generator=generator)
    ones = torch.ones_like(ids)
    return model, Inputs(kwargs={name: ones if name == "attention_mask" else ids.clone() for name in meta.kwargs})


def _train(model: nn.Module, inputs: Inputs) -> tuple[list[float], float, int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    on_device = inputs.map_tensors(lambda tensor: tensor.to("simgpu"))
    torch.manual_seed(2)
    losses, seconds = [], 0.0
    for _ in range(NUM_STEPS):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        start = time.process_time()
        optimizer.zero_grad()
        loss = model(*on_device.args, **on_device.kwargs).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        del loss
        seconds = time.process_time() - start
    return losses, seconds, torch.accelerator.max_memory_allocated()


def _hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def measure_apart(subject: Subject, variant: str, device_gb: float | None) -> Result:
    """In a process of its own: what it leaves behind cannot count."""
    order = json.dumps({"subject": dataclasses.asdict(subject), "variant": variant, "device_gb": device_gb})
    command = [sys.executable, "-m", "memscale.benchmarks.table", "--one", order]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        found = json.loads(run.stdout.splitlines()[-1])
        return Result(**{**found, "losses": tuple(found["losses"])})
    last = (run.stderr.strip().splitlines() or ["killed"])[-1]
    failure = "out of memory" if "OutOfMemoryError" in last else last
    return Result(subject.title, subject.shape, variant, 0, None, 0, 0.0, None, (), "", "", failure=failure[:200])


# ---- showing it


def to_text(results: Sequence[Result], subjects: Sequence[Subject]) -> str:
    header = ("model", "batch", "variant", "device GB", "predicted", "error", "host GB", "less", "time", "loss")
    rows: list[tuple[str, ...]] = [header]
    for subject in subjects:
        own = {result.variant: result for result in results if result.title == subject.title}
        rows += [_cells(result, own.get("plain"), subject) for result in own.values()]
    return "\n".join([*table(rows, left=(0, 1, 2, 9)), "", *_published_lines(results, subjects)])


def _cells(result: Result, plain: Result | None, subject: Subject) -> tuple[str, ...]:
    if result.failure:
        return (result.title, result.shape, result.variant, "-", "-", "-", "-", "-", "-", result.failure)
    best = result.measured_bytes or result.predicted_bytes
    base = (plain.measured_bytes or plain.predicted_bytes) if plain is not None else 0
    is_both = bool(result.measured_bytes and result.predicted_bytes)
    return (
        result.title,
        result.shape,
        result.variant,
        f"{result.measured_bytes / GB:.3f}" if result.measured_bytes else "-",
        f"{result.predicted_bytes / GB:.3f}" if result.predicted_bytes else "-",
        f"{result.predicted_bytes / result.measured_bytes - 1:+.2%}" if is_both and result.measured_bytes else "-",
        f"{result.host_bytes / GB:.2f}",
        f"{1 - best / base:.1%}" if base and result.variant != "plain" else "-",
        _time(result, plain),
        _loss(result, plain),
    )


def _time(result: Result, plain: Result | None) -> str:
    if result.cpu_seconds is not None and plain is not None and plain.cpu_seconds:
        return f"{result.cpu_seconds / plain.cpu_seconds:.2f}x"
    return f"({result.predicted_slowdown:.2f}x)"


def _loss(result: Result, plain: Result | None) -> str:
    if not result.losses or plain is None or not plain.losses or result is plain:
        return "-"
    if result.losses == plain.losses and result.weights_hash == plain.weights_hash:
        return "bit for bit"
    distance = max(abs(a - b) / abs(b) for a, b in zip(result.losses, plain.losses, strict=True))
    return f"within {distance:.1e}"


def _published_lines(results: Sequence[Result], subjects: Sequence[Subject]) -> list[str]:
    header = ("published, on an RTX 3090", "plain", "optimised", "ours, balanced", "ours, aggressive exact", "bar")
    rows: list[tuple[str, ...]] = [header]
    for subject in subjects:
        if subject.published_optimised_gb is None:
            continue
        own = {result.variant: result for result in results if result.title == subject.title}
        cells = [_gb_of(own.get(variant)) for variant in ("balanced", "aggressive exact")]
        plain = "out of memory" if subject.published_gb is None else f"{subject.published_gb:.2f}"
        rows.append((subject.title, plain, f"{subject.published_optimised_gb:.2f}", *cells, f"{subject.floor_gb:.2f}"))
    return table(rows, left=(0,)) if len(rows) > 1 else []


def _gb_of(result: Result | None) -> str:
    num_bytes = 0 if result is None else result.measured_bytes or result.predicted_bytes
    return f"{num_bytes / GB:.3f}" if num_bytes else "-"


def provenance() -> dict[str, Any]:
    """Where and with what this ran."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent, check=False
    )
    names = ("torch", "transformers", "numpy")
    return {
        "machine": Hardware.detect("cpu").device_name,
        "host_gb": round(Hardware.detect("cpu").host_total_bytes / GB, 1),
        "python": platform.python_version(),
        "versions": {"memscale": memscale.__version__, **{name: importlib.metadata.version(name) for name in names}},
        "commit": commit.stdout.strip() or "unknown",
    }


# ---- running it


class Store:
    """Results so far, on disk."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.results: list[Result] = []
        if path is not None and path.exists():
            for entry in json.loads(path.read_text())["results"]:
                self.results.append(Result(**{**entry, "losses": tuple(entry["losses"])}))

    def find(self, subject: Subject, variant: str) -> Result | None:
        return next((r for r in self.results if (r.title, r.variant) == (subject.title, variant)), None)

    def add(self, result: Result) -> None:
        self.results.append(result)
        if self.path is not None:
            self.path.write_text(to_json(self.results))


def to_json(results: Sequence[Result]) -> str:
    return json.dumps({**provenance(), "results": [dataclasses.asdict(result) for result in results]}, indent=1) + "\n"


def run(subjects: Sequence[Subject], store: Store, *, is_fake: bool, device_gb: float | None) -> None:
    for number, subject in enumerate(subjects, 1):
        print(f"[{number}/{len(subjects)}] {subject.title} ...", file=sys.stderr, flush=True)
        if is_fake:
            for result in predict(subject):
                store.add(result)
            continue
        for variant in VARIANTS:
            if variant == "budget" and subject.published_optimised_gb is None:
                continue
            if store.find(subject, variant) is None:
                print(f"    {variant} ...", file=sys.stderr, flush=True)
                store.add(_with_baseline(measure_apart(subject, variant, device_gb), store, subject))


def _with_baseline(result: Result, store: Store, subject: Subject) -> Result:
    """A plain run has no plan; what it would need is said by any other's, or by a prediction when it ran out."""
    if result.variant != "plain" or zoo.is_factory(subject.name):
        return result
    (predicted,) = predict(subject, ["plain"])
    return dataclasses.replace(result, predicted_bytes=predicted.predicted_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m memscale.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fake", action="store_true", help="predict only, for an RTX 3090")
    how.add_argument("--quick", action="store_true", help="BERT-Base and a small GPT-2, for real")
    parser.add_argument("factory", nargs="?", help="your own model: path/to/file.py:factory")
    parser.add_argument("--only", metavar="MODEL", help="one row, by its name")
    parser.add_argument("--results", type=pathlib.Path, help="keep results here, and go on from what is there")
    parser.add_argument("--device-gb", type=float, help="capacity of the simulated device")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        order = json.loads(options.one)
        result = measure(Subject(**order["subject"]), order["variant"], order["device_gb"])
        print(json.dumps(dataclasses.asdict(result)))
        return 0
    subjects = _subjects(parser, options)
    store = Store(options.results)
    run(subjects, store, is_fake=options.fake, device_gb=options.device_gb)
    print(to_json(store.results) if options.json else to_text(store.results, subjects))
    return 0


def _subjects(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[Subject, ...]:
    if options.factory is not None:
        if options.fake:
            parser.error("--fake is for the models of the table; `memscale estimate` predicts yours")
        zoo.check_name(options.factory)
        return (Subject(options.factory, options.factory, 0, 0, None, None),)
    subjects: tuple[Subject, ...] = QUICK if options.quick else SUBJECTS
    if options.only is not None:
        subjects = tuple(s for s in (*SUBJECTS, *QUICK) if options.only in (s.title, s.name))[:1]
        if not subjects:
            parser.error(f"no row called {options.only!r}; there are: {', '.join(s.title for s in SUBJECTS)}")
    return subjects


if __name__ == "__main__":
    sys.exit(main())
