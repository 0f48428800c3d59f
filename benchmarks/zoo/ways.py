"""The ways in which a model is treated: by plans that do all they can to every block, and as each mode wraps it.

A model that is tiny enough for hundreds to be tried has little to gain, and a plan made for it leaves most of it alone.
So three ways execute a plan written here, which treats every block, whether that pays or not; the others are planned.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import memscale
from benchmarks.zoo.twins import Subject, Training
from memscale import AsyncOffloadConfig, Config, Plan
from memscale._execute.executor import executor_of
from memscale._plan import (
    Action,
    Checkpoint,
    Conditions,
    OffloadActivations,
    OffloadOptimizer,
    Reason,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._profile.layers import find_blocks
from memscale._profile.read_elsewhere import Readings
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.parameters.streaming import rest_of
from memscale.techniques.tiling import find

TIGHTNESS = 0.3
"""Where between the lowest peak and the plain one a tight budget lies: some blocks are treated, and others are not."""
ROUNDING = 2e-4
"""How far sums in another order may be away, by the largest entry of a gradient, in single precision.

That holds where the terms of a sum do not cancel. Where they do, a gradient is rounding alone, AdamW makes a whole step
of it, and a right answer may be anywhere. What misses this bound is therefore asked again in double precision."""
ROUNDING_IN_DOUBLE = 2e-6
"""The same in double precision, whatever cancels: a sum of n terms is off by n u of their size at most (u = 1.1e-16, n
up to 1e5 here), and a step of AdamW moves a weight by at most lr / eps = 1e5 times what its gradient is off by. A row
that a tile forgets or takes twice is off by far more."""
BUCKET_BYTES = 20_000
FEW_ROWS, NUM_TILES = 5, 3
"""Rows of a tile, and tiles of an MLP: neither divides what is tiled."""
MOST_OBSERVED_STEPS = 5
"""Steps within which a model that cannot be rehearsed has been observed and planned."""
EVERY_TENSOR = AsyncOffloadConfig(min_tensor_bytes=0)


@dataclasses.dataclass(frozen=True)
class Way:
    """One row of the table."""

    device: str
    settings: dict[str, Any]
    actions: Callable[[Subject], list[Action]] | None = None
    """What is done to a model, for a plan that is not made but written."""
    otherwise: Callable[[Subject], list[Action]] | None = None
    """What is done instead to a model that refuses those."""
    tight: bool = False
    exact: bool = True

    def config(self, directory: str, **changes: Any) -> Config:
        common = {"force_optimize": True, "enable_logging": False, "async_config": EVERY_TENSOR}
        return Config(**{**common, "offload_dir": directory, "device": self.device, **self.settings, **changes})


def _recomputed(subject: Subject, keep: tuple[Literal["matmul", "attention"], ...] = ()) -> list[Action]:
    """Every second block keeps some of its outputs."""
    blocks = list(find_blocks(subject.model))
    return [
        *(Checkpoint(fqn, keep=keep if number % 2 else ()) for number, fqn in enumerate(blocks)),
        *(OffloadActivations(fqn) for fqn in blocks),
        OffloadOptimizer(BUCKET_BYTES),
    ]


def _partly_recomputed(subject: Subject) -> list[Action]:
    return _recomputed(subject, keep=("matmul", "attention"))


def _streamed(subject: Subject) -> list[Action]:
    blocks = list(find_blocks(subject.model))
    return [
        *(StreamParameters(fqn) for fqn in (*rest_of(subject.model, blocks), *blocks)),
        *(OffloadActivations(fqn) for fqn in blocks),
        OffloadOptimizer(BUCKET_BYTES),
        StepOnDevice(BUCKET_BYTES),
    ]


def _tiled(subject: Subject) -> list[Action]:
    """Everything that can be tiled is, into tiles much smaller than any plan's, in blocks that are recomputed."""
    try:
        recording = find.record(copy.deepcopy(subject.model), kwargs=subject.sample or {})
    except Exception:  # whatever a library raises on tensors without values, or because its inputs have no keywords
        return _recomputed(subject)
    head = find.find_head(recording)
    return [
        *(TileHead(fqn, FEW_ROWS, head.weight_fqn) for fqn in head.module_fqns),
        *(TileMlp(fqn, NUM_TILES) for fqn in find.find_mlps(recording).module_fqns),
        *(TileAttention(fqn, FEW_ROWS) for fqn in find.find_attentions(recording).module_fqns),
        *_recomputed(subject),
    ]


_EXACT_TILES = {"use_mixed_precision": False, "use_8bit_optimizer": False}
WAYS = {
    "recomputed": Way("cpu", {"async_offload": False}, _partly_recomputed, otherwise=_recomputed),
    "streamed": Way("simgpu", {"async_offload": True}, _streamed),
    "tiled": Way("cpu", {"async_offload": False}, _tiled, exact=False),
    "balanced": Way("cpu", {"mode": "balanced"}),
    "conservative": Way("cpu", {"mode": "conservative"}),
    "tiling": Way("cpu", {"mode": "aggressive", **_EXACT_TILES}, exact=False),
    "simgpu": Way("simgpu", {"mode": "balanced", "async_offload": True}),
    "tight": Way("simgpu", {"mode": "balanced", "async_offload": False}, tight=True),
}


def treat(way: Way, subject: Subject, directory: str) -> None:
    """Put the subject's model under MemScale. What has no sample is planned at the first batch, as for most users."""
    if way.actions is not None:
        actions = way.actions(subject)
        stay = _read_elsewhere(subject, [a.module_fqn for a in actions if isinstance(a, StreamParameters)])
        actions = [a for a in actions if not (isinstance(a, StreamParameters) and a.module_fqn in stay)]
        memscale.execute(subject.model, written_plan(way, actions), way.config(directory))
        return
    changes = {}
    if way.tight:
        if way.device not in subject.tight_budgets:
            _plan_as_low_as_possible(way, subject.on(way.device), directory)
        changes = {"force_optimize": False, "memory_budget_gb": subject.tight_budgets[way.device] / 1e9}
    memscale.wrap(subject.model, way.config(directory, **changes), subject.sample)
    if not way.tight and subject.sample is not None and _is_planned(subject.model):
        _note_tight_budget(way, subject)


def _read_elsewhere(subject: Subject, module_fqns: list[str]) -> frozenset[str]:
    """Of these modules, those whose weights others read, which no plan streams. Asked of a copy, in a forward."""
    copied = subject.on("cpu")
    readings = Readings(copied.model)
    with contextlib.ExitStack() as undo:
        readings.watch(undo)
        undo.enter_context(readings.during())
        copied.call(copied.model, copied.inputs)
    return readings.outside(module_fqns)


def written_plan(way: Way, actions: list[Action]) -> Plan:
    """A plan with these actions, whose numbers promise nothing."""
    return Plan(
        actions=tuple(actions),
        baseline_peak_bytes=2,
        predicted_peak_bytes=1,
        predicted_slowdown=1.0,
        budget_bytes=3,
        fits=True,
        decision_source="user_config",
        mode="balanced",
        device_type=way.device,
        device_name=way.device,
        optimizer_name="adamw",
        profile_source="static",
        model_class="",
        inputs=(),
        summary=Reason("asked for"),
        rows=(),
        conditions=Conditions(
            async_offload=way.settings["async_offload"],
            prefetch_depth=EVERY_TENSOR.prefetch_depth,
            prefetch_bytes=EVERY_TENSOR.prefetch_bytes,
            window_bytes=EVERY_TENSOR.window_bytes,
            min_tensor_bytes=0,
        ),
    )


def _plan_as_low_as_possible(way: Way, subject: Subject, directory: str) -> None:
    """For its figures: another copy, which is planned for as little memory as possible."""
    memscale.wrap(subject.model, way.config(directory), subject.sample)
    training = Training(subject)
    for _ in range(MOST_OBSERVED_STEPS):
        if _is_planned(subject.model):
            break
        training.step()
    _note_tight_budget(way, subject)
    memscale.detach(subject.model)


def _note_tight_budget(way: Way, subject: Subject) -> None:
    """Between the peaks of this plan, which is as low as possible, and of no plan."""
    plan = plan_of(subject.model)
    saved_bytes = plan.baseline_peak_bytes - plan.predicted_peak_bytes
    subject.tight_budgets[way.device] = plan.predicted_peak_bytes + TIGHTNESS * saved_bytes


def _is_planned(model: Any) -> bool:
    """Whether it has a plan that stays; one that is observed first has none before its first step."""
    executor = executor_of(model)
    return executor is not None and executor.plan is not None and not executor.plan.provisional


def plan_of(model: Any) -> Any:
    """What is done to a model that is under MemScale."""
    return model._memscale_executor.plan
