"""Does the predicted slowdown hold? Predicted against measured step time of plans, over the plain step's.

    python -m benchmarks.timing [--device simgpu] [--repetitions N] [--json] [NAME ...]

On the CPU the plans checkpoint: every block, and as many as 80 % of the plain peak need. Plain and planned steps of two
equal models take turns, in one thread; the processor's time is compared, the fastest quarter of it, as other processes
only ever make a step slower. Every model of the suite is tried, which are so small that calls count more than
arithmetic, and two of a size at which arithmetic counts. The bar is 15 % of the measured ratio.

On the simulated device (which must be installed) the plans offload: activations of every block, inputs of every
checkpointed block, parameters, optimizer state, and what BALANCED does to go as low as it can; each with transfers
that wait and that do not. The virtual clock of a card is read, so nothing is measured that a real card would show; it
is the same model of time, but with every launch, stream and wait of the real run. Beside the suite's models there are
three at which bytes and arithmetic count, one of them as wide as GPT-2 Medium. The bar is 10 %.

Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import memscale
from benchmarks.models import Case, suite
from memscale import zoo
from memscale._decide.budget import full_budget
from memscale._decide.choice import Choice, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import choose_strategy
from memscale._execute.executor import Executor, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import (
    OPTIMIZER_BUCKET_BYTES,
    Action,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    StreamParameters,
)
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale.report.explain import what_is_done
from memscale.report.tables import table

MAX_ERROR, MAX_DEVICE_ERROR = 0.15, 0.10
WARMUP_STEPS = 3
CARD = "RTX 3090"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One model under one plan."""

    name: str
    treatment: str
    plain_ms: float
    """The plain step: processor time, or the virtual clock's."""
    predicted: float
    """Step time over the plain step's."""
    measured: float
    what: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


# ---- larger models


def _larger() -> tuple[Case, ...]:
    """At a size where arithmetic counts."""
    import transformers

    width = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    bert = transformers.BertConfig(vocab_size=4000, **width)
    gpt2 = transformers.GPT2Config(vocab_size=4000, n_embd=256, n_layer=4, n_head=4)
    medium = transformers.GPT2Config(vocab_size=4000, n_embd=1024, n_layer=3, n_head=16)

    def batch(number: int, size: int = 8) -> dict[str, Any]:
        ids = torch.randint(4000, (size, 128), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}

    def two(number: int) -> dict[str, Any]:
        return batch(number, 2)

    return (
        Case("bert, larger", lambda: transformers.BertForMaskedLM(bert), batch, lambda output: output.loss),
        Case("gpt2, larger", lambda: transformers.GPT2LMHeadModel(gpt2), batch, lambda output: output.loss),
        Case("gpt2-medium's width", lambda: transformers.GPT2LMHeadModel(medium), two, lambda output: output.loss),
    )


# ---- steps


class Runner:
    """A model in training, step by step."""

    def __init__(self, subject: Case, model: nn.Module, device: str) -> None:
        self.subject = subject
        self.model = model
        self.device = device
        self.optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        self.number = 0

    def step(self) -> None:
        batch = tree_map_only(torch.Tensor, lambda t: t.to(self.device), self.subject.batch(self.number % 4))
        self.optimizer.zero_grad()
        self.subject.loss(self.model(**batch)).backward()
        self.optimizer.step()
        self.number += 1


def _wrapped(subject: Case, config: memscale.Config) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = memscale.wrap(subject.build().train(), config, subject.batch(0))
    executor = executor_of(model)
    assert executor is not None
    assert executor.plan is not None, "there was a sample, so there is a plan"
    return model, executor.plan


# ---- on the CPU


def compare_on_cpu(subject: Case, repetitions: int) -> Iterator[Row]:
    probe = memscale.Config(mode=memscale.OptimizationMode.CONSERVATIVE, force_optimize=True, enable_logging=False)
    model, lowest = _wrapped(subject, probe)
    memscale.detach(model)
    budget_bytes = max(0.8 * lowest.baseline_peak_bytes, lowest.predicted_peak_bytes)
    partly = probe.replace(force_optimize=False, memory_budget_gb=budget_bytes / 1e9)
    for treatment, config in (("every block", probe), ("80 % of the peak", partly)):
        try:
            model, plan = _wrapped(subject, config)
        except memscale.DoesNotFitError:
            continue
        if plan.actions:
            torch.manual_seed(0)
            plain = Runner(subject, subject.build().train(), "cpu")
            planned = Runner(subject, model, "cpu")
            plain_s, planned_s = _interleaved(plain.step, planned.step, repetitions)
            ratio = planned_s / plain_s
            yield Row(subject.name, treatment, plain_s * 1e3, plan.predicted_slowdown, ratio, what_is_done(plan))
        memscale.detach(model)


def _interleaved(first: Callable[[], None], second: Callable[[], None], repetitions: int) -> tuple[float, float]:
    """Processor seconds of each: the first quartile. They take turns, so that drift of the machine hits both."""
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(WARMUP_STEPS + repetitions):
        for step, record in zip((first, second), times, strict=True):
            start = time.process_time()
            step()
            if repetition >= WARMUP_STEPS:
                record.append(time.process_time() - start)
    low_first, low_second = (statistics.quantiles(record, n=4)[0] for record in times)
    return low_first, low_second


# ---- on the simulated device


def compare_on_simgpu(subject: Case) -> Iterator[Row]:
    torch.manual_seed(0)
    plain_ms = _virtual_step_ms(Runner(subject, subject.build().train().to("simgpu"), "simgpu"))
    for suffix, is_async in ((", waiting", False), (", side by side", True)):
        config = memscale.Config(
            device="simgpu",
            enable_logging=False,
            force_optimize=True,
            async_offload=is_async,
            async_config=memscale.AsyncOffloadConfig(min_tensor_bytes=4096),
        )
        torch.manual_seed(0)
        planner = _study(subject, config)
        for treatment, actions in _device_plans(planner, config).items():
            predicted = _predicted(planner, actions, config)
            if predicted is not None:
                ratio = _virtual_ms_of(subject, actions, config) / plain_ms
                yield Row(subject.name, treatment + suffix, plain_ms, predicted, ratio, _counted(actions))
            gc.collect()


def _study(subject: Case, config: memscale.Config) -> Planner:
    inputs = Inputs.from_sample(subject.batch(0))
    planner = Planner(Job(subject.build().train(), config, memscale.Hardware.detect("simgpu")), inputs)
    planner.look_into_everything(planner.job.eligible)
    return planner


def _device_plans(planner: Planner, config: memscale.Config) -> dict[str, tuple[Action, ...]]:
    """Each way to offload on every block, and all of them together as the mode does it."""
    blocks = [layer.module_fqn for layer in planner.profile.layers if layer.is_block]
    sent_away = tuple(OffloadActivations(fqn) for fqn in blocks)
    return {
        "activations": sent_away,
        "inputs": (*(Checkpoint(fqn) for fqn in blocks), *sent_away),
        "parameters": tuple(StreamParameters(fqn) for fqn in blocks),
        "optimizer state": (OffloadOptimizer(OPTIMIZER_BUCKET_BYTES),),
        "balanced": planner.plan(choose_strategy(planner.job.eligible)).actions,
    }


def _predicted(planner: Planner, actions: tuple[Action, ...], config: memscale.Config) -> float | None:
    """Step time over the plain step's; None where the plan is not for this model."""
    model = CostModel(planner.profile, planner.hardware, overlaps=planner.travel.overlaps)
    choice = choice_of(actions, model.profile)
    treatments = {treatment for _, treatment in choice.blocks}
    whole = treatments & set(model.whole_treatments)
    if not actions or not treatments <= {*model.treatments, *whole} or len(whole) > 1:
        return None
    outcome = model.evaluate_whole(choice) if whole else model.evaluate(choice)
    return outcome.step_ms / model.evaluate(Choice()).step_ms


def _virtual_ms_of(subject: Case, actions: tuple[Action, ...], config: memscale.Config) -> float:
    torch.manual_seed(0)
    model = subject.build().train()
    host_bytes = full_budget(memscale.Hardware.detect("simgpu"), config).host_bytes
    executor = Executor(model, ExecutionSettings.from_config(config, torch.device("simgpu"), host_bytes))
    executor.attach(actions)
    try:
        return _virtual_step_ms(Runner(subject, model, "simgpu"))
    finally:
        executor.detach()


def _counted(actions: Sequence[Action]) -> str:
    counts = collections.Counter(type(action).__name__ for action in actions)
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def _virtual_step_ms(runner: Runner) -> float:
    """A step of the steady state, by the virtual clock: no measured time."""
    import simgpu

    for _ in range(WARMUP_STEPS):
        runner.step()
    torch.accelerator.synchronize()
    start = simgpu.virtual_ms()
    runner.step()
    torch.accelerator.synchronize()
    return float(simgpu.virtual_ms() - start)


# ---- command line


def to_text(rows: Sequence[Row]) -> str:
    header = ("model", "plan", "plain ms", "predicted", "measured", "error", "what is done")
    cells = [
        (
            row.name,
            row.treatment,
            f"{row.plain_ms:.2f}",
            f"{row.predicted:.3f}x",
            f"{row.measured:.3f}x",
            f"{row.error:+.1%}",
            row.what,
        )
        for row in rows
    ]
    return "\n".join(table([header, *cells], left=(0, 1, 6)))


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps([{**dataclasses.asdict(row), "error": row.error} for row in rows], indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these models")
    parser.add_argument("--device", choices=["cpu", "simgpu"], default="cpu")
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    with zoo.quiet():
        subjects = {entry.name: entry for entry in (*suite(), *_larger()) if entry.is_static or options.device == "cpu"}
        unknown = [name for name in options.names if name not in subjects]
        if unknown:
            parser.error(f"no model called {unknown[0]!r}; there are: {', '.join(subjects)}")
        rows = _run([subjects[name] for name in options.names or subjects], options)
    print(to_json(rows) if options.json else to_text(rows))
    bar = MAX_ERROR if options.device == "cpu" else MAX_DEVICE_ERROR
    missed = [row for row in rows if abs(row.error) > bar]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {bar:.0%}", file=sys.stderr)
    return int(bool(missed))


def _run(subjects: Sequence[Case], options: argparse.Namespace) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if options.device == "simgpu":
            import simgpu

            simgpu.set_card(CARD)
            simgpu.set_race_mode("off")  # it takes time and changes none
        rows = []
        for subject in subjects:
            on_cpu = options.device == "cpu"
            for row in compare_on_cpu(subject, options.repetitions) if on_cpu else compare_on_simgpu(subject):
                print(f"{row.name}, {row.treatment}: {row.error:+.1%}", file=sys.stderr, flush=True)
                rows.append(row)
            gc.collect()
        return rows
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
