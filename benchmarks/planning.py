"""How long does planning take? Processor seconds from a model to its plan, by stage, next to the bars.

    python -m benchmarks.planning [--device NAME ...] [--model NAME ...] [--budget NAME ...] [--json]

Models have shapes and no weights. Each is planned as `wrap` would do it with a cache that is empty, for this machine's
processor and for a card by its name, with a loose budget (85 % of the plain step's peak), a tight one (60 %), and for
the lowest peak that BALANCED allows. "new shape" is what it takes to loosen the tight plan for batches of half the
size, as a run does when such batches come. What counts is the time of the processor, so other work on the
machine matters little, and a second core does not help. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from memscale import zoo
from memscale._config import Config
from memscale._decide.choice import Choice
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.loop.shapes import loosened
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale._progress import Board
from memscale.report.tables import table

CARD = "RTX 3090"
BUDGETS: dict[str, float | None] = {"loose": 0.85, "tight": 0.6, "lowest": None}
"""Shares of the plain step's peak; None: as low as can be."""
NEW_SHAPE = "new shape"
NEW_SHAPE_BAR_S = 1.0
LAYERS, WIDTH = 100, 512


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch, and how long planning may take."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    smaller: Callable[[], Inputs]
    """Batches of another shape."""
    bar_s: float


class Deep(nn.Module):
    """A hundred equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _tokens(batch: int, length: int) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        return Inputs((), {"input_ids": ids, "labels": ids})

    return inputs


def _hidden(length: int) -> Callable[[], Inputs]:
    return lambda: Inputs((torch.empty(8, length, WIDTH, device="meta"),), {})


def _deep() -> nn.Module:
    with torch.device("meta"):
        return Deep().train()


CASES = {
    "bert-base": Case(lambda: zoo.build("bert-base"), _tokens(8, 128), _tokens(8, 64), 5.0),
    "gpt2-xl": Case(lambda: zoo.build("gpt2-xl"), _tokens(4, 512), _tokens(4, 256), 10.0),
    "100 layers": Case(_deep, _hidden(128), _hidden(64), 10.0),
}


class StageClock(Board):
    """Adds up the processor's time by the first word of the stage that is under way."""

    def __init__(self) -> None:
        super().__init__(lambda text: None)
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.counts: dict[str, int] = collections.defaultdict(int)
        self._stages, self._since = ["other"], time.process_time()

    def _pass(self) -> None:
        now = time.process_time()
        self.seconds[self._stages[-1]] += now - self._since
        self._since = now

    def begin(self, text: str) -> str:
        self._pass()
        word = text.split(" ")[0]
        self._stages.append("other" if word == "planning" else word)
        self.counts[self._stages[-1]] += 1
        return super().begin(text)

    def end(self, before: str) -> None:
        self._pass()
        self._stages.pop()
        super().end(before)


@contextlib.contextmanager
def clocked() -> Iterator[StageClock]:
    """Inside, stages are timed."""
    clock = StageClock()
    with clock:
        yield clock
    clock._pass()


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One plan."""

    model: str
    device: str
    budget: str
    seconds: float
    bar_s: float
    stages: dict[str, float]
    counts: dict[str, int]
    outcome: str


def run(model_name: str, case: Case, hardware: Hardware, device: str, budgets: Collection[str]) -> Iterator[Row]:
    model = case.build()
    planner = Planner(Job(model, Config(), hardware), case.inputs())
    held = planner.held((), Config())
    plain = planner.cost_model().peak_of(planner.profile.plain, Choice()) if held is None else held.reserved_bytes
    del planner
    tight = None
    for name, share in BUDGETS.items():
        if name in budgets or (name == "tight" and NEW_SHAPE in budgets):
            job = Job(model, _config(share, plain), hardware)
            plan, row = _timed(functools.partial(make_plan, job, case.inputs()), model_name, device, name, case.bar_s)
            tight = plan if name == "tight" else tight
            if name in budgets:
                yield row
    if NEW_SHAPE in budgets and tight is not None:
        job = Job(model, _config(BUDGETS["tight"], plain), hardware)
        yield _timed(
            lambda: loosened(Planner(job, case.smaller()), tight, job.eligible),
            model_name,
            device,
            NEW_SHAPE,
            NEW_SHAPE_BAR_S,
        )[1]


def _config(share: float | None, plain_bytes: int) -> Config:
    return Config(force_optimize=True) if share is None else Config(memory_budget_gb=plain_bytes * share / 1e9)


def _timed(
    plan: Callable[[], Plan | None], model_name: str, device: str, budget: str, bar_s: float
) -> tuple[Plan | None, Row]:
    gc.collect()
    made, outcome = None, "does not fit"
    with clocked() as clock:
        start = time.process_time()
        with contextlib.suppress(DoesNotFitError):
            made = plan()
            outcome = "as it was"
        seconds = time.process_time() - start
    if made is not None:
        outcome = f"{made.predicted_peak_bytes / 1e9:.3f} GB, {made.predicted_slowdown:.2f}x"
    return made, Row(model_name, device, budget, seconds, bar_s, dict(clock.seconds), dict(clock.counts), outcome)


STAGES = ("rehearsing", "recording", "playing", "costing", "deciding", "other")


def show(rows: list[Row]) -> str:
    header = ("model", "device", "budget", *STAGES, "all", "bar", "plan")
    lines = [
        (
            row.model,
            row.device,
            row.budget,
            *(_cell(row, name) for name in STAGES),
            f"{row.seconds:.2f}",
            f"{row.bar_s:.0f}" + (" missed" if row.seconds > row.bar_s else ""),
            row.outcome,
        )
        for row in rows
    ]
    return "\n".join(table([header, *lines], left=(0, 1, 2, len(header) - 1), underlined=True))


def _cell(row: Row, name: str) -> str:
    count = row.counts.get(name)
    return f"{row.stages.get(name, 0.0):.2f}" + (f" ({count})" if count and name != "other" else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning")
    parser.add_argument("--device", action="append", choices=["cpu", CARD])
    parser.add_argument("--model", action="append", choices=list(CASES))
    parser.add_argument("--budget", action="append", choices=[*BUDGETS, NEW_SHAPE])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    rows: list[Row] = []
    for device in asked.device or ["cpu", CARD]:
        hardware = Hardware.detect("cpu") if device == "cpu" else Hardware.from_name(device)
        for name in asked.model or CASES:
            for row in run(name, CASES[name], hardware, device, asked.budget or [*BUDGETS, NEW_SHAPE]):
                rows.append(row)
                if not asked.json:
                    print(f"{row.model}, {device}, {row.budget}: {row.seconds:.2f} s", file=sys.stderr, flush=True)
    print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) if asked.json else show(rows))
    return int(any(row.seconds > row.bar_s for row in rows))


if __name__ == "__main__":
    sys.exit(main())
