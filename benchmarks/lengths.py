"""Lengths that vary: does every step keep to the budget, and what do the plans by shape cost?

    python -m benchmarks.lengths [--steps 300] [--announced] [--mode MODE] [--device simgpu] [--json FILE]

A small language model is trained on the simulated device, or on a card (`--device cuda`), with lengths that are
log-normal between 16 and 1,024; the longest comes late, at five sixths of the run, and is announced to nobody unless
`--announced` is given. The budget is 60 % of what the longest batch takes without any technique. A plain twin trains on
the same batches.

Bytes are what the device counts as allocated. Planning is the processor's time of this process between the beginning of
`wrap` and its end, and inside the hooks before each forward. Step times are predicted by the time model: those of the
plans in force, over those of the fastest plan that could be made for each length by itself. Exits with 1 when a bar is
missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import pathlib
import random
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memscale
from memscale._config import Config, OptimizationMode
from memscale._decide.choice import Choice
from memscale._decide.policy import choose_strategy
from memscale._plan import Plan
from memscale._planning.job import open_job
from memscale._planning.loop.shapes import predicted_ms
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes

SHORTEST, LONGEST, BATCH = 16, 1024, 2
VOCABULARY, WIDTH, HEADS, DEPTH = 128, 32, 2, 6
SHARE = 0.6
PLANNING_BAR_S = 15.0
TIME_BAR = 1.1
_SEED = 16


class Block(nn.Module):
    """Attention that keeps its scores, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ value).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Words(nn.Module):
    """Gives the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def lengths_of(num_steps: int) -> list[int]:
    """Log-normal, median 128; the longest comes once, at five sixths of the run."""
    draw = random.Random(_SEED)
    found = [min(LONGEST - 1, max(SHORTEST, round(draw.lognormvariate(math.log(128), 0.9)))) for _ in range(num_steps)]
    found[5 * num_steps // 6] = LONGEST
    return found


def ids_of(length: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=generator)


@dataclasses.dataclass(slots=True)
class Run:
    """What steps of one model have shown."""

    losses: list[float] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    plans: list[Plan | None] = dataclasses.field(default_factory=list)
    planning_s: float = 0.0
    switches_s: list[float] = dataclasses.field(default_factory=list)
    """Processor time before forwards that changed to another plan that was there already."""
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)


class _Clock:
    """Processor time inside the hooks before each forward."""

    def __init__(self, model: nn.Module) -> None:
        self._begun = self.seconds = 0.0
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_pre_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._begun = time.process_time()

    def _end(self, *_: Any) -> None:
        self.seconds = time.process_time() - self._begun


def train(model: nn.Module, lengths: list[int], device: str) -> Run:
    """Steps of the loop that a user would write."""
    run, clock = Run(), _Clock(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(_SEED)
    seen: list[Plan | None] = [None]
    for step, length in enumerate(lengths):
        ids = ids_of(length, step).to(device)
        torch.accelerator.reset_peak_memory_stats()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.peaks.append(torch.accelerator.max_memory_allocated())
        executor: Any = getattr(model, "_memscale_executor", None)
        plan = None if executor is None else executor.plan
        run.planning_s += clock.seconds
        if plan is not seen[-1] and any(plan is one for one in seen):
            run.switches_s.append(clock.seconds)
        seen.append(plan)
        run.plans.append(plan)
        del loss, ids
    run.weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return run


def config_for(device: str, mode: OptimizationMode) -> Config:
    model = Words().to(device)
    plain_bytes = memscale.estimate(model, ids_of(LONGEST, 0).to(device)).baseline_peak_bytes
    return Config(mode=mode, memory_budget_gb=SHARE * plain_bytes / 1e9, enable_logging=False)


def wrapped_run(lengths: list[int], device: str, config: Config, *, announced: bool) -> Run:
    torch.manual_seed(0)
    model = Words().to(device)
    begun = time.process_time()
    sample = ids_of(LONGEST, 0).to(device) if announced else None
    if announced:
        memscale.wrap(model, config, sample_input=sample, lengths=lengths)
    else:
        memscale.wrap(model, config)
    del sample
    wrapping_s = time.process_time() - begun
    run = train(model, lengths, device)
    run.planning_s += wrapping_s
    memscale.detach(model)
    return run


def plain_run(lengths: list[int], device: str) -> Run:
    torch.manual_seed(0)
    return train(Words().to(device), lengths, device)


def of_best(run: Run, lengths: list[int], device: str, config: Config, num_lengths: int) -> float:
    """Predicted time of the plans in force, over that of the best plan for each of some lengths, in the mean."""
    ordered = sorted(lengths)
    chosen = {ordered[index * (len(ordered) - 1) // max(1, num_lengths - 1)] for index in range(num_lengths)}
    spent = best = 0.0
    for length in sorted(chosen):
        model = Words().to(device)
        planner = Planner(open_job(model, config), Inputs((ids_of(length, 0).to(device),), {}))
        fastest = planner.plan(choose_strategy(planner.job.eligible))
        plain_ms = planner.cost_model().evaluate(Choice()).step_ms
        used = {id(p): p for p, other in zip(run.plans, lengths, strict=True) if other == length and p is not None}
        mean_ms = sum(predicted_ms(planner, plan, planner.job.eligible) for plan in used.values()) / len(used)
        weight = sum(1 for other in lengths if min(chosen, key=lambda one: abs(one - other)) == length)
        spent, best = spent + weight * mean_ms, best + weight * fastest.predicted_slowdown * plain_ms
    return spent / best


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--announced", action="store_true", help="the lengths are known to wrap")
    parser.add_argument("--mode", type=OptimizationMode, default=OptimizationMode.BALANCED)
    parser.add_argument("--best-of", type=int, default=12, help="lengths for which the best plan is looked for")
    parser.add_argument("--device", default="simgpu", help='"simgpu", or a card as "cuda"')
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.device.startswith("simgpu"):
        import simgpu  # noqa: F401  (registers the device)

    device, lengths = options.device, lengths_of(options.steps)
    config = config_for(device, options.mode)
    gc.collect()
    run = wrapped_run(lengths, device, config, announced=options.announced)
    gc.collect()
    plain = plain_run(lengths, device)
    budget_bytes = round((config.memory_budget_gb or 0) * 1e9)
    figures = {
        "steps": options.steps,
        "device": device,
        "mode": options.mode.value,
        "announced": options.announced,
        "budget_bytes": budget_bytes,
        "highest_bytes": max(run.peaks),
        "plain_highest_bytes": max(plain.peaks),
        "exact": run.losses == plain.losses and all(map(torch.equal, run.weights, plain.weights)),
        "plans": len({id(plan) for plan in run.plans}),
        "planning_s": round(run.planning_s, 2),
        "switches": len(run.switches_s),
        "slowest_switch_ms": round(1e3 * max(run.switches_s, default=0.0), 2),
        "of_best": round(of_best(run, lengths, device, config, options.best_of), 3),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return show(figures)


def show(figures: dict[str, Any]) -> int:
    """The figures with their bars; 1 where one is missed."""
    rows = [
        (
            "highest step",
            show_bytes(figures["highest_bytes"]),
            f"budget {show_bytes(figures['budget_bytes'])}",
            figures["highest_bytes"] <= figures["budget_bytes"],
        ),
        ("losses and weights", "equal" if figures["exact"] else "differ", "equal to the plain run's", figures["exact"]),
        (
            "planning",
            f"{figures['planning_s']:.2f} s",
            f"at most {PLANNING_BAR_S:.0f} s of processor time",
            figures["planning_s"] <= PLANNING_BAR_S,
        ),
        (
            "slowest of the switches",
            f"{figures['slowest_switch_ms']:.2f} ms",
            "under 5 ms",
            figures["slowest_switch_ms"] < 5.0,
        ),
        (
            "predicted time",
            f"{figures['of_best']:.3f}x",
            f"at most {TIME_BAR}x the best plan for each length",
            figures["of_best"] <= TIME_BAR,
        ),
    ]
    known = "announced" if figures["announced"] else "not announced"
    print(
        f"{figures['steps']} steps on {figures['device']}, mode {figures['mode']}, lengths {known}, "
        f"{figures['plans']} plans, {figures['switches']} switches; "
        f"the plain run peaks at {show_bytes(figures['plain_highest_bytes'])}"
    )
    for name, found, bar, is_kept in rows:
        print(f"{name:<24} {found:>10}  {bar}{'' if is_kept else '  MISSED'}")
    return 0 if all(is_kept for *_, is_kept in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
