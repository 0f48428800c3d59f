"""Random histories: a model under MemScale and its plain twin, to which the same things happen in the same order.

    with History("simgpu", directory) as history:
        history.wrap("stream", asynchronous=True)
        history.train(Batch(2, 8), parts=2)
        history.fail_in_backward(block=1)
        history.detach()

Everything that one of them does from the same seed, the other does too: losses, outputs, gradients, weights, buffers,
optimizer state and random states are compared bit for bit after each event. What a failure leaves undone is what it
would leave undone in plain training. After a `detach()` no hook, thread, file, pinned or device byte is left.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

import memscale
import simgpu
from benchmarks.zoo.twins import _kept, differences, random_states, seed
from benchmarks.zoo.ways import Way, written_plan
from memscale import AsyncOffloadConfig, Config, MemScaleError, Plan
from memscale._errors import ParkedError, PartialStepError
from memscale._execute.executor import executor_of
from memscale._plan import Conditions
from tests.techniques.offload.runs import let_autograd_finish
from tests.training.nth_failure import TECHNIQUES, failing

WIDTH, VOCABULARY, NUM_BLOCKS = 16, 32, 3
SMALL_BYTES = 1024
"""Of windows and prefetches: less than what travels."""
LITTLE_HOST_GB = 8e-6
"""Host memory where most of what leaves the device is to go to disk."""
LETS_GO_S = 60.0
SOURCE = os.path.dirname(os.path.abspath(memscale.__file__))
ALLOCATION_BYTES = 512
"""Device allocations are rounded up to this."""


# ---- the model


class Block(nn.Module):
    """Random numbers, a buffer that counts calls, and places to fail at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.fails_in: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = F.gelu(self.up(self.norm(x)))
        if self.fails_in == "forward":
            self.fails_in = None
            raise Deliberate("in forward")
        if self.fails_in == "backward" and hidden.requires_grad:
            hidden.register_hook(_fail)
        return x + F.dropout(self.down(hidden), 0.2, self.training) * (1 + self.calls / 64)


class Net(nn.Module):
    """Blocks between an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Deliberate(Exception):
    """What goes wrong in a model or a loop of the user's own."""


def _fail(gradient: torch.Tensor) -> None:
    raise Deliberate("in backward")


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "two groups": lambda model: torch.optim.Adam(
        [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:], "lr": 3e-3}], lr=1e-2
    ),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """The shape of what is trained on."""

    rows: int = 2
    length: int = 8

    def ids(self, number: int, device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(VOCABULARY, (self.rows, self.length), generator=generator).to(device)


@dataclasses.dataclass
class Side:
    """One of the two."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    phase: str = ""

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids.roll(1, 1).reshape(-1))

    def checkpoint(self) -> bytes:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        saved = torch.load(io.BytesIO(checkpoint), weights_only=True, map_location="cpu")
        self.optimizer.zero_grad()
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def everything(self) -> dict[str, Any]:
        found = {f"weight or buffer {name}": _kept(value) for name, value in self.model.state_dict().items()}
        found |= {f"{name} is trained": p.requires_grad for name, p in self.model.named_parameters()}
        saved = self.optimizer.state_dict()
        found["groups"] = str(saved["param_groups"])
        for number, entry in saved["state"].items():
            found |= {f"state {key} of parameter {number}": _kept(value) for key, value in entry.items()}
        return found

    def gradients(self) -> dict[str, Any]:
        return {f"gradient of {name}": _kept(p.grad) for name, p in self.model.named_parameters()}


# ---- the ways in which it is wrapped

PLANNED: dict[str, dict[str, Any]] = {
    "as low as possible": {"force_optimize": True},
    "conservative": {"mode": "conservative", "force_optimize": True},
    "left alone": {},
}
STEPS_IN_BACKWARD = ("in backward",)
STREAMS = (
    *("stream", "stream, step on the device", "everything", "everything, step on the device"),
    *("guests and half of the optimizer", "guests and early state"),
)
ON_CPU = tuple(name for name in TECHNIQUES if name not in STREAMS)


def plan_for(model: nn.Module, technique: str, device: str, asynchronous: bool) -> Plan:
    plan = written_plan(Way(device, {"async_offload": asynchronous}), TECHNIQUES[technique](model))
    small = Conditions(
        async_offload=asynchronous,
        prefetch_depth=1,
        prefetch_bytes=SMALL_BYTES,
        window_bytes=SMALL_BYTES,
        min_tensor_bytes=0,
    )
    return dataclasses.replace(plan, conditions=small)


# ---- what happens to it


class History:
    """A model and its twin; every method is an event."""

    def __init__(self, device: str, directory: pathlib.Path, optimizer: str = "AdamW") -> None:
        self.device, self.directory = device, directory
        let_autograd_finish()
        self._bytes_before, self._threads_before = _held_bytes(), _threads()
        torch.manual_seed(1)
        plain = Net().to(device)
        ours = copy.deepcopy(plain)
        self.optimizer_name = optimizer
        self.plain = Side(plain, OPTIMIZERS[optimizer](plain))
        self.ours = Side(ours, OPTIMIZERS[optimizer](ours))
        self._parameters = [id(p) for p in ours.parameters()]
        self._marks = _marks(ours)
        self.number = 0
        self.saved: tuple[bytes, bytes] | None = None
        self.way: str | None = None
        self.is_parked = False
        self.events: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif executor_of(self.ours.model) is not None:
            self.ours.model._memscale_executor.detach()

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.plain, self.ours

    # wrapping

    def wrap(self, way: str, asynchronous: bool = True, disk: bool = False) -> None:
        """Under a plan that treats every block, or as it is planned; over what was there before."""
        config = Config(
            enable_logging=False,
            device=self.device,
            offload_dir=str(self.directory),
            max_cpu_offload_gb=LITTLE_HOST_GB if disk else None,
            async_config=AsyncOffloadConfig(min_tensor_bytes=0, window_bytes=SMALL_BYTES, prefetch_bytes=SMALL_BYTES),
            async_offload=asynchronous,
        )
        if way in PLANNED:
            memscale.wrap(self.ours.model, config.replace(**PLANNED[way]))
        else:
            plan = plan_for(self.ours.model, way, self.device, asynchronous)
            memscale.execute(self.ours.model, plan, config)
        self.way = way
        self.check()

    def detach(self) -> None:
        """Back to what it was, and nothing is left."""
        if executor_of(self.ours.model) is not None:
            memscale.detach(self.ours.model)
        self.way, self.is_parked = None, False
        self.check()
        self.check_nothing_is_left()

    def park(self) -> None:
        memscale.park(self.ours.model)
        self.is_parked = True
        self.check()

    def resume(self) -> None:
        memscale.resume(self.ours.model)
        self.is_parked = False
        self.check()

    def use_while_parked(self) -> None:
        """It is refused, and changes nothing."""
        for use in (lambda: self.ours.loss(Batch().ids(0, self.device)), self.ours.optimizer.step):
            try:
                use()
            except ParkedError:
                continue
            raise AssertionError("a parked model was used")
        self.check()

    # training

    def train(self, batch: Batch = Batch(), parts: int = 1, clipped: bool = False, to_none: bool = True) -> None:
        """One step of the optimizer, over one or several batches."""
        self._both(lambda side: self._step(side, batch, parts, clipped, to_none))

    def _step(self, side: Side, batch: Batch, parts: int, clipped: bool, to_none: bool) -> dict[str, Any]:
        side.phase = "forward"
        side.optimizer.zero_grad(set_to_none=to_none)
        found = {}
        for part in range(parts):
            side.phase = "forward"
            loss = side.loss(batch.ids(self.number + part, self.device)) / parts
            side.phase = "backward"
            loss.backward()
            found[f"loss {part}"] = _kept(loss)
        if self.way not in STEPS_IN_BACKWARD:
            found |= side.gradients()
        if clipped:
            nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)
        side.phase = "step"
        side.optimizer.step()
        side.phase = "after"
        return found

    def accumulate(self, batch: Batch = Batch()) -> None:
        """A backward whose gradients a later step adds to or throws away."""
        self._both(lambda side: self._backward(side, batch))

    def _backward(self, side: Side, batch: Batch) -> dict[str, Any]:
        side.loss(batch.ids(self.number, self.device)).backward()
        return side.gradients()

    def step_alone(self) -> None:
        """A step with the gradients that are there."""
        self._both(lambda side: side.optimizer.step())

    def two_forwards(self, batch: Batch = Batch(), summed: bool = True) -> None:
        """Both before the first backward; of their sum, or one after the other, the first one first."""

        def act(side: Side) -> dict[str, Any]:
            side.optimizer.zero_grad()
            losses = [side.loss(batch.ids(self.number + n, self.device)) for n in range(2)]
            for loss in [losses[0] + losses[1]] if summed else losses:
                loss.backward()
            found = side.gradients()
            side.optimizer.step()
            return found

        self._both(act)

    def retained(self, batch: Batch = Batch()) -> None:
        """Two backwards of one forward."""

        def act(side: Side) -> dict[str, Any]:
            side.optimizer.zero_grad()
            loss = side.loss(batch.ids(self.number, self.device))
            loss.backward(retain_graph=True)
            loss.backward()
            found = side.gradients()
            side.optimizer.step()
            return found

        self._both(act)

    def forward_only(self, batch: Batch = Batch()) -> None:
        """A training forward whose graph is dropped."""
        self._both(lambda side: {"loss": _kept(side.loss(batch.ids(self.number, self.device)))})

    def evaluate(self, batch: Batch = Batch(), inference: bool = False) -> None:
        def act(side: Side) -> dict[str, Any]:
            side.model.eval()
            with torch.inference_mode() if inference else torch.no_grad():
                output = side.model(batch.ids(self.number, self.device))
            side.model.train()
            return {"output": _kept(output)}

        self._both(act)

    def evaluate_with_gradients(self, batch: Batch = Batch()) -> None:
        """`eval()` alone: a graph is made, and gradients are accumulated."""

        def act(side: Side) -> dict[str, Any]:
            side.optimizer.zero_grad()
            side.model.eval()
            side.loss(batch.ids(self.number, self.device)).backward()
            side.model.train()
            found = side.gradients()
            side.optimizer.zero_grad()
            return found

        self._both(act)

    def train_without_gradients(self, batch: Batch = Batch()) -> None:
        """`no_grad` alone: buffers are written."""

        def act(side: Side) -> dict[str, Any]:
            with torch.no_grad():
                return {"output": _kept(side.model(batch.ids(self.number, self.device)))}

        self._both(act)

    # what changes between steps

    def freeze(self, block: int, trained: bool) -> None:
        def act(side: Side) -> None:
            side.optimizer.zero_grad()
            side.model.blocks[block].requires_grad_(trained)

        self._both(act)

    def change_rate(self, rate: float) -> None:
        def act(side: Side) -> None:
            for group in side.optimizer.param_groups:
                group["lr"] = rate

        self._both(act)

    def new_optimizer(self, name: str) -> None:
        for side in self.sides:
            side.optimizer.zero_grad()
            side.optimizer = OPTIMIZERS[name](side.model)
        self.optimizer_name, self.saved = name, None
        self.check()

    def save(self) -> None:
        self.saved = self.plain.checkpoint(), self.ours.checkpoint()
        self.check()

    def load(self) -> None:
        """What was saved, into the other one: a checkpoint is the same, whoever wrote it."""
        if self.saved is not None:
            of_plain, of_ours = self.saved
            self.plain.load(of_ours)
            self.ours.load(of_plain)
            self.check()

    def copy_is_plain(self, batch: Batch = Batch()) -> None:
        """A copy trains by itself, as one of the twin does, and the model does not notice."""

        def act(side: Side) -> dict[str, Any]:
            copied = copy.deepcopy(side.model)
            assert executor_of(copied) is None
            copied.to(self.device)
            other = Side(copied, torch.optim.SGD(copied.parameters(), lr=1e-2))
            other.optimizer.zero_grad()
            other.loss(batch.ids(self.number, self.device)).backward()
            other.optimizer.step()
            return other.everything()

        self._both(act)

    # failures

    def fail_in_forward(self, block: int, batch: Batch = Batch()) -> None:
        self._both(lambda side: self._failing(side, block, "forward", batch))

    def fail_in_backward(self, block: int, batch: Batch = Batch()) -> None:
        """Weights stay as they are, but where parameters are stepped in backward: then a checkpoint is loaded."""
        if self.way in STEPS_IN_BACKWARD:
            return
        self._both(lambda side: self._failing(side, block, "backward", batch))

    def _failing(self, side: Side, block: int, where: str, batch: Batch) -> None:
        side.optimizer.zero_grad()
        mine: Any = side.model.blocks[block]
        mine.fails_in = where
        try:
            side.loss(batch.ids(self.number, self.device)).backward()
        except Deliberate:
            pass
        else:
            assert where == "backward", "the forward did not fail"
            assert not any(p.requires_grad for p in mine.parameters()), "the backward did not fail"
        finally:
            mine.fails_in = None
            side.optimizer.zero_grad()

    def fail_between(self, batch: Batch = Batch()) -> None:
        """The loss raises: a graph is made, and dropped."""

        def act(side: Side) -> None:
            side.optimizer.zero_grad()
            with contextlib.suppress(Deliberate):
                loss = side.loss(batch.ids(self.number, self.device))
                raise Deliberate(f"about {loss.dtype}")

        self._both(act)

    def interrupt(self, nth: int, batch: Batch = Batch()) -> bool:
        """Ctrl-C at the n-th line of MemScale's that a step comes to. Whether there are so many."""
        return self._broken(lambda: interrupted(nth), KeyboardInterrupt, batch)

    def run_out_of(self, fault: str, nth: int, batch: Batch = Batch()) -> bool:
        """The n-th allocation, pinned allocation, copy, write or read of a step fails. Whether there are so many."""
        return self._broken(lambda: failing(fault, nth), (RuntimeError, MemScaleError), batch)

    def _broken(self, breaking: Callable[[], Any], kinds: Any, batch: Batch) -> bool:
        """A step of ours alone is broken; what it did not do it does once more, what it did half is loaded."""
        before = self.ours.checkpoint()
        weights = self.ours.everything()
        seed(self.number)
        try:
            with breaking():
                self._step(self.ours, batch, 1, False, True)
                if self.device != "cpu":
                    torch.accelerator.synchronize()
        except kinds as caught:
            error = caught.with_traceback(None)
        else:
            error = None
        where = self.ours.phase
        if error is not None:
            _forget_frames(error)
        self.events.append(f"-> {error!r} in {where}")
        self._settle(error, where, before, weights, batch)
        self.number += 10
        self.check()
        return error is not None

    def _settle(self, error: Any, where: str, before: bytes, weights: dict[str, Any], batch: Batch) -> None:
        """Bring both to the same place again, without trusting more than is promised."""
        if error is None:
            seed(self.number)
            self._step(self.plain, batch, 1, False, True)
            return
        if self.way in STEPS_IN_BACKWARD or where in ("step", "after") or isinstance(error, PartialStepError):
            self.ours.load(before)
        else:
            moved = [name for name in differences(self.ours.everything(), weights) if not name.endswith("calls")]
            assert not moved, f"{error!r} in {where} changed {moved[:4]}"
            self.ours.optimizer.zero_grad()
            calls = torch.load(io.BytesIO(before), weights_only=True, map_location="cpu")["model"]
            self.ours.model.load_state_dict({n: v for n, v in calls.items() if n.endswith("calls")}, strict=False)
        self.plain.optimizer.zero_grad()

    # comparing

    def _both(self, act: Callable[[Side], dict[str, Any] | None]) -> None:
        results = []
        for side in self.sides:
            seed(self.number)
            found = act(side) or {}
            results.append(found | random_states())
        self.number += 10
        wrong = differences(results[1], results[0])
        assert not wrong, f"{len(wrong)} differ: {wrong[:4]}"
        self.check()

    def check(self) -> None:
        """Both are the same now, and the parameters are the objects that they were."""
        wrong = differences(self.ours.everything(), self.plain.everything())
        assert not wrong, f"{len(wrong)} differ: {wrong[:4]}"
        assert [id(p) for p in self.ours.model.parameters()] == self._parameters
        reports = simgpu.take_reports()
        assert not reports, reports[:2]

    def check_nothing_is_left(self) -> None:
        """No hook, file, thread, pinned or device byte beside those of two plain models."""
        assert _marks(self.ours.model) == self._marks
        assert list(self.directory.iterdir()) == []
        expected = _sum(self._bytes_before, (self._own_bytes(), 0))
        wait_for(lambda: (_held_bytes(), _threads()), (expected, self._threads_before))

    def _own_bytes(self) -> int:
        if self.device == "cpu":
            return 0
        tensors: list[torch.Tensor] = []
        for side in self.sides:
            tensors += [*side.model.parameters(), *side.model.buffers()]
            tensors += [p.grad for p in side.model.parameters() if p.grad is not None]
            tensors += [v for s in side.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_cpu}
        return sum(-(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES for size in storages.values())

    def close(self) -> None:
        """The end of the history."""
        if self.is_parked:
            self.resume()
        self.detach()


# ---- looking


def wait_for(look: Callable[[], Any], expected: Any) -> None:
    """Autograd's thread drops a pass a moment after it has raised; only a failure waits to the end."""
    deadline_s = time.monotonic() + LETS_GO_S
    while (found := look()) != expected and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert found == expected, f"{found}, where {expected} was expected"


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _held_bytes() -> tuple[int, int]:
    """Device and pinned bytes in use."""
    let_autograd_finish()
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(), simgpu.pinned_stats().requested_bytes


def _threads() -> list[str]:
    living = (t for t in threading.enumerate() if t.is_alive() and not isinstance(t, threading._DummyThread))
    return sorted(thread.name for thread in living)


def _marks(model: nn.Module) -> list[Any]:
    """What MemScale could leave on a module: another class, an attribute, a hook."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")}
        found.append((name, type(module), sorted(vars(module)), hooks))
    return found


def _forget_frames(error: BaseException) -> None:
    """Tracebacks hold frames, and those the tensors of the step that failed."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def interrupted(nth: int) -> contextlib.AbstractContextManager[None]:
    """`KeyboardInterrupt` at the n-th line of MemScale's source that the main thread comes to, once."""
    return _interrupted(nth, lambda code: True)


def interrupted_in(file: str, function: str, nth: int) -> contextlib.AbstractContextManager[None]:
    """The same at the n-th line inside of one function."""
    return _interrupted(nth, lambda code: code.co_name == function and code.co_filename.endswith(f"/{file}"))


def signalled(nth: int) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C itself at the n-th line of MemScale's source, once: it may wait, and `interrupted` does not."""
    return _interrupted(nth, lambda code: True, by=lambda where: signal.raise_signal(signal.SIGINT))


def _raised(where: str) -> None:
    raise KeyboardInterrupt(f"at {where}")


@contextlib.contextmanager
def _interrupted(nth: int, concerns: Callable[[CodeType], bool], by: Callable[[str], None] = _raised) -> Iterator[None]:
    """Nothing else may be raised where errors are lost (`__del__`, callbacks of weak references)."""
    left, lost = [nth], list[str]()

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        is_ours = frame.f_code.co_filename.startswith(SOURCE) and concerns(frame.f_code)
        return at_line if is_ours and not _loses_errors(frame) else None

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                by(f"{frame.f_code.co_filename[len(SOURCE) + 1 :]}:{frame.f_lineno}")
        return at_line

    def at_loss(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            lost.append(f"{unraisable.exc_value!r} in {unraisable.object!r}")

    tracing, losing = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = at_loss
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(tracing)
        gc.collect()
        sys.unraisablehook = losing
        assert not lost, lost


def _loses_errors(frame: FrameType) -> bool:
    """Called by the interpreter for an object that goes: what is raised there is written to stderr, and lost."""
    seen: FrameType | None = frame
    while seen is not None and seen.f_code.co_filename.startswith(SOURCE):
        if seen.f_code.co_name == "__del__":
            return True
        seen = seen.f_back
    return seen is None or seen.f_code.co_filename.endswith("weakref.py")
