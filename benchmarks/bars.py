"""What plans are predicted to cost in time at given budgets, with the bound beside them and the bar that is set.

    python -m benchmarks.bars [--only NAME ...] [--mode MODE] [--gradients]

Each row is a model, a card and a budget. Plans are those of the default `Config` but for the mode; times are those of
the model that plans are made by. "of plain": as a multiple of the step as it is. "bound": the least
time that any exact plan could take at this budget (`_decide/bound.py`); a bar below it cannot be reached. "passes" and
"optimizer" are the two parts of the step: forward and backward with all that is computed again or waited for, and the
optimizer's step. "early": what the step would at most be shorter if more state came back under backward, and as much
more left under the next forward, than the plan lets come and leave: as much of it as there is room for beside
parameters, gradients, temporaries and what comes early or leaves late already when backward is over. "home": what
forward and backward would at most be shorter if gradients waited on the host between backward and the step, which plans
may do with `--gradients` (`Config(enable_gradient_offload=True)`): see NOTE [gradients at home]. Nothing is trained; a
row takes minutes of processor time. GB = 1e9 bytes.

NOTE [gradients at home]: a parameter could have its home on the host, so that its gradient may lie there, and its
weight on the device all the time. For the optimizer's step as much comes then as without: what is stepped on the
device and is not there when backward is over comes behind it, whether it is state, a gradient or a weight (NOTE [one
by one] in `_decide/bound.py`), and a byte of gradients away makes room for a byte of state, no more. Less leaves,
which gains no more than state that leaves under the next forward: "early". In forward and backward it could gain: a
streamed block is computed again and fetched twice, and would not be if its weight stayed. Its weight needs the room
of the gradients that go, so no more weights can stay than other blocks have gradients; activations, which must stay
then, need more. So of the streamed blocks those are counted that gain most by the byte, at what they take longer than
in their fastest way.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch

from memscale import Config, Hardware, OptimizationMode, zoo
from memscale._decide.choice import Choice, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import choose_strategy
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import KEEP, Treatment
from memscale._profile.inputs import derive_inputs
from memscale.report.explain import what_is_done
from memscale.report.tables import table

GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A model on a card within a budget, and how slow its plan may be."""

    title: str
    name: str
    batch: int
    length: int
    budget_gb: float | None
    """None: the card's default."""
    most: float
    """The bar, as a multiple of the plain step."""
    card: str = "RTX 3090"
    dtype: torch.dtype = torch.float32


BARS = (
    Bar("GPT-2 XL", "gpt2-xl", 1, 512, None, 1.4),
    Bar("GPT-2 XL", "gpt2-xl", 1, 512, 9.25, 2.8),
    Bar("GPT-2 Large", "gpt2-large", 2, 512, 4.68, 2.2),
    Bar("GPT-2 Medium", "gpt2-medium", 4, 512, 2.61, 1.9),
    Bar("BERT-Large", "bert-large", 16, 128, 2.02, 2.0),
    Bar("BERT-Base", "bert-base", 16, 128, 0.84, 2.2),
    Bar("Llama-3.2-1B", "llama-3.2-1b", 2, 1024, None, 1.15, "RTX 3070", torch.bfloat16),
)
HEADER = (
    *("model", "batch", "card", "budget", "reserved", "step", "of plain", "bar", "bound"),
    *("passes", "optimizer", "early", "home", "windows", "what is done"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A bar, and the plan that there is for it."""

    bar: Bar
    plan: Plan
    plain_ms: float
    optimizer_ms: float
    early_ms: float
    """Of these, what state that comes and leaves beside the passes could save."""
    home_ms: float
    """Of the other part, what gradients that wait on the host could save."""

    @property
    def step_ms(self) -> float:
        return self.plain_ms * self.plan.predicted_slowdown


def plan_bar(bar: Bar, mode: OptimizationMode, *, gradients: bool = False) -> Row:
    """`gradients`: those of blocks that are not streamed may wait on the host."""
    config = Config(
        mode=mode,
        memory_budget_gb=bar.budget_gb,
        enable_logging=False,
        enable_gradient_offload=True if gradients else None,
    )
    with zoo.quiet():
        model = zoo.build(bar.name).to(bar.dtype)
        inputs = derive_inputs(model, bar.batch, bar.length)
        assert inputs is not None
        planner = Planner(Job(model, config, Hardware.from_name(bar.card), "adamw"), inputs)
        plan = planner.plan(choose_strategy(planner.job.eligible))
    way = planner.by(planner.job.eligible.travel_of(plan)).cost_model()
    choice = choice_of(plan.actions, way.profile)
    step_ms = float(way.optimizer.step_ms(choice.run, way.streamed_bytes(choice)))
    early, home = early_ms(way, choice, plan, step_ms), home_ms(way, choice)
    return Row(bar, plan, way.evaluate(Choice()).step_ms, step_ms, early, home)


def early_ms(model: CostModel, choice: Choice, plan: Plan, step_ms: float) -> float:
    """What fits beside all else when backward is over need not come in the step, and need not leave in it."""
    needed = plan.predicted_reserved_bytes or plan.predicted_peak_bytes
    reserve_bytes = max(0, needed - plan.predicted_peak_bytes)
    room_bytes = max(0, plan.budget_bytes - reserve_bytes - model.bytes_in_step(choice))
    on_device_ms = float(model.optimizer.compute_ms(model.optimizer.cost(choice.run), 1.0))
    travels = choice.run.offloads_optimizer or choice.run.steps_on_device
    return min(float(model.pace.link_ms(room_bytes)), max(0.0, step_ms - on_device_ms)) if travels else 0.0


def home_ms(model: CostModel, choice: Choice) -> float:
    """See NOTE [gradients at home]. Where only a part of a block's weight can stay, so much of its time is counted."""
    streamed = {fqn for fqn, treatment in choice.blocks if treatment.streams}
    room_bytes = sum(layer.trainable_bytes for layer in model.profile.layers if layer.module_fqn not in streamed)
    resident = [t for t in (KEEP, *model.treatments) if not t.streams and model.can_treat(choice.run, t)]
    gains = []
    for fqn, treatment in choice.blocks:
        if fqn in streamed:
            fastest_ms = min(_block_ms(model, choice, fqn, way) for way in resident)
            longer_ms = max(0.0, _block_ms(model, choice, fqn, treatment) - fastest_ms)
            gains.append((longer_ms / max(1, model.blocks[fqn].param_bytes), model.blocks[fqn].param_bytes))
    total_ms = 0.0
    for byte_ms, num_bytes in sorted(gains, reverse=True):
        stays_bytes = min(num_bytes, room_bytes)
        total_ms, room_bytes = total_ms + byte_ms * stays_bytes, room_bytes - stays_bytes
    return total_ms


def _block_ms(model: CostModel, choice: Choice, module_fqn: str, treatment: Treatment) -> float:
    return sum(model.treated(choice.run, treatment)[place].ms for place in model.places(module_fqn))


def cells(row: Row) -> tuple[str, ...]:
    bar, plan = row.bar, row.plan
    reserved = plan.predicted_reserved_bytes or plan.predicted_peak_bytes
    bound = "-" if plan.least_slowdown is None else f"{plan.least_slowdown:.2f}x"
    return (
        bar.title,
        f"{bar.batch} x {bar.length}",
        bar.card,
        f"{plan.budget_bytes / GB:.2f}",
        f"{reserved / GB:.3f}" + ("" if plan.fits else " does not fit"),
        f"{row.step_ms:.1f} ms",
        f"{plan.predicted_slowdown:.2f}x",
        f"{bar.most:.2f}x",
        bound,
        f"{row.step_ms - row.optimizer_ms:.1f} ms",
        f"{row.optimizer_ms:.1f} ms",
        f"{row.early_ms:.1f} ms",
        f"{row.home_ms:.1f} ms",
        "-" if plan.conditions is None else f"{plan.conditions.window_bytes / 2**20:.0f} MiB",
        what_is_done(plan),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bars", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted({bar.name for bar in BARS}), help="these models")
    parser.add_argument("--mode", type=OptimizationMode, default=OptimizationMode.BALANCED, help="balanced")
    parser.add_argument("--gradients", action="store_true", help="gradients may wait on the host until the step")
    options = parser.parse_args(argv)
    rows = []
    for bar in BARS:
        if not options.only or bar.name in options.only:
            rows.append(cells(plan_bar(bar, options.mode, gradients=options.gradients)))
            print(f"{bar.title}: {rows[-1][6]}", file=sys.stderr, flush=True)
    print("\n".join(table([HEADER, *rows], left=(0, 1, 2, 14))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
