"""The loss on a real text, in 32 bits, with 8-bit optimizers and with the full stack, held to its bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from benchmarks.full_stack.setups import MIN_STATE_REDUCTION, prepared, state_bytes
from benchmarks.text import Characters, Learned, build, learn
from memscale.report.tables import table

WIDTH = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Run(Learned):
    """One training."""

    name: str
    bar: float
    """How far the final loss may be from that of the first run, as a share."""
    losses: tuple[float, ...]
    state_bytes: int
    """Optimizer state between steps, embeddings and other 32-bit state included."""
    seconds: float


RUNS = {"AdamW": 0.0, "AdamW, 8-bit state": 0.01, "AdamW8bit": 0.01, "full stack": 0.02}
COLORS = dict(zip(RUNS, ("#4c566a", "#5e9fd4", "#a3be8c", "#d08770"), strict=True))


def train(name: str, text: Characters, steps: int) -> Run:
    model = build(len(text.alphabet), WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with prepared(name, model, optimizer, text.batch(0)) as used:
        torch.manual_seed(1)
        losses, seconds = learn(model, used, text, steps)
        between_steps_bytes = state_bytes(model, used)
    return Run(name, RUNS[name], losses, between_steps_bytes, seconds)


def show_runs(runs: Sequence[Run]) -> str:
    first = runs[0]
    rows = [
        (
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.distance(first):.2%}",
            f"{run.bar:.0%}" if run.bar else "",
            f"{run.state_bytes / 1e6:.3f} MB",
            f"{first.state_bytes / run.state_bytes:.2f}x",
            f"{run.seconds:.0f} s",
        )
        for run in runs
    ]
    header = ("run", "final loss", "from 32 bits", "bar", "optimizer state", "smaller", "time")
    return "\n".join(table([header, *rows], left=(0,)))


def meets_bars(runs: Sequence[Run]) -> bool:
    first = runs[0]
    return all(
        run.distance(first) <= run.bar and first.state_bytes >= MIN_STATE_REDUCTION * run.state_bytes
        for run in runs[1:]
    )
