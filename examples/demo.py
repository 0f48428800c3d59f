"""Train a small GPT-2 with and without MemScale, on whatever device there is, and compare.

    make demo            or    python examples/demo.py [--json FILE] [--steps N]

The model has random weights and is trained on random tokens, so nothing is downloaded. The budget given to
`memscale.wrap` is half of what the plain step was measured to need. Memory is measured in one run of each side,
with nothing else alive; time in another, where the two sides take turns: measuring slows a step down.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault(
    "MEMSCALE_MEASURE", "0"
)  # nominal throughput: the same plan, and the same bytes, on every machine

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import memscale

KINDS = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "other")
BUDGET_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Size:
    """Deep and narrow with a small vocabulary: activations dominate, as they do in real training."""

    layers: int = 8
    width: int = 256
    heads: int = 4
    vocabulary: int = 1024
    batch: int = 8
    length: int = 256


@dataclasses.dataclass(frozen=True)
class Run:
    """A few training steps of one side; the last one was measured."""

    losses: list[float]
    """A Python float holds a 32-bit loss exactly, so equal floats are equal bits."""
    weights_digest: str
    """SHA-256 over every bit of every parameter after the last step."""
    peak_bytes: int
    by_kind: dict[str, int]
    timeline: list[tuple[float, dict[str, int]]]
    plan: memscale.Plan | None


class Trainer:
    """A model, its optimizer and its data; the same seed gives the same training."""

    def __init__(self, size: Size, device: torch.device, budget_gb: float | None) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        config = GPT2Config(
            n_layer=size.layers,
            n_embd=size.width,
            n_head=size.heads,
            vocab_size=size.vocabulary,
            n_positions=size.length,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config).to(device).train()
        self.plan: memscale.Plan | None = None
        if budget_gb is not None:
            wish = memscale.Config(memory_budget_gb=budget_gb, enable_logging=False)
            self.model = memscale.wrap(self.model, wish, sample_input=self.batch(0))
            self.plan = memscale.executor_of(self.model).plan
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        shape = (self.size.batch, self.size.length)
        tokens = torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)
        return {"input_ids": tokens, "labels": tokens}

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def timed_step(self, number: int) -> float:
        batch = self.batch(number)
        synchronize(self.device)
        start = time.perf_counter()
        self.step(batch)
        synchronize(self.device)
        return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def measured_run(size: Size, device: torch.device, budget_gb: float | None, steps: int, bar: Bar) -> Run:
    """Train for some steps and measure the memory of the last one."""
    gc.collect()
    trainer = Trainer(size, device, budget_gb)
    losses = []
    for number in range(steps - 1):
        losses.append(trainer.step(trainer.batch(number)))
        bar.advance()
    batch = trainer.batch(steps - 1)
    gc.collect()
    with memscale.measure(device) as measured:
        losses.append(trainer.step(batch))
    bar.advance()
    return Run(
        losses=losses,
        weights_digest=digest(trainer.model),
        peak_bytes=measured.peak_bytes,
        by_kind={kind: measured.breakdown[kind] for kind in KINDS},
        timeline=[(sample.seconds, dict(sample.by_kind)) for sample in measured.timeline],
        plan=trainer.plan,
    )


def digest(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().cpu().numpy().tobytes())
    return total.hexdigest()


def step_seconds(size: Size, device: torch.device, budget_gb: float, steps: int, bar: Bar) -> tuple[float, float]:
    """Median seconds of a step of each side. They take turns, so that a busy machine hits both."""
    sides = (Trainer(size, device, None), Trainer(size, device, budget_gb))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(steps + 1):
        for side, record in zip(sides, times, strict=True):
            seconds = side.timed_step(number)
            if number:  # the first step allocates optimizer state
                record.append(seconds)
            bar.advance()
    return statistics.median(times[0]), statistics.median(times[1])


class Bar:
    """Progress: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self.progress = total, 0, progress
        self.task = progress.add_task("training", total=total) if progress is not None else None

    def say(self, text: str) -> None:
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, description=text)
        else:
            print(f"[{self.done}/{self.total} steps] {text} ...", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.done += 1
        if self.progress is not None and self.task is not None:
            self.progress.advance(self.task)


@dataclasses.dataclass(frozen=True)
class Result:
    """Both sides of the comparison."""

    size: Size
    device: str
    num_steps: int
    plain: Run
    wrapped: Run
    budget_bytes: int
    plain_s: float
    wrapped_s: float

    @property
    def plan(self) -> memscale.Plan:
        assert self.wrapped.plan is not None
        return self.wrapped.plan


def compare(size: Size, device: torch.device, steps: int, timed_steps: int, bar: Bar) -> Result:
    bar.say("training the plain model")
    plain = measured_run(size, device, None, steps, bar)
    budget_gb = round(plain.peak_bytes * BUDGET_SHARE / 1e9, 4)
    bar.say("training it with MemScale")
    wrapped = measured_run(size, device, budget_gb, steps, bar)
    bar.say("timing both")
    plain_s, wrapped_s = step_seconds(size, device, budget_gb, timed_steps, bar)
    return Result(size, device.type, steps, plain, wrapped, int(budget_gb * 1e9), plain_s, wrapped_s)


def to_table(result: Result) -> Table:
    """The one table that all of this is for."""
    size, plain, wrapped = result.size, result.plain, result.wrapped
    table = Table(
        title=f"GPT-2, {size.layers} layers of width {size.width}, batch {size.batch} x {size.length}, AdamW, "
        f"fp32, on {result.device}",
        caption=f"budget {megabytes(result.budget_bytes)}; plan: {what_was_done(result.plan)}; "
        f"predicted peak {megabytes(result.plan.predicted_peak_bytes)}",
    )
    table.add_column("peak memory by kind")
    for name in ("plain", "MemScale", "change"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        table.add_row(kind, *both(plain.by_kind[kind], wrapped.by_kind[kind]))
    table.add_section()
    table.add_row("peak", *both(plain.peak_bytes, wrapped.peak_bytes), style="bold")
    ratio = result.wrapped_s / result.plain_s
    table.add_row("seconds a step", f"{result.plain_s:.2f}", f"{result.wrapped_s:.2f}", f"{ratio:.2f} x")
    table.add_section()
    verdicts = (("losses", plain.losses == wrapped.losses), ("weights", plain.weights_digest == wrapped.weights_digest))
    for name, same in verdicts:
        table.add_row(f"{name} of {result.num_steps} steps", "", "", "identical, bit for bit" if same else "DIFFERENT")
    return table


def both(plain_bytes: int, wrapped_bytes: int) -> tuple[str, str, str]:
    change = f"{wrapped_bytes / plain_bytes - 1:+.1%}" if plain_bytes else ""
    return megabytes(plain_bytes), megabytes(wrapped_bytes), change


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def what_was_done(plan: memscale.Plan) -> str:
    counts = collections.Counter(type(action).__name__ for action in plan.actions)
    return ", ".join(f"{name} x {count}" for name, count in counts.items()) or "nothing"


def to_json(result: Result) -> str:
    """What `tools.make_figures` draws from."""

    def side(run: Run) -> dict[str, object]:
        return {
            "peak_bytes": run.peak_bytes,
            "by_kind": run.by_kind,
            "timeline": [[round(seconds, 4), *(kinds[kind] for kind in KINDS)] for seconds, kinds in run.timeline],
        }

    data = {
        "size": dataclasses.asdict(result.size),
        "device": result.device,
        "torch": torch.__version__,
        "kinds": KINDS,
        "plain": side(result.plain),
        "wrapped": side(result.wrapped),
        "budget_bytes": result.budget_bytes,
        "predicted_peak_bytes": result.plan.predicted_peak_bytes,
        "plan": what_was_done(result.plan),
        "plain_s": result.plain_s,
        "wrapped_s": result.wrapped_s,
        "losses_identical": result.plain.losses == result.wrapped.losses,
        "weights_identical": result.plain.weights_digest == result.wrapped.weights_digest,
    }
    return json.dumps(data) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--steps", type=int, default=3, help="training steps of each side, the last one measured")
    parser.add_argument("--timed-steps", type=int, default=4, help="steps of each side for the time")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="of the model or its batch")
    options = vars(parser.parse_args(argv))
    size = Size(**{field.name: options[field.name] for field in dataclasses.fields(Size)})
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    total = 2 * options["steps"] + 2 * (options["timed_steps"] + 1)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = Bar(total, progress if console.is_terminal else None)
        result = compare(size, device, options["steps"], options["timed_steps"], bar)
    Console(width=None if sys.stdout.isatty() else 110).print(to_table(result))
    if options["json"] is not None:
        options["json"].write_text(to_json(result))
    same = result.plain.losses == result.wrapped.losses and result.plain.weights_digest == result.wrapped.weights_digest
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
