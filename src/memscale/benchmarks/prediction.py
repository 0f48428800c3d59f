"""Does the number hold? Predicted against measured peak of a training step, for every model of the suite.

    python -m memscale.benchmarks.prediction [--json] [NAME ...]

Each model is trained for two AdamW steps on the CPU, as it is and with `force_optimize`; the second step, with
`zero_grad` and the optimizer's step in it, is measured with `memscale.measure()` and compared with what the plan
said beforehand. Exits with 1 when any error is over 1 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import memscale
from memscale import zoo
from memscale._execute import executor_of
from memscale._plan import Plan
from memscale.benchmarks.models import Case, case, suite
from memscale.report.shell import table

MAX_ERROR = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One model, treated in one way."""

    name: str
    treatment: str
    """"plain" or "optimized"."""
    num_actions: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """The prediction's, as a share of what was measured; negative when it was too low."""
        return self.predicted_bytes / self.measured_bytes - 1


def compare(subject: Case) -> tuple[Row, Row]:
    """The model as it is, and optimized as far as it goes."""
    optimized, plan = _optimized_peak(subject)
    plain = measured_peak(subject, subject.build)
    return (
        Row(subject.name, "plain", 0, plan.baseline_peak_bytes, plain),
        Row(subject.name, "optimized", len(plan.actions), plan.predicted_peak_bytes, optimized),
    )


def _optimized_peak(subject: Case) -> tuple[int, Plan]:
    plans: list[Plan] = []

    def build() -> nn.Module:
        config = memscale.Config(force_optimize=True, enable_logging=False)
        model = memscale.wrap(subject.build(), config, subject.batch(0))
        executor = executor_of(model)
        assert executor is not None
        assert executor.plan is not None, "there was a sample, so there is a plan"
        plans.append(executor.plan)
        return model

    peak_bytes = measured_peak(subject, build)
    return peak_bytes, plans[0]


def measured_peak(subject: Case, build: Callable[[], nn.Module]) -> int:
    """The peak of the second AdamW step of a fresh model, above what else is alive in the process."""
    gc.collect()
    with memscale.measure("cpu") as strangers:
        pass
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    _step(subject, model, optimizer, subject.batch(0))
    batch = subject.batch(1)
    gc.collect()
    with memscale.measure("cpu") as measured:
        _step(subject, model, optimizer, batch)
    return measured.peak_bytes - strangers.peak_bytes


def _step(subject: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    optimizer.zero_grad()
    loss = subject.loss(model(**batch))
    loss.backward()
    optimizer.step()


def to_text(rows: Sequence[Row]) -> str:
    header = ("model", "step", "actions", "predicted MB", "measured MB", "error")
    cells = [
        (
            row.name,
            row.treatment,
            str(row.num_actions),
            f"{row.predicted_bytes / 1e6:.3f}",
            f"{row.measured_bytes / 1e6:.3f}",
            f"{row.error:+.3%}",
        )
        for row in rows
    ]
    return "\n".join(table([header, *cells], left=(0, 1)))


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps([{**dataclasses.asdict(row), "error": row.error} for row in rows], indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    names = [entry.name for entry in suite()]
    parser = argparse.ArgumentParser(
        prog="python -m memscale.benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of: {', '.join(names)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"no model called {unknown[0]!r} in the suite; there are: {', '.join(names)}")
    zoo.load_transformers()
    rows: list[Row] = []
    for number, name in enumerate(options.names or names, 1):
        print(f"[{number}/{len(options.names or names)}] {name} ...", file=sys.stderr, flush=True)
        with zoo.quiet():
            rows += compare(case(name))
    worst = max(rows, key=lambda row: abs(row.error))
    print(to_json(rows) if options.json else to_text(rows))
    verdict = f"worst error: {worst.error:+.3%} ({worst.name}, {worst.treatment}); the bar is {MAX_ERROR:.0%}"
    print(verdict, file=sys.stderr if options.json else sys.stdout)
    return int(abs(worst.error) > MAX_ERROR)


if __name__ == "__main__":
    sys.exit(main())
