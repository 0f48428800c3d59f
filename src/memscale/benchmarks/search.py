"""Is the plan the best there is? The search against brute force, its speed, and its laws.

    python -m memscale.benchmarks.search [--profiles N] [--seed N]

- Optimum: random models of 1 to 8 blocks, of which some are equal, under every treatment. Every way of treating every
  block is evaluated, with the optimizer's state on the device and offloaded; for 101 budgets between the lowest and the
  highest peak the plan found is compared with the fastest there is. The bar is 1 %.
- Speed: 100 blocks, all equal, of four kinds, and no two alike, with five treatments and two runs. The bar is 1 s of
  processor time, the best of three.
- Laws: over rising budgets no plan is slower than the one before it, and none peaks above its budget.

Nothing is trained: profiles are drawn at random, from a seed. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memscale._choice import Choice, Run, Treatment
from memscale._config import Config
from memscale._decide import decide
from memscale._hardware import Hardware
from memscale._peak import CostModel
from memscale._profile import Layer, OptimizerCost, Profile, Segment, StepTrace
from memscale._search import search
from memscale.report.shell import table

MAX_EXCESS, MAX_SECONDS = 0.01, 1.0
RUNS = (Run(), Run(offloads_optimizer=True))
TREATMENTS: tuple[Treatment, ...] = ("keep", "selective", "offload", "checkpoint", "stream")
_MB = 10**6
_RECOMPUTED = {"keep": 0.0, "selective": 0.5, "offload": 0.0, "checkpoint": 1.0, "stream": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Of a model drawn at random; megabytes, and megabytes moved for time."""

    kept: dict[str, int]
    temporaries: int
    parameters: int
    time: int


def random_block(chance: random.Random) -> Block:
    kept = chance.randint(20, 400)
    less = {"selective": 0.5, "offload": 0.05, "checkpoint": 0.2, "stream": 0.2}
    keeps = {name: max(1, int(kept * share * chance.uniform(0.3, 1.5))) for name, share in less.items()}
    return Block(
        {"keep": kept, **keeps, "stream": keeps["checkpoint"]},
        chance.randint(0, 100),
        chance.randint(1, 80),
        chance.randint(1, 500),
    )


def random_blocks(chance: random.Random, num_blocks: int, num_kinds: int) -> list[Block]:
    kinds = [random_block(chance) for _ in range(num_kinds)]
    return kinds if num_kinds == num_blocks else [chance.choice(kinds) for _ in range(num_blocks)]


def _trace(blocks: Sequence[Block], how: str) -> StepTrace:
    def segment(
        phase: Any, name: str, peak: int, net: int, moved: float, *, sent: int = 0, fetched: int = 0
    ) -> Segment:
        work = {"flops": 0, "matmul_bytes": 0, "other_bytes": int(moved * _MB)}
        traffic = {"sent_bytes": sent * _MB, "fetched_bytes": fetched * _MB}
        return Segment(phase, name, peak * _MB, net * _MB, **work, **traffic)

    named = [(f"b.{index}", block) for index, block in enumerate(blocks)]
    segments = [segment("forward", "", 1, 1, 1)]
    for name, block in named:
        visit = block.parameters if how == "stream" else 0
        kept = block.kept[how]
        sent = block.kept["keep"] - kept if how == "offload" else 0
        peak = kept + block.temporaries + visit
        segments.append(segment("forward", name, peak, kept, block.time, sent=sent, fetched=visit))
        segments.append(segment("forward", "", 0, 0, 0))
    segments += [segment("forward", "", 50, 30, 50), segment("backward", "", 60, -30, 50)]
    for name, block in reversed(named):
        visit, kept = (block.parameters if how == "stream" else 0), block.kept[how]
        gradients = 0 if how == "stream" else block.parameters
        peak = max(0, block.kept["keep"] - kept) + block.temporaries + block.parameters + visit
        fetched = block.kept["keep"] - kept if how == "offload" else visit
        moved = block.time * (2 + _RECOMPUTED[how])
        segments.append(segment("backward", name, peak, gradients - kept, moved, sent=visit, fetched=fetched))
        segments.append(segment("backward", "", 0, 0, 0))
    return StepTrace((*segments, segment("backward", "", 1, 0, 1)))


def make_model(blocks: Sequence[Block], link_bytes_per_s: float = 1e9) -> tuple[Profile, Hardware]:
    """A profile with every treatment, and a device on which a byte moved costs a nanosecond."""
    layers = [
        Layer(f"b.{i}", "Block", b.parameters * _MB, b.parameters * _MB, True, str(b), 1) for i, b in enumerate(blocks)
    ]
    size = sum(layer.param_bytes for layer in layers) + 20 * _MB
    profile = Profile(
        device_type="cuda",
        source="static",
        model_class="Random",
        inputs=(),
        parameter_bytes=size,
        buffer_bytes=0,
        input_bytes=_MB,
        layers=(Layer("stem", "Stem", 20 * _MB, 20 * _MB, False, "stem", 1), *layers),
        optimizer=OptimizerCost("adamw", 2 * size, size, 7 * size, offloaded_step_bytes=min(size, 30 * _MB)),
        plain=_trace(blocks, "keep"),
        variants={how: _trace(blocks, how) for how in TREATMENTS if how != "keep"},
        rest_optimizer=OptimizerCost("adamw", 40 * _MB, 20 * _MB, 140 * _MB, offloaded_step_bytes=20 * _MB),
    )
    card = dataclasses.replace(
        Hardware.from_name("RTX 3090"), memory_bytes_per_s=1e9, link_bytes_per_s=link_bytes_per_s
    )
    return profile, dataclasses.replace(card, host_available_bytes=10**12, total_bytes=10**12, free_bytes=10**12)


# ---- brute force


def all_outcomes(model: CostModel, run: Run) -> tuple[Any, Any]:
    """Peaks and times of every way of treating every block: `CostModel.evaluate`, for all of them at once."""
    names = tuple(model.blocks)
    ways = np.stack(np.meshgrid(*[np.arange(len(TREATMENTS))] * len(names), indexing="ij"), -1).reshape(-1, len(names))
    extras = {name: [model.extras(run, name, t) for t in TREATMENTS] for name in names}

    def total(field: str) -> Any:
        columns = (np.array([getattr(e, field) for e in extras[n]])[ways[:, i]] for i, n in enumerate(names))
        return sum(columns, np.zeros(len(ways)))

    streamed = total("streamed_bytes")
    live = model.base_bytes() + total("static_bytes") + np.rint(model.optimizer.resident_bytes(run, streamed))
    peak, ms = live, total("ms")
    for index, owner in enumerate(model.owners):
        column = ways[:, names.index(owner)] if owner else np.zeros(len(ways), np.int64)
        each = [model.stretch(run, treatment if owner else None, index) for treatment in TREATMENTS]
        peak = np.maximum(peak, live + np.array([stretch.peak_bytes for stretch in each])[column])
        live = live + np.array([stretch.net_bytes for stretch in each])[column]
        ms = ms + np.array([stretch.ms for stretch in each])[column]
    peak = np.maximum(peak, live + np.rint(model.optimizer.step_bytes(run, streamed)))
    return peak, model.step_ms(run, ms, streamed)


@dataclasses.dataclass(frozen=True, slots=True)
class Optimum:
    num_blocks: int
    num_profiles: int
    num_ways: int
    worst: float
    """By how much the slowest plan is above the fastest way there is."""
    exact: float
    """The share of budgets for which the plan is as fast as anything."""
    lowest_missed: int
    """Profiles whose lowest peak was not found."""


def compare(num_blocks: int, num_profiles: int, chance: random.Random) -> Optimum:
    excesses, missed = [], 0
    for _ in range(num_profiles):
        blocks = random_blocks(chance, num_blocks, chance.randint(1, num_blocks))
        profile, hardware = make_model(blocks, chance.choice([1e8, 1e9, 1e10]))
        model = CostModel(profile, hardware)
        outcomes = [all_outcomes(model, run) for run in RUNS]
        peaks, times = (np.concatenate([outcome[part] for outcome in outcomes]) for part in (0, 1))
        found = [c.outcome for c in search(model, RUNS, model.treatments, counts_waiting=False)]
        missed += min(outcome.peak_bytes for outcome in found) > peaks.min()
        for budget in np.linspace(peaks.min(), peaks.max(), 101):
            best = times[peaks <= budget].min()
            ours = min((outcome.step_ms for outcome in found if outcome.peak_bytes <= budget), default=float("inf"))
            excesses.append(ours / best - 1)
    exact = sum(excess < 1e-9 for excess in excesses) / len(excesses)
    num_ways = len(RUNS) * len(TREATMENTS) ** num_blocks
    return Optimum(num_blocks, num_profiles, num_ways, max(excesses), exact, missed)


# ---- speed and laws


def speeds(num_blocks: int, chance: random.Random) -> Iterator[tuple[str, float]]:
    for name, num_kinds in (("all equal", 1), ("of four kinds", 4), ("no two alike", num_blocks)):
        profile, hardware = make_model(random_blocks(chance, num_blocks, num_kinds))
        seconds = []
        for _ in range(3):
            start = time.process_time()
            model = CostModel(profile, hardware)
            search(model, RUNS, model.treatments, counts_waiting=False)
            seconds.append(time.process_time() - start)
        yield f"{num_blocks} blocks, {name}", min(seconds)


def broken_laws(num_profiles: int, chance: random.Random) -> tuple[int, int]:
    """Pairs of budgets that were compared, and those of which a law did not hold."""
    num_pairs = num_broken = 0
    for _ in range(num_profiles):
        num_blocks = chance.randint(1, 40)
        profile, hardware = make_model(random_blocks(chance, num_blocks, chance.randint(1, num_blocks)))
        top = CostModel(profile, hardware).evaluate(Choice()).peak_bytes
        budgets = sorted(chance.uniform(0.05, 1.05) * top for _ in range(6))
        plans = [decide(profile, hardware, Config(memory_budget_gb=b / 1e9), raise_if_unfit=False) for b in budgets]
        for tighter, looser in itertools.pairwise(plans):
            num_pairs += 1
            slower = tighter.fits and looser.predicted_slowdown > tighter.predicted_slowdown
            too_high = looser.fits and looser.predicted_peak_bytes > looser.budget_bytes
            num_broken += slower or too_high or (tighter.fits and not looser.fits)
    return num_pairs, num_broken


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m memscale.benchmarks.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profiles", type=int, default=40, help="random models for each number of blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-blocks", type=int, default=8, help="brute force up to so many")
    options = parser.parse_args(argv)
    chance = random.Random(options.seed)
    machine = f"{Hardware.detect('cpu').device_name}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"# {machine}, seed {options.seed}\n")
    optima = [_said(compare(n, options.profiles, chance)) for n in range(1, options.max_blocks + 1)]
    header = (
        "blocks",
        "models",
        "ways each",
        "slowest above the optimum",
        "budgets met exactly",
        "lowest peaks missed",
    )
    print("\n".join(table([header, *map(_cells, optima)], left=())))
    timed = list(speeds(100, chance))
    print("\n" + "\n".join(table([("search", "processor s"), *((n, f"{s:.2f}") for n, s in timed)], left=(0,))))
    num_pairs, num_broken = broken_laws(options.profiles, chance)
    print(
        f"\n{num_pairs} pairs of budgets: {num_broken} in which the larger is slower, or a plan peaks above its budget"
    )
    is_good = all(optimum.worst <= MAX_EXCESS and not optimum.lowest_missed for optimum in optima)
    return int(not is_good or max(s for _, s in timed) > MAX_SECONDS or num_broken > 0)


def _said(optimum: Optimum) -> Optimum:
    print(f"{optimum.num_blocks} blocks: done", file=sys.stderr, flush=True)
    return optimum


def _cells(optimum: Optimum) -> tuple[str, ...]:
    return (
        str(optimum.num_blocks),
        str(optimum.num_profiles),
        f"{optimum.num_ways:,}",
        f"{optimum.worst:.4%}",
        f"{optimum.exact:.1%}",
        str(optimum.lowest_missed),
    )


if __name__ == "__main__":
    sys.exit(main())
