"""What a policy saves: models planned in earnest, with everything eligible and as the policy says.

The models are drawn anew, so no case of training is among them; each is planned by a policy that has seen nothing of
its architecture. Both plans are made from nothing, with no cache, in turns; what counts is the processor's time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import torch
from torch import nn

from benchmarks.policy import shapes
from memscale import Config, OptimizationMode, zoo
from memscale._decide.policy import learned
from memscale._decide.policy.learned import Artifact
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale.report.tables import table

CARDS = ("RTX 3090", "RTX 3070", "RTX 4060")
SHARES = (0.85, 0.6, 0.4)
"""Budgets, over what the plain step reserves."""
NUM_BLOCKS = 12
EVERYTHING = Config(mode=OptimizationMode.AGGRESSIVE, enable_logging=False)
LEARNED = Config(auto_policy="learned", enable_logging=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """One model within one budget."""

    family: str
    card: str
    share: float
    all_s: float
    learned_s: float
    """The processor's seconds with everything eligible, and as the policy says."""
    all_slowdown: float | None
    learned_slowdown: float | None
    """The predicted slowdown of both plans; None: nothing fits."""
    strategy: str


def plan_both_ways(artifacts: Mapping[str, Artifact], num: int) -> Iterator[Planned]:
    """So many models of every architecture, by the artifact that has not seen it."""
    torch.set_num_threads(1)
    for architecture, artifact in artifacts.items():
        families = shapes.ARCHITECTURES.get(architecture, (architecture,))
        for number in range(num):
            rng = random.Random(f"planned {architecture} {number}")
            family = families[number % len(families)]
            yield from _model(family, rng, artifact)


def _model(family: str, rng: random.Random, artifact: Artifact) -> Iterator[Planned]:
    shape = dataclasses.replace(shapes.draw_shape(family, rng), device_type="cuda", num_blocks=NUM_BLOCKS)
    model, inputs = shapes.build(shape)
    card = rng.choice(CARDS)
    hardware = Hardware.from_name(card)
    planner = Planner(Job(model, EVERYTHING, hardware), inputs)
    held = planner.held((), EVERYTHING)
    plain_bytes = planner.profile.static_bytes if held is None else held.reserved_bytes
    del planner
    with zoo.quiet(), _used(artifact):
        for share in SHARES:
            budget = {"memory_budget_gb": plain_bytes * share / 1e9}
            all_s, everything = _timed(model, inputs, EVERYTHING.replace(**budget), hardware)
            learned_s, short = _timed(model, inputs, LEARNED.replace(**budget), hardware)
            slowdown, mine = (None if plan is None else plan.predicted_slowdown for plan in (everything, short))
            reason = None if short is None else short.strategy
            strategy = "nothing fits" if reason is None else str(reason.numbers.get("strategy", reason.rule))
            if reason is not None and "does not suffice" in reason.rule:
                strategy += ", widened"
            row = Planned(family, card, share, all_s, learned_s, slowdown, mine, strategy)
            print(row, file=sys.stderr, flush=True)
            yield row


@contextlib.contextmanager
def _used(artifact: Artifact) -> Iterator[None]:
    """Inside, this is the policy that is asked."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "policy.json"
        path.write_text(artifact.to_json())
        with mock.patch.object(learned, "ARTIFACT", path):
            yield


def _timed(model: nn.Module, inputs: Inputs, config: Config, hardware: Hardware) -> tuple[float, Plan | None]:
    gc.collect()
    start, plan = time.process_time(), None
    with contextlib.suppress(DoesNotFitError):
        plan = make_plan(Job(model, config, hardware), inputs)
    return time.process_time() - start, plan


def planned_table(rows: Sequence[Planned]) -> str:
    header = ("model", "card", "budget", "everything", "learned", "ratio", "slowdown", "learned", "what was rehearsed")
    lines = [
        (
            row.family,
            row.card,
            f"{row.share:.0%}",
            f"{row.all_s:.2f} s",
            f"{row.learned_s:.2f} s",
            f"{row.learned_s / row.all_s:.2f}",
            _shown(row.all_slowdown),
            _shown(row.learned_slowdown),
            row.strategy,
        )
        for row in rows
    ]
    return "\n".join([*table([header, *lines], left=(0, 1, 8)), "", _summary(rows)])


def _summary(rows: Sequence[Planned]) -> str:
    both = [(row.all_slowdown, row.learned_slowdown) for row in rows if row.all_slowdown and row.learned_slowdown]
    lost = sum(row.all_slowdown is not None and row.learned_slowdown is None for row in rows)
    close = sum(mine <= 1.01 * best for best, mine in both)
    total = sum(row.learned_s for row in rows) / sum(row.all_s for row in rows)
    median = statistics.median(row.learned_s / row.all_s for row in rows)
    mean = statistics.fmean(mine / best for best, mine in both)
    return (
        f"processor time of planning: {total:.2f} of the full search's in all, {median:.2f} in the median\n"
        f"within 1 % of its step time: {close} of {len(both)} plans, the mean {mean:.4f}\n"
        f"fits with everything eligible, and not by the policy: {lost} of {len(rows)}"
    )


def _shown(slowdown: float | None) -> str:
    return "does not fit" if slowdown is None else f"{slowdown:.3f}x"
