"""Does training in 16 bits learn as well as in 32? A character-level GPT-2 on a real text, one curve a precision.

    python -m benchmarks.precision [--steps N] [--json]
    python -m benchmarks.precision --bounds

Every run starts from the same weights and sees the same batches. Beside the loss stands what the forward of one step
leaves for backward, in bytes. The bar: the mean loss of the last 20 steps within 1 % of fp32's. Exits with 1 when it is
missed. On a CPU without 16-bit instructions the runs in 16 bits are several times slower; their numbers are the same.

`--bounds`: small BERT and GPT-2 models over 200 steps instead. How far each step's loss is from that of the same
step in fp32, as a share of it; the mean and the largest, beside the bounds that are promised.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.models import case
from benchmarks.text import Characters, Learned, build, learn
from memscale._plan import MixedPrecision
from memscale._torch.live_bytes import LiveBytes
from memscale.report.tables import table
from memscale.techniques.precision import autocast

MAX_DISTANCE = 0.01
WIDTH = 96
PRECISIONS: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16", "float16")
COLORS = {"float32": "#4c566a", "bfloat16": "#5e9fd4", "float16": "#d08770"}


@dataclasses.dataclass(frozen=True, slots=True)
class Run(Learned):
    """One training."""

    precision: str
    losses: tuple[float, ...]
    seconds: float
    held_bytes: int
    """Live after the forward of one step, above what was live before it."""
    num_skipped_steps: int


def train(kind: Literal["float32", "bfloat16", "float16"], text: Characters, steps: int) -> Run:
    model = build(len(text.alphabet), WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with contextlib.ExitStack() as undo:
        attached = None if kind == "float32" else autocast.attach(MixedPrecision(kind), model, "cpu", undo)
        held_bytes = held_by_a_forward(model, text.batch(0))
        losses, seconds = learn(model, optimizer, text, steps)
        scale = attached.scale if attached is not None else None
    return Run(kind, losses, seconds, held_bytes, scale.num_skipped_steps if scale is not None else 0)


def held_by_a_forward(model: nn.Module, batch: dict[str, Any]) -> int:
    """Bytes that backward will need. The RNG is put back: this forward is not part of the training."""
    with torch.random.fork_rng(devices=[]):
        books = LiveBytes("cpu", 1)
        books.see_all([list(model.parameters()), list(model.buffers()), batch], "other")
        before = books.total_bytes
        with books:
            loss = model(**batch).loss
            held_bytes = books.total_bytes - before
        del loss
    return held_bytes


# ------------------------------------------------------------------------------------------------------------ bounds


BOUNDED = ("bert", "gpt2")
"""Of `benchmarks.models`."""
HALVES: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
NUM_BOUNDED_STEPS = 200
MEAN_BOUND = {"bfloat16": 0.002, "float16": 0.0005}
LARGEST_BOUND = {"bfloat16": 0.01, "float16": 0.002}
"""Of the distances from the fp32 curve, as a share of the loss."""


@dataclasses.dataclass(frozen=True, slots=True)
class Distance:
    """Of one curve in 16 bits from that in fp32."""

    model: str
    precision: str
    mean: float
    largest: float
    first_loss: float
    last_loss: float
    """In fp32."""

    @property
    def holds(self) -> bool:
        return self.mean <= MEAN_BOUND[self.precision] and self.largest <= LARGEST_BOUND[self.precision]


def measure_distances(num_steps: int) -> list[Distance]:
    """Each curve in 16 bits against that of the same model in fp32, which is trained once."""
    exact = {name: _curve(name, "float32", num_steps) for name in BOUNDED}
    return [_distance(name, kind, exact[name]) for kind in HALVES for name in BOUNDED]


def measure_distance(name: str, kind: Literal["bfloat16", "float16"], num_steps: int) -> Distance:
    return _distance(name, kind, _curve(name, "float32", num_steps))


def _distance(name: str, kind: Literal["bfloat16", "float16"], exact: Sequence[float]) -> Distance:
    ours = _curve(name, kind, len(exact))
    distances = [abs(a - b) / a for a, b in zip(exact, ours, strict=True)]
    return Distance(name, kind, statistics.fmean(distances), max(distances), exact[0], exact[-1])


def _curve(name: str, kind: Any, num_steps: int) -> list[float]:
    entry, losses = case(name), []
    torch.manual_seed(11)
    model = entry.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with contextlib.ExitStack() as undo:
        if kind != "float32":
            autocast.attach(MixedPrecision(kind), model, "cpu", undo)
        for step in range(num_steps):
            loss = entry.loss(model(**entry.batch(step % 8)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def show_distances(found: Sequence[Distance]) -> str:
    rows = [
        (
            each.precision,
            each.model,
            f"{each.first_loss:.3f} to {each.last_loss:.3f}",
            f"{each.mean:.4%}",
            f"{MEAN_BOUND[each.precision]:.2%}",
            f"{each.largest:.3%}",
            f"{LARGEST_BOUND[each.precision]:.1%}",
        )
        for each in found
    ]
    header = ("precision", "model", "loss in fp32", "mean distance", "bound", "largest", "bound")
    return "\n".join(table([header, *rows], left=(0, 1)))


# -------------------------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print every loss as JSON, as docs/results/precision.json")
    parser.add_argument("--bounds", action="store_true", help="small BERT and GPT-2 models against the promised bounds")
    options = parser.parse_args(argv)
    if options.bounds:
        found = measure_distances(NUM_BOUNDED_STEPS)
        print(show_distances(found))
        return 0 if all(each.holds for each in found) else 1
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    text = Characters()
    runs = [train(kind, text, options.steps) for kind in PRECISIONS]
    if options.json:
        print(json.dumps([dataclasses.asdict(run) for run in runs]))
    else:
        print(show(runs))
    return 0 if all(run.distance(runs[0]) <= MAX_DISTANCE for run in runs) else 1


def show(runs: Sequence[Run]) -> str:
    rows = [
        (
            run.precision,
            f"{run.final_loss:.4f}",
            f"{run.distance(runs[0]):.2%}",
            f"{run.held_bytes / 1e6:.2f} MB",
            str(run.num_skipped_steps),
            f"{run.seconds:.0f} s",
        )
        for run in runs
    ]
    header = ("precision", "final loss", "from fp32", "held for backward", "skipped steps", "time")
    return "\n".join(table([header, *rows], left=(0,)))


if __name__ == "__main__":
    sys.exit(main())
