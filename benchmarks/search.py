"""Is the plan the best there is? The search against brute force, its speed, and its laws.

    python -m benchmarks.search [--profiles N] [--seed N]

- Optimum: random models of 1 to 8 blocks, of which some are equal, under every treatment. Every way of treating every
  block is evaluated, with the optimizer's state on the device and offloaded; for 101 budgets between the lowest and the
  highest peak the plan found is compared with the fastest there is. The bar is 1 %. So are models whose steps have
  other shapes: an encoder and a decoder, whose blocks all add to the gradient of what the encoder gives; blocks that
  are called twice, all of them again or each in turn; blocks whose backward runs in another order.
- Speed: 100 blocks, all equal, of four kinds, and no two alike, and in the other shapes, with five treatments and two
  runs. The bar is 1 s of processor time, the best of three.
- Laws: over rising budgets no plan is slower than the one before it, none peaks above its budget, and the lowest peak
  is no higher than with every block treated alike, and the same with other times.

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

from memscale._config import Config
from memscale._decide import decide
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.search import search
from memscale._hardware import Hardware
from memscale._profile import (
    CHECKPOINT,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    STREAM,
    Layer,
    OptimizerCost,
    Profile,
    Segment,
    StepTrace,
    TraceKey,
    Treatment,
)
from memscale.report.tables import table

MAX_EXCESS, MAX_SECONDS = 0.01, 1.0
RUNS = (RunOptions(), RunOptions(offloads_optimizer=True))
TREATMENTS = (KEEP, SELECTIVE, OFFLOAD, CHECKPOINT, STREAM)
STACK, ENCODER_DECODER, CALLED_AGAIN, CALLED_IN_TURN, ANOTHER_ORDER = SHAPES = (
    "stack",
    "encoder and decoder",
    "called twice, all again",
    "called twice, each in turn",
    "another order of backward",
)
_MB = 10**6
_RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Of a model drawn at random; megabytes, and megabytes moved for time."""

    kept: dict[Treatment, int]
    temporaries: int
    parameters: int
    time: int


def random_block(chance: random.Random) -> Block:
    kept = chance.randint(20, 400)
    less = {SELECTIVE: 0.5, OFFLOAD: 0.05, CHECKPOINT: 0.2, STREAM: 0.2}
    keeps = {how: max(1, int(kept * share * chance.uniform(0.3, 1.5))) for how, share in less.items()}
    return Block(
        {KEEP: kept, **keeps, STREAM: keeps[CHECKPOINT]},
        chance.randint(0, 100),
        chance.randint(1, 80),
        chance.randint(1, 500),
    )


def random_blocks(chance: random.Random, num_blocks: int, num_kinds: int) -> list[Block]:
    kinds = [random_block(chance) for _ in range(num_kinds)]
    return kinds if num_kinds == num_blocks else [chance.choice(kinds) for _ in range(num_blocks)]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The order in which a step visits its blocks, by position."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    num_encoding: int = 0
    """Of an encoder and a decoder: so many blocks are the encoder's."""

    @classmethod
    def named(cls, name: str, num_blocks: int, chance: random.Random) -> Shape:
        order = tuple(range(num_blocks))
        if name == CALLED_AGAIN:
            order *= 2
        elif name == CALLED_IN_TURN:
            order = tuple(block for block in order for _ in range(2))
        back = order[::-1]
        if name == ANOTHER_ORDER:
            back = tuple(chance.sample(order, num_blocks))
        return cls(order, back, num_blocks // 2 if name == ENCODER_DECODER else 0)


def _segment(phase: Any, name: str, peak: int, net: int, moved: float, *, sent: int = 0, fetched: int = 0) -> Segment:
    work = {"flops": 0, "matmul_bytes": 0, "other_bytes": int(moved * _MB)}
    traffic = {"sent_bytes": sent * _MB, "fetched_bytes": fetched * _MB}
    return Segment(phase, name, peak * _MB, net * _MB, **work, **traffic)


def _trace(blocks: Sequence[Block], how: Treatment, shape: Shape) -> StepTrace:
    segments = [_segment("forward", "", 1, 1, 1)]
    # What the encoder gives is held until the decoder's backward is over, and its gradient until the encoder's begins.
    encoded = blocks[shape.num_encoding - 1].temporaries if shape.num_encoding else 0
    for position, number in enumerate(shape.forward):
        block, name = blocks[number], f"b.{number}"
        visit = block.parameters if how.streams else 0
        kept = block.kept[how]
        sent = block.kept[KEEP] - kept if how.offloads else 0
        peak = kept + block.temporaries + visit
        segments.append(_segment("forward", name, peak, kept, block.time, sent=sent, fetched=visit))
        held = encoded if position + 1 == shape.num_encoding else 0
        segments.append(_segment("forward", "", held, held, 0))
    segments += [_segment("forward", "", 50, 30, 50), _segment("backward", "", 60, -30, 50)]
    seen: set[int] = set()
    for position, number in enumerate(shape.backward):
        segments.append(_back(blocks[number], f"b.{number}", how, number not in seen, 0 if position else encoded))
        freed = 2 * encoded if len(shape.backward) - position - 1 == shape.num_encoding else 0
        segments.append(_segment("backward", "", 0, -freed, 0))
        seen.add(number)
    return StepTrace((*segments, _segment("backward", "", 1, 0, 1)))


def _back(block: Block, name: str, how: Treatment, is_first: bool, encoded: int) -> Segment:
    """A visit of backward. The first leaves gradients, which those of other calls are added to."""
    visit, kept = (block.parameters if how.streams else 0), block.kept[how]
    gradients = 0 if how.streams or not is_first else block.parameters
    peak = max(0, block.kept[KEEP] - kept) + block.temporaries + block.parameters + visit + encoded
    fetched = block.kept[KEEP] - kept if how.offloads else visit
    moved = block.time * (2 + _RECOMPUTED[how.recompute])
    return _segment("backward", name, peak, gradients - kept + encoded, moved, sent=visit, fetched=fetched)


def make_model(
    blocks: Sequence[Block], link_bytes_per_s: float = 1e9, shape: Shape | None = None
) -> tuple[Profile, Hardware]:
    """A profile with every treatment, and a device on which a byte moved costs a nanosecond."""
    shape = shape or Shape(tuple(range(len(blocks))), tuple(reversed(range(len(blocks)))))
    calls = len(shape.forward) // max(1, len(blocks))
    layers = [
        Layer(f"b.{i}", "Block", b.parameters * _MB, b.parameters * _MB, True, str(b), calls)
        for i, b in enumerate(blocks)
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
        plain=_trace(blocks, KEEP, shape),
        variants={TraceKey(how): _trace(blocks, how, shape) for how in TREATMENTS if how != KEEP},
        rest_optimizer=OptimizerCost("adamw", 40 * _MB, 20 * _MB, 140 * _MB, offloaded_step_bytes=20 * _MB),
    )
    card = dataclasses.replace(
        Hardware.from_name("RTX 3090"), memory_bytes_per_s=1e9, link_bytes_per_s=link_bytes_per_s
    )
    return profile, dataclasses.replace(card, host_available_bytes=10**12, total_bytes=10**12, free_bytes=10**12)


# ---- brute force


def all_outcomes(model: CostModel, run: RunOptions) -> tuple[Any, Any]:
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
        each = [(model.treated(run, t) if owner else model.rest(run))[index] for t in TREATMENTS]
        peak = np.maximum(peak, live + np.array([stretch.peak_bytes for stretch in each])[column])
        live = live + np.array([stretch.net_bytes for stretch in each])[column]
        ms = ms + np.array([stretch.ms for stretch in each])[column]
    peak = np.maximum(peak, live + np.rint(model.optimizer.step_bytes(run, streamed)))
    return peak, model.step_ms(run, ms, streamed)


@dataclasses.dataclass(frozen=True, slots=True)
class Optimum:
    shape: str
    num_blocks: int
    num_profiles: int
    num_ways: int
    worst: float
    """By how much the slowest plan is above the fastest way there is."""
    exact: float
    """The share of budgets for which the plan is as fast as anything."""
    lowest_missed: int
    """Profiles whose lowest peak was not found."""


def compare(num_blocks: int, num_profiles: int, chance: random.Random, shape: str = STACK) -> Optimum:
    excesses, missed = [], 0
    for _ in range(num_profiles):
        blocks = random_blocks(chance, num_blocks, chance.randint(1, num_blocks))
        link = chance.choice([1e8, 1e9, 1e10])
        profile, hardware = make_model(blocks, link, Shape.named(shape, num_blocks, chance))
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
    return Optimum(shape, num_blocks, num_profiles, num_ways, max(excesses), exact, missed)


# ---- speed and laws


def speeds(num_blocks: int, chance: random.Random) -> Iterator[tuple[str, float]]:
    kinds = [(name, num_kinds, STACK) for name, num_kinds in (("all equal", 1), ("of four kinds", 4))]
    kinds.append(("no two alike", num_blocks, STACK))
    kinds += [(f"of four kinds, {shape}", 4, shape) for shape in SHAPES if shape != STACK]
    for name, num_kinds, shape in kinds:
        blocks = random_blocks(chance, num_blocks, num_kinds)
        profile, hardware = make_model(blocks, shape=Shape.named(shape, num_blocks, chance))
        seconds = []
        for _ in range(3):
            start = time.process_time()
            model = CostModel(profile, hardware)
            search(model, RUNS, model.treatments, counts_waiting=False)
            seconds.append(time.process_time() - start)
        yield f"{num_blocks} blocks, {name}", min(seconds)


@dataclasses.dataclass(slots=True)
class Laws:
    """How often each was looked at, and how often it was broken."""

    num_pairs: int = 0
    num_slower: int = 0
    num_lowest: int = 0
    num_too_high: int = 0


def broken_laws(num_profiles: int, chance: random.Random) -> Laws:
    laws = Laws()
    for number in range(num_profiles):
        num_blocks = chance.randint(1, 40)
        blocks = random_blocks(chance, num_blocks, chance.randint(1, num_blocks))
        shape = Shape.named(SHAPES[number % len(SHAPES)], num_blocks, chance)
        profile, hardware = make_model(blocks, shape=shape)
        _look_at_budgets(laws, profile, hardware, chance)
        _look_at_the_lowest(laws, profile, hardware)
    return laws


def _look_at_budgets(laws: Laws, profile: Profile, hardware: Hardware, chance: random.Random) -> None:
    """A larger budget is never slower, and none is exceeded."""
    top = CostModel(profile, hardware).evaluate(Choice()).peak_bytes
    budgets = sorted(chance.uniform(0.05, 1.05) * top for _ in range(6))
    plans = [
        decide(profile, resolve(Config(memory_budget_gb=b / 1e9), hardware), raise_if_unfit=False) for b in budgets
    ]
    for tighter, looser in itertools.pairwise(plans):
        laws.num_pairs += 1
        slower = tighter.fits and looser.predicted_slowdown > tighter.predicted_slowdown
        too_high = looser.fits and looser.predicted_peak_bytes > looser.budget_bytes
        laws.num_slower += slower or too_high or (tighter.fits and not looser.fits)


def _look_at_the_lowest(laws: Laws, profile: Profile, hardware: Hardware) -> None:
    """No treatment given to all blocks is lower, and on a device with other speeds it is the same."""
    other = dataclasses.replace(hardware, memory_bytes_per_s=1e11, link_bytes_per_s=1e8, launch_s=1e-4)
    models = [CostModel(profile, device) for device in (hardware, other)]
    lowest = [
        min(c.outcome.peak_bytes for c in search(model, RUNS, model.treatments, counts_waiting=False))
        for model in models
    ]
    alike = [Choice(tuple((fqn, t) for fqn in models[0].blocks if t != KEEP), run) for t in TREATMENTS for run in RUNS]
    laws.num_lowest += 1
    laws.num_too_high += lowest[0] != lowest[1] or lowest[0] > min(models[0].evaluate(c).peak_bytes for c in alike)


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search",
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
    sizes = [(shape, n) for shape in SHAPES for n in range(1, _most_blocks(shape, options.max_blocks) + 1)]
    optima = [_said(compare(n, options.profiles, chance, shape)) for shape, n in sizes]
    header = (
        "shape",
        "blocks",
        "models",
        "ways each",
        "slowest above the optimum",
        "budgets met exactly",
        "lowest peaks missed",
    )
    print("\n".join(table([header, *map(_cells, optima)], left=(0,))))
    timed = list(speeds(100, chance))
    print("\n" + "\n".join(table([("search", "processor s"), *((n, f"{s:.2f}") for n, s in timed)], left=(0,))))
    laws = broken_laws(options.profiles, chance)
    print(
        f"\n{laws.num_pairs} pairs of budgets: {laws.num_slower} in which the larger is slower, or a plan peaks above "
        f"its budget\n{laws.num_lowest} lowest peaks: {laws.num_too_high} above every block treated alike, or other "
        "ones where only times differ"
    )
    is_good = all(optimum.worst <= MAX_EXCESS and not optimum.lowest_missed for optimum in optima)
    is_fast = max(seconds for _, seconds in timed) <= MAX_SECONDS
    return int(not is_good or not is_fast or laws.num_slower > 0 or laws.num_too_high > 0)


def _most_blocks(shape: str, max_blocks: int) -> int:
    """Brute force over the largest stacks says enough about how far it reaches."""
    return max_blocks if shape == STACK else min(max_blocks, 6)


def _said(optimum: Optimum) -> Optimum:
    print(f"{optimum.shape}, {optimum.num_blocks} blocks: done", file=sys.stderr, flush=True)
    return optimum


def _cells(optimum: Optimum) -> tuple[str, ...]:
    return (
        optimum.shape,
        str(optimum.num_blocks),
        str(optimum.num_profiles),
        f"{optimum.num_ways:,}",
        f"{optimum.worst:.4%}",
        f"{optimum.exact:.1%}",
        str(optimum.lowest_missed),
    )


if __name__ == "__main__":
    sys.exit(main())
