"""What happens in training, as numbers that anybody may read at any time.

    recorder = StepRecorder(executor)       # until the executor is detached
    recorder.read()                         # the latest `Telemetry`, from any thread

Numbers are taken down by the thread that trains, when an optimizer has stepped on the model's parameters. Who reads
them gets what was taken down last, and touches no tensor. What is counted is added up over all plans; a count that
starts anew with a plan goes on from where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._execute.executor import Executor
from memscale._plan import Plan
from memscale._torch import private
from memscale._torch.live_bytes import Kind, LiveBytes, rounding_of
from memscale._torch.optimizer_steps import StepWatcher, owns_any, watch_steps
from memscale._torch.overrides import OwnHook, undo_with
from memscale._torch.step_meter import StepMeter, num_samples_of
from memscale.techniques.offload.optimizer.buckets import Waiting
from memscale.techniques.offload.optimizer.separable import is_shadow
from memscale.techniques.offload.store.stores import Store

_KINDS: dict[Kind, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "other": "buffers",
}
_MAX_SEEN_PLANS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Telemetry:
    """One model's training, as it was when an optimizer stepped last."""

    model_class: str
    plan: Plan | None = None
    num_plans: int = 0
    """How often another plan than the one before was in force."""
    held_bytes: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Bytes by tier (device, host, disk) and kind. Activations are those that the latest forward has left."""
    peak_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Peaks by number: "allocated" and "reserved" of an accelerator; "live" in the measured step of a CPU."""
    moved_bytes: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Bytes by kind of tensor and direction ("out", "in")."""
    waited_s: float = 0.0
    """Time in which the training thread was blocked by a transfer."""
    num_recomputes: int = 0
    recompute_s: float = 0.0
    num_skipped_steps: int = 0
    loss_scale: float | None = None
    num_steps: int = 0
    step_s: float = 0.0
    """Time in these steps and between them."""
    num_samples: int = 0
    samples_per_second: float | None = None
    """The rate of the latest step."""


class StepRecorder(OwnHook, StepWatcher):
    """Takes down one model's steps: a forward pre-hook, and a watcher of optimizers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.latest = Telemetry(type(executor.model).__name__)
        self._meter = StepMeter()
        self._totals = _Totals()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._plans: list[Plan] = []
        self._num_plans = 0
        self._held: dict[tuple[str, str], int] = {}
        self._activations: dict[tuple[str, str], int] = {}
        self._before: dict[str, int] = {}
        """Bytes by tier when the forward began."""
        self._is_asked = True
        """Somebody has read since bytes were counted: that takes milliseconds, and is not done at every step."""
        self._stepped_in_backward = False
        self._attach(executor.model)

    def _attach(self, model: nn.Module) -> None:
        self._meter.begin(model, None, self._device.type)
        on_detach = self._executor.on_detach
        on_detach(model.register_forward_pre_hook(self, with_kwargs=True).remove)
        on_detach(model.register_forward_hook(_AfterForward(self), always_call=True).remove)
        watching = contextlib.ExitStack()
        undo_with(model, watch_steps(self), watching)
        on_detach(watching.close)
        on_detach(self._meter.stop)

    def read(self) -> Telemetry:
        """What was taken down last."""
        self._is_asked = True
        return self.latest

    # ---- in the thread that trains

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()) or private.inside_functional_transform():
            return
        if self._stepped_in_backward:
            self._end_step()
        plan = self._executor.plan
        if plan is not None and not any(plan is seen for seen in self._plans[-1:]):
            self._meet(plan)
        self._meter.num_samples += num_samples_of(args, kwargs)
        self._meter.step_begins((args, kwargs))
        self._before = self._waiting_bytes() | self._allocated_bytes()

    def _meet(self, plan: Plan) -> None:
        """Another plan is in force."""
        self._num_plans += 1
        if not any(plan is seen for seen in self._plans):
            self._meter.measure_again()
        self._plans = [*(seen for seen in self._plans if seen is not plan), plan][-_MAX_SEEN_PLANS:]

    def after_forward(self, has_failed: bool) -> None:
        """The forward is over; what it left for backward is the activations."""
        if has_failed:
            self._meter.stop()  # a step that will not end
            return
        now = self._waiting_bytes() | self._allocated_bytes()
        self._activations = {
            (tier, "activations"): max(0, num_bytes - self._before.get(tier, 0)) for tier, num_bytes in now.items()
        }

    def concerns(self, optimizer: Optimizer) -> bool:
        return not is_shadow(optimizer) and owns_any(optimizer, self._executor.model.parameters())

    def after_step(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._meter.know_optimizer(optimizer)
        if private.graph_task_id() >= 0:
            self._stepped_in_backward = True  # backward goes on; the next forward shows that the step is over
        else:
            self._end_step()

    def _end_step(self) -> None:
        self._stepped_in_backward = False
        meter, before = self._meter, self.latest
        seconds_before = meter.seconds
        meter.step_ends()
        seconds = meter.seconds - seconds_before
        if self._is_asked:
            self._is_asked = False
            self._held = self._count_held()
        stats = self._executor.stats()
        self.latest = dataclasses.replace(
            before,
            plan=self._executor.plan,
            num_plans=self._num_plans,
            held_bytes={**self._held, **self._activations},
            peak_bytes=self._peaks(stats),
            moved_bytes=self._moved(),
            waited_s=self._waited(),
            num_recomputes=self._totals.of("recomputes", stats.num_recomputes),
            recompute_s=self._totals.of("recompute_s", stats.recompute_s),
            num_skipped_steps=self._totals.of("skipped", stats.num_skipped_steps),
            loss_scale=stats.loss_scale,
            num_steps=meter.num_steps,
            step_s=meter.seconds,
            num_samples=meter.num_samples,
            samples_per_second=(meter.num_samples - before.num_samples) / seconds if seconds else None,
        )

    # ---- what is counted

    @property
    def _device(self) -> torch.device:
        return self._executor.settings.device_of(self._executor.model)

    def _peaks(self, stats: Any) -> dict[str, int]:
        found = {"allocated": stats.peak_bytes, "reserved": stats.reserved_peak_bytes}
        if stats.device_type == "cpu":
            found["live"] = self._meter.peak_bytes
        return {number: num_bytes for number, num_bytes in found.items() if num_bytes is not None}

    def _count_held(self) -> dict[tuple[str, str], int]:
        """Parameters, gradients, buffers and optimizer state, where they are now."""
        model, device_type = self._executor.model, self._device.type
        books = {"device": LiveBytes(device_type, rounding_of(device_type))}
        if device_type != "cpu":
            books["host"] = LiveBytes("cpu")
        parameters = list(model.parameters())
        for book in books.values():
            book.see_all(parameters, "parameters")
            book.see_all([parameter.grad for parameter in parameters if parameter.is_leaf], "gradients")
            book.see_all(list(model.buffers()), "other")
            book.see_all([_state_of(optimizer) for optimizer in self._optimizers], "optimizer state")
        held = {(tier, name): book.by_kind[kind] for tier, book in books.items() for kind, name in _KINDS.items()}
        for tier, num_bytes in self._waiting_bytes().items():  # between steps nothing else waits there
            held[tier, "optimizer state"] = held.get((tier, "optimizer state"), 0) + num_bytes
        return held

    def _allocated_bytes(self) -> dict[str, int]:
        """What an accelerator's allocator has handed out. A CPU does not count that."""
        device = self._device
        if device.type == "cpu":
            return {}
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        counted = private.allocator_bytes(index)
        return {} if counted is None else {"device": counted[0]}

    def _waiting_bytes(self) -> dict[str, int]:
        """Activations and optimizer state in the stores of the next tiers. Streamed parameters are counted as such."""
        held: dict[str, int] = {}
        for leaf in self._leaves():
            tier = "host" if leaf.in_memory else "disk"
            held[tier] = held.get(tier, 0) + leaf.counters.held_bytes
        return held

    def _leaves(self) -> list[Store]:
        users = self._executor.offload_users
        stores = [users[name].transfers.store for name in ("activations", "optimizer") if _moves(users.get(name))]
        return list({id(leaf): leaf for store in stores for leaf in store.leaves()}.values())

    def _moved(self) -> dict[tuple[str, str], int]:
        users, found = self._executor.offload_users, {}
        if "streaming" in users:
            transfers = users["streaming"].stats.transfers
            found["parameters"] = transfers.bytes_sent, transfers.bytes_fetched
        if "activations" in users:
            stats = users["activations"].stats
            found["activations"] = stats.sent_bytes, stats.fetched_bytes
        if _moves(users.get("optimizer")):
            stats = users["optimizer"].stats
            found["optimizer state"] = stats.bytes_to_store, stats.bytes_from_store
        for kind, (out_bytes, in_bytes) in found.items():
            self._totals.of(("moved", kind, "out"), out_bytes)
            self._totals.of(("moved", kind, "in"), in_bytes)
        return self._totals.under("moved")

    def _waited(self) -> float:
        users = self._executor.offload_users.values()
        books = {id(user.transfers.stats): user.transfers.stats for user in users if _moves(user)}
        total: float = self._totals.of("waited_s", sum(stats.host_waited_s for stats in books.values()))
        return total


class _Totals:
    """Counts that go on where a plan ends and another one begins to count from nothing."""

    def __init__(self) -> None:
        self._last: dict[Hashable, Any] = {}
        self._sums: dict[Hashable, Any] = {}

    def of(self, name: Hashable, count: Any) -> Any:
        """The sum so far, where a counter shows this now."""
        last = self._last.get(name, 0)
        self._last[name] = count
        self._sums[name] = self._sums.get(name, 0) + (count - last if count >= last else count)
        return self._sums[name]

    def under(self, first: str) -> dict[tuple[str, str], int]:
        return {name[1:]: total for name, total in self._sums.items() if isinstance(name, tuple) and name[0] == first}


class _AfterForward(OwnHook):
    """A forward hook that is also called where the forward has raised."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = weakref.ref(recorder)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self._recorder()
        if recorder is not None and module.training and torch.is_grad_enabled():
            recorder.after_forward(has_failed=output is None)


def _moves(user: Any) -> bool:
    """Whether this technique moves tensors; an optimizer that steps in buckets need not."""
    return user is not None and getattr(user, "transfers", None) is not None


def _state_of(optimizer: Optimizer) -> list[Any]:
    """The tensors of an optimizer's state that are there, without fetching those that wait elsewhere."""
    entries = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return [_tensors_here(entry) for entry in entries]


def _tensors_here(entry: Any) -> Any:
    if isinstance(entry, Waiting) and entry.bucket is not None:
        return [*entry.kept.values(), entry.bucket.memory]  # packed state waits in memory of the device
    return entry
