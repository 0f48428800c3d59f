"""Same training, bit for bit: a model under MemScale against an untouched copy of itself."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import nn

from memscale._execute.executor import Executor, execute, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, Plan, Reason
from memscale._profile.layers import find_blocks
from tests.models import Case

Prepare = Callable[[nn.Module], Any]


@dataclasses.dataclass
class Record:
    """Everything that a training run decides."""

    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    torch_rng: torch.Tensor | None = None
    python_rng: Any = None
    numpy_rng: Any = None


def seed(number: int = 7) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD where gradients are sparse or absent, else Adam: it amplifies the last bit of a gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(isinstance(module, nn.Embedding) and module.sparse for module in model.modules()):
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    model: nn.Module,
    case: Case,
    *,
    steps: int = 5,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
) -> Record:
    """A usual training loop, from a known seed, with everything it decides written down."""
    record, optim = Record(), optimizer(model)
    schedule = scheduler(optim) if scheduler is not None else None
    seed()
    for step in range(steps):
        for part in range(accumulation):
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = case.loss(model(**case.batch(step * accumulation + part)))
            (loss / accumulation).backward()
            record.losses.append(loss.detach().clone())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        record.gradients.append(
            {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
        )
        optim.step()
        if schedule is not None:
            schedule.step()
        optim.zero_grad()
    return finish(record, model)


def finish(record: Record, model: nn.Module) -> Record:
    record.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    record.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    record.torch_rng = torch.get_rng_state()
    record.python_rng, record.numpy_rng = random.getstate(), numpy.random.get_state()
    return record


def assert_same(ours: Record, theirs: Record) -> None:
    """Bit for bit, with the first difference named."""
    assert len(ours.losses) == len(theirs.losses)
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert equal(a, b), f"loss {step} differs: {a.item()!r} against {b.item()!r}"
    for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        _assert_same_tensors(a, b, f"gradient of step {step}")
    _assert_same_tensors(ours.weights, theirs.weights, "weight")
    _assert_same_tensors(ours.buffers, theirs.buffers, "buffer")
    assert_same_rng(ours, theirs)


def assert_same_rng(ours: Record, theirs: Record) -> None:
    assert ours.torch_rng is not None
    assert theirs.torch_rng is not None
    assert torch.equal(ours.torch_rng, theirs.torch_rng), "torch's random state differs"
    assert ours.python_rng == theirs.python_rng, "Python's random state differs"
    assert all(numpy.array_equal(a, b) for a, b in zip(ours.numpy_rng, theirs.numpy_rng, strict=True)), (
        "NumPy's differs"
    )


def _assert_same_tensors(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    assert list(ours) == list(theirs), f"names of {what}s differ"
    for name in ours:
        assert equal(ours[name], theirs[name]), f"{what} {name!r} differs"


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """`torch.equal`, also for absent and sparse tensors; NaN is equal to NaN."""
    if a is None or b is None:
        return a is b
    if a.is_sparse or b.is_sparse:
        return a.is_sparse and b.is_sparse and equal(a.to_dense(), b.to_dense())
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return bool(a.isnan().any()) and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def assert_same_training(
    case: Case, prepare: Prepare, plain_runs: dict[Any, Record] | None = None, **loop: Any
) -> tuple[Record, Any]:
    """Train a prepared model and an untouched copy of it; compare everything. Returns what `prepare` returned, too.

    `plain_runs` keeps what the untouched copies have done, so that each is trained once for several tests.
    """
    seed(1)
    model = case.build()
    twin = copy.deepcopy(model)
    prepared = prepare(model)
    ours = train(model, case, **loop)
    known: dict[Any, Record] = {} if plain_runs is None else plain_runs
    key = case.name, tuple(sorted((name, str(value)) for name, value in loop.items()))
    if key not in known:
        known[key] = train(twin, case, **loop)
    assert_same(ours, known[key])
    return ours, prepared


def attached_plan(model: nn.Module) -> Any:
    executor = executor_of(model)
    assert executor is not None
    return executor.plan


def plan_of(actions: Iterable[Action], **changes: Any) -> Plan:
    """A plan made by hand: these actions, and numbers that promise nothing."""
    plan = Plan(
        actions=tuple(actions),
        baseline_peak_bytes=2,
        predicted_peak_bytes=1,
        predicted_slowdown=1.0,
        budget_bytes=3,
        fits=True,
        decision_source="user_config",
        mode="balanced",
        device_type="cpu",
        device_name="test",
        optimizer_name="adamw",
        profile_source="static",
        model_class="",
        inputs=(),
        summary=Reason("made by hand"),
        rows=(),
    )
    return dataclasses.replace(plan, **changes)


def checkpoint_all(model: nn.Module, keep: tuple[Any, ...] = (), every: int = 1, verify: bool = False) -> Executor:
    """Execute a plan that checkpoints every (second, third ...) block."""
    blocks = list(find_blocks(model))[::every]
    assert blocks, "the model has no blocks"
    plan = plan_of(Checkpoint(fqn, keep=keep) for fqn in blocks)
    return execute(model, plan, ExecutionSettings(verify=verify))


SELECTIVE = ("matmul", "attention")
