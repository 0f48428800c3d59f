"""One model under one variant, predicted or trained for real in a process of its own: the cells of the table.

Kept apart from the table so that what a cell costs in memory ends with its process, and a killed run loses one cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import benchmarks
import memscale
from memscale import OptimizationMode, zoo
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import choose_strategy
from memscale._execute.executor import executor_of
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.rehearsal import loss_of
from memscale.report.explain import what_is_done
from memscale.techniques.offload.store.disk import DiskStore

GB = 1e9
NUM_STEPS = 2
EXACT = {"use_mixed_precision": False, "use_8bit_optimizer": False}
VARIANTS = ("plain", "balanced", "aggressive exact", "aggressive", "budget")


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """One row of the table."""

    title: str
    name: str
    batch: int
    length: int
    published_gb: float | None = None
    """Its plain peak, as published; None: out of memory, or not published."""
    published_optimised_gb: float | None = None
    bar_gb: float | None = None
    """1.25 times what a perfect, exact plan was reckoned to need."""
    cap_gb: float | None = None
    """The device on which its plain run is tried, where more than this machine has would be needed."""
    host_gb: float | None = None
    """What it may use of the host; the rest goes to disk. None: what there is."""
    host_gb_at_budget: float | None = None
    """The same within the published peak, where the simulated device takes more of the memory that both share."""

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.length}" if self.batch else "its own"

    @property
    def variants(self) -> tuple[str, ...]:
        return VARIANTS if self.published_optimised_gb is not None else VARIANTS[:-1]

    def host_gb_of(self, variant: str) -> float | None:
        return self.host_gb_at_budget or self.host_gb if variant == "budget" else self.host_gb


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One model under one variant."""

    title: str
    shape: str
    variant: str
    predicted_bytes: int
    predicted_waiting_bytes: int
    """What waits elsewhere, on the host or below it."""
    predicted_slowdown: float
    what: str
    measured_bytes: int | None = None
    host_bytes: int | None = None
    """Tensors in host memory at the end of the step."""
    disk_bytes: int | None = None
    cpu_seconds: float | None = None
    """Processor time of the measured step."""
    planning_seconds: float | None = None
    """Processor time of `wrap`."""
    losses: tuple[float, ...] = ()
    weights_hash: str = ""
    failure: str = ""
    commit: str = ""
    predicted_of_bound: float | None = None
    """The predicted time, as a multiple of the least that any exact plan could take; None: nothing is done, it is not
    exact, or an earlier version predicted it."""

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Result:
        return cls(**{**found, "losses": tuple(found["losses"])})


def config_of(variant: str, subject: Subject, **common: Any) -> memscale.Config:
    variants: dict[str, dict[str, Any]] = {
        "plain": {"mode": OptimizationMode.CONSERVATIVE, "enable_checkpointing": False},
        "balanced": {"force_optimize": True},
        "aggressive exact": {"mode": OptimizationMode.AGGRESSIVE, "force_optimize": True, **EXACT},
        "aggressive": {"mode": OptimizationMode.AGGRESSIVE, "force_optimize": True},
        "budget": {
            "mode": OptimizationMode.AGGRESSIVE, "memory_budget_gb": subject.published_optimised_gb, **EXACT,
        },
    }  # fmt: skip
    return memscale.Config(**variants[variant], enable_logging=False, **common)


def _result(subject: Subject, variant: str, plan: Plan | None, **found: Any) -> Result:
    planned: dict[str, Any] = {"predicted_bytes": 0, "predicted_waiting_bytes": 0, "predicted_slowdown": 1.0}
    if plan is not None:
        planned = {
            "predicted_bytes": plan.predicted_peak_bytes,
            "predicted_waiting_bytes": plan.host_bytes + plan.movable_bytes,
            "predicted_slowdown": plan.predicted_slowdown,
            "predicted_of_bound": plan.of_bound,
        }
    what = what_is_done(plan) if plan is not None else "nothing"
    return Result(title=subject.title, shape=subject.shape, variant=variant, what=what, **{**planned, **found})


# ---- predicting


def predict(subject: Subject, card: str = "RTX 3090") -> list[Result]:
    """The row for this card, on fake tensors."""
    with zoo.quiet():
        model = zoo.build(subject.name)
        inputs = derive_inputs(model, subject.batch, subject.length)
        assert inputs is not None
        directory = tempfile.gettempdir()
        free_bytes = shutil.disk_usage(directory).free
        hardware = dataclasses.replace(Hardware.from_name(card), disk_free_bytes=free_bytes)
        planner = Planner(Job(model, config_of("balanced", subject, offload_dir=directory), hardware), inputs)
        results = [_result(subject, "plain", None, predicted_bytes=_baseline_bytes(planner))]
        for variant in subject.variants[1:]:
            plan = planner.plan(
                choose_strategy(planner.job.eligible.under(config_of(variant, subject, offload_dir=directory)))
            )
            results.append(_result(subject, variant, plan))
    return results


def _baseline_bytes(planner: Planner) -> int:
    return CostModel(planner.profile, planner.hardware).peak_of(planner.profile.plain, Choice())


# ---- measuring


def measure(subject: Subject, variant: str) -> Result:
    """Train for two steps on the simulated device; the time is the second's."""
    import simgpu

    torch.set_num_threads(1)  # threads that wait for one another are processor time, too
    with contextlib.ExitStack() as undo, zoo.quiet():
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="memscale-bench-"))
        torch.manual_seed(0)
        model, inputs = _real_model(subject)
        common = {"device": "simgpu", "offload_dir": directory, "max_cpu_offload_gb": subject.host_gb_of(variant)}
        if variant == "plain":
            if subject.cap_gb is not None:
                simgpu.set_cap(int(subject.cap_gb * GB))
            return _measure_plain(subject, model, inputs)
        start = time.process_time()
        memscale.wrap(model, config_of(variant, subject, **common), inputs)
        executor = executor_of(model)
        assert executor is not None
        planning_seconds = time.process_time() - start
        found = _train(model, inputs)
        return _result(subject, variant, executor.plan, planning_seconds=planning_seconds, **found)


def _measure_plain(subject: Subject, model: nn.Module, inputs: Inputs) -> Result:
    hardware = Hardware.detect("simgpu")
    planner = Planner(Job(model, config_of("plain", subject, device="simgpu"), hardware), inputs)
    predicted_bytes = _baseline_bytes(planner)
    del planner
    try:
        model.to("simgpu")
        found = _train(model, inputs)
    except torch.OutOfMemoryError:
        found = {"failure": f"out of memory on a device of {hardware.total_bytes / GB:.0f} GB"}
    return _result(subject, "plain", None, predicted_bytes=predicted_bytes, **found)


def _real_model(subject: Subject) -> tuple[nn.Module, Inputs]:
    if zoo.is_factory(subject.name):
        own, sample = zoo.load_factory(subject.name, with_weights=True)
        inputs = Inputs.from_sample(sample) if sample is not None else derive_inputs(own)
        if inputs is None:
            raise memscale.MemScaleError(f"{subject.name} must return (model, sample): no inputs can be derived")
        return own.train(), inputs.map_tensors(_filled)
    shape: Any = zoo.build(subject.name)
    model: Any = type(shape)(shape.config).train()
    meta = derive_inputs(model, subject.batch, subject.length)
    assert meta is not None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (subject.batch, subject.length), generator=generator)
    ones = torch.ones_like(ids)
    return model, Inputs(kwargs={name: ones if name == "attention_mask" else ids.clone() for name in meta.kwargs})


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.device.type == "meta" else tensor


def _train(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The peak of all steps, as the first makes the optimizer's state; and what the last one came to.

    Nothing is detached: where the plain model does not fit, it would not fit then.
    """
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    on_device = inputs.map_tensors(lambda tensor: tensor.to("simgpu"))
    torch.manual_seed(2)
    losses, seconds = [], 0.0
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(NUM_STEPS):
        torch.accelerator.synchronize()
        start = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model(*on_device.args, **on_device.kwargs))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        del loss
        seconds = time.process_time() - start
    return {
        "measured_bytes": torch.accelerator.max_memory_allocated(),
        "host_bytes": _host_bytes(),
        "disk_bytes": _disk_bytes(),
        "cpu_seconds": seconds,
        "losses": tuple(losses),
        "weights_hash": _hash_of(model),
    }


def _host_bytes() -> int:
    """Of every tensor in host memory, by unique storage."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _disk_bytes() -> int:
    """Of the disk tiers' files; they have no name that could be looked up."""
    stores = [thing for thing in gc.get_objects() if issubclass(type(thing), DiskStore)]
    return sum(store.counters.allocated_bytes for store in stores)


def _hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda entry: entry[0]):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


# ---- processes of their own


def predict_apart(subject: Subject) -> list[Result]:
    answer = _apart({"subject": dataclasses.asdict(subject), "variant": None})
    if isinstance(answer, str):
        raise memscale.MemScaleError(f"{subject.title}: {answer}")
    return [Result.from_dict(found) for found in answer]


def measure_apart(subject: Subject, variant: str) -> Result:
    answer = _apart({"subject": dataclasses.asdict(subject), "variant": variant})
    if isinstance(answer, str):
        return _result(subject, variant, None, failure=answer)
    return Result.from_dict(answer[0])


def _apart(order: dict[str, Any]) -> list[dict[str, Any]] | str:
    """What the order gave, or the last line of what went wrong."""
    command = [sys.executable, "-m", "benchmarks.runs", json.dumps(order)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=benchmarks.environment())
    if run.returncode == 0:
        answer: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
        return answer
    if run.returncode < 0:
        return f"killed by signal {-run.returncode}: too large for this machine?"
    return (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1][:300]


def _obey(text: str) -> None:
    order = json.loads(text)
    subject, variant = Subject(**order["subject"]), order["variant"]
    results: Sequence[Result] = predict(subject) if variant is None else [measure(subject, variant)]
    print(json.dumps([dataclasses.asdict(result) for result in results]), flush=True)
    os._exit(0)  # what is attached need not be taken off, nor moved back to where it does not fit


if __name__ == "__main__":
    _obey(sys.argv[1])
