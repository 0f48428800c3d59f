"""One step in which one thing fails: the n-th allocation, pinned allocation, copy, event, file read or write.

    scene = Scene(TECHNIQUES["stream"], True, directory, PlainRun())
    outcome = scene.fail("copy", nth)                   # the n-th copy from the beginning of the second step
    outcome = scene.fail("copy", nth, Strike(0, "optimizer"))    # from the beginning of the first `optimizer.step()`

The step raises an error that says what failed, or goes well without what failed. The weights are those of before the
step or of after it; where the optimizer was half-way, `PartialStepError` says so and a checkpoint is loaded. Then
training goes on, and ends bit for bit where a plain run ends; nothing that was held is held longer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import gc
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

import simgpu
from memscale._config import AsyncOffloadConfig
from memscale._errors import MemScaleError, PartialStepError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import (
    Action,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    StepInBuckets,
    StreamParameters,
)
from memscale._profile.layers import find_blocks
from memscale.techniques.offload.kept_outputs import OffloadKept
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.in_backward import StepInBackward
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.parameters.streaming import rest_of
from tests.techniques.offload.runs import DEVICE, Gpt, let_autograd_finish, loss_of, same, weights

STEPS = 3
BUCKET_BYTES = 8_000
ROOM_BYTES = 1 << 12
"""Host memory where most of what leaves the device is to go to disk."""
LETS_GO_S = 60.0
Actions = Callable[[nn.Module], list[Action]]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def _blocks(*kinds: Callable[[str], Action]) -> Actions:
    return lambda model: [kind(fqn) for kind in kinds for fqn in find_blocks(model)]


def _and(first: Actions, *rest: Action) -> Actions:
    return lambda model: [*first(model), *rest]


def _selective(fqn: str) -> Action:
    return Checkpoint(fqn, keep=("matmul", "attention"))


def _stream_all(model: nn.Module) -> list[Action]:
    blocks = list(find_blocks(model))
    return [StreamParameters(fqn) for fqn in (*rest_of(model, blocks), *blocks)]


_NOTHING: Actions = lambda model: []  # noqa: E731
_EVERYTHING = _and(
    lambda model: [*_stream_all(model), *_blocks(OffloadActivations)(model)], OffloadOptimizer(BUCKET_BYTES)
)
TECHNIQUES: dict[str, Actions] = {
    "checkpoint": _blocks(Checkpoint),
    "activations": _blocks(OffloadActivations),
    "checkpoint and activations": _blocks(Checkpoint, OffloadActivations),
    "kept outputs": _blocks(_selective, OffloadActivations, OffloadKept),
    "optimizer": _and(_NOTHING, OffloadOptimizer(BUCKET_BYTES)),
    "half of the optimizer": _and(_NOTHING, OffloadOptimizer(BUCKET_BYTES, resident_share=0.5)),
    "buckets": _and(_NOTHING, StepInBuckets(BUCKET_BYTES)),
    "in backward": _and(_NOTHING, StepInBackward(BUCKET_BYTES)),
    "stream": _blocks(StreamParameters),
    "stream, step on the device": _and(_blocks(StreamParameters), StepOnDevice(BUCKET_BYTES)),
    "everything": _EVERYTHING,
    "everything, step on the device": _and(_EVERYTHING, StepOnDevice(BUCKET_BYTES)),
    "guests and half of the optimizer": _and(
        _blocks(StreamParameters), StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES, resident_share=0.5)
    ),
    "guests and early state": _and(
        _blocks(StreamParameters, lambda fqn: FetchStateEarly(fqn, 1 << 16)),
        StepOnDevice(BUCKET_BYTES),
        OffloadOptimizer(BUCKET_BYTES),
    ),
    "early and late state": _and(
        _blocks(lambda fqn: FetchStateEarly(fqn, 1 << 16), lambda fqn: SendStateLate(fqn, 1 << 16)),
        OffloadOptimizer(BUCKET_BYTES),
    ),
}
OUR_STEPS = (OffloadOptimizer, StepInBuckets, StepInBackward, StepOnDevice)
FAULTS = ("allocation", "pinned_allocation", "copy", "event")
_FILE_FAULTS: dict[str, tuple[str, int | None]] = {
    "reserve": ("posix_fallocate", errno.ENOSPC),
    "write full": ("pwrite", errno.ENOSPC),
    "write": ("pwrite", errno.EIO),
    "read": ("preadv", errno.EIO),
    "short read": ("preadv", None),
}
FILE_FAULTS = tuple(_FILE_FAULTS)


class Struck:
    """Whether the fault was reached."""

    fired = False


@contextlib.contextmanager
def failing(fault: str, nth: int, struck: Struck | None = None) -> Iterator[Struck]:
    """The n-th of a kind fails from here on, once."""
    struck = struck or Struck()
    if fault in _FILE_FAULTS:
        with _failing_file(*_FILE_FAULTS[fault], nth, struck):
            yield struck
        return
    injected = None
    try:
        with getattr(simgpu, f"fail_{fault}")(nth) as injected:
            yield struck
    finally:
        struck.fired = injected is not None and injected.fired


@contextlib.contextmanager
def _failing_file(function: str, error: int | None, nth: int, struck: Struck) -> Iterator[None]:
    original, left = getattr(os, function), [nth]

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return original(*args)
        struck.fired = True
        if error is None:
            return 0  # the file ends here
        raise OSError(error, os.strerror(error))

    setattr(os, function, call)
    try:
        yield
    finally:
        setattr(os, function, original)


class PlainRun:
    """Weights and losses after each step of plain training."""

    def __init__(
        self, prepare: Callable[[nn.Module], None] | None = None, make_optimizer: MakeOptimizer | None = None
    ) -> None:
        model = built().to(DEVICE)
        if prepare is not None:
            prepare(model)
        self.make_optimizer = make_optimizer or adamw
        optimizer = self.make_optimizer(model)
        self.weights = [weights(model)]
        self.losses = []
        for number in range(STEPS):
            self.losses.append(step(model, optimizer, number))
            self.weights.append(weights(model))


def built() -> nn.Module:
    torch.manual_seed(1)
    return Gpt(2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    phase: list[str] | None = None,
    around_optimizer: contextlib.AbstractContextManager[Any] | None = None,
) -> float:
    """One step of a usual loop; `phase` gets what it is at."""
    phase = [] if phase is None else phase
    torch.manual_seed(number)
    optimizer.zero_grad()
    phase[:] = ["forward"]
    loss = loss_of(model, number)
    phase[:] = ["backward"]
    loss.backward()
    phase[:] = ["step"]
    with around_optimizer or contextlib.nullcontext():
        optimizer.step()
        torch.accelerator.synchronize()
    phase[:] = ["after"]
    return loss.item()


@dataclasses.dataclass(frozen=True)
class Strike:
    """From where on failures are counted."""

    step: int = 1
    """The number of the step that fails. State of the optimizer is made in the first one, number 0."""
    of: Literal["step", "optimizer"] = "step"
    """The whole step, or `optimizer.step()` alone."""


SECOND_STEP = Strike()


class Scene:
    """A model under one technique, about to meet a failure."""

    def __init__(
        self, actions: Actions, asynchronous: bool, directory: pathlib.Path, plain: PlainRun, *, to_disk: bool = False
    ) -> None:
        self.directory, self.plain = directory, plain
        self.model = built()
        config = AsyncOffloadConfig(min_tensor_bytes=0, window_bytes=4096, prefetch_bytes=4096)
        settings = ExecutionSettings(
            DEVICE,
            asynchronous=asynchronous,
            async_config=config,
            host_budget_bytes=ROOM_BYTES if to_disk else None,
            offload_dir=str(directory),
        )
        self.executor = Executor(self.model, settings)
        self.actions = actions(self.model)
        self.executor.attach(self.actions)
        self.optimizer = plain.make_optimizer(self.model)
        self.done = 0
        self.phase: list[str] = []

    def fail(self, fault: str, nth: int, strike: Strike = SECOND_STEP) -> str:
        """How the step went in which the n-th of this kind failed; "not reached" if there are not so many."""
        self._go_on(strike.step)
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        error, struck = None, Struck()
        failure = failing(fault, nth, struck)
        is_whole = strike.of == "step"
        with failure if is_whole else contextlib.nullcontext():
            try:
                self._step(None if is_whole else failure)
            except (torch.OutOfMemoryError, RuntimeError, MemScaleError) as caught:
                error = caught.with_traceback(None)
        outcome = self._outcome(struck.fired, error)
        if outcome in ("partial", "torch's own"):
            self._load(saved)
        return self._finish(outcome, struck.fired)

    def _go_on(self, until: int) -> None:
        while self.done < until:
            self._step()

    def _step(self, around_optimizer: contextlib.AbstractContextManager[Any] | None = None) -> None:
        loss = step(self.model, self.optimizer, self.done, self.phase, around_optimizer)
        assert loss == self.plain.losses[self.done], f"the loss of step {self.done} differs"
        self.done += 1

    def _outcome(self, fired: bool, error: BaseException | None) -> str:
        if error is None:
            assert same(weights(self.model), self.plain.weights[self.done]), "no error, and other weights"
            return "not noticed" if fired else "not reached"
        assert fired, f"an error without a failure: {error!r}"
        cause = _chain(error)
        assert any("injected fault" in text or "Errno" in text or "short read" in text for text in cause), cause
        if isinstance(error, PartialStepError):
            return "partial"
        now = weights(self.model)
        if same(now, self.plain.weights[self.done]):
            return "before"
        if same(now, self.plain.weights[self.done + 1]):
            self.done += 1
            return "after"
        return self._half_way(error)

    def _half_way(self, error: BaseException) -> str:
        """An error that does not say so by itself, although some weights are stepped and others are not."""
        if self.phase == ["step"] and not any(isinstance(action, OUR_STEPS) for action in self.actions):
            return "torch's own"  # the plain optimizer's step, which MemScale has no part in
        assert any(isinstance(action, StepInBackward) for action in self.actions), f"weights of neither side: {error!r}"
        try:
            self._step()
        except PartialStepError:
            return "partial"
        raise AssertionError(f"the step after {error!r} was taken with weights of neither side")

    def _load(self, saved: tuple[Any, Any]) -> None:
        self.optimizer.zero_grad()
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def _finish(self, outcome: str, fired: bool) -> str:
        """The rest of the run. What a thread finds later is raised by the next step, once, complete or not begun."""
        late = self._late_error()
        if late is not None:
            assert fired, f"{late!r} without a failure"
            assert outcome == "not noticed", f"after {outcome!r} again: {late!r}"
            outcome = f"late, {self._outcome(fired, late)}"
            self._go_on(STEPS)
        assert same(weights(self.model), self.plain.weights[STEPS]), f"after {outcome!r} the run ends elsewhere"
        return outcome

    def _late_error(self) -> BaseException | None:
        try:
            self._go_on(STEPS)
        except (RuntimeError, MemScaleError) as late:
            return late.with_traceback(None)
        return None

    def close(self) -> None:
        """Everything is back, and nothing is held."""
        self.executor.detach()
        assert same(weights(self.model), self.plain.weights[STEPS])
        assert list(self.directory.iterdir()) == []
        self.optimizer.zero_grad()


def _chain(error: BaseException | None) -> list[str]:
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return found


def held_bytes() -> tuple[int, int]:
    """Device and pinned bytes in use, once autograd's thread has let go of a pass that failed."""
    let_autograd_finish()
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(), simgpu.pinned_stats().requested_bytes


def check_nothing_is_held(before: tuple[int, int]) -> None:
    deadline_s = time.monotonic() + LETS_GO_S
    while (after := held_bytes()) != before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert after == before, f"device and pinned bytes went from {before} to {after}"
