"""`execute(model, plan)`: attaches the plan's actions. The `Executor` owns the undo stack: detach leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._errors import MemScaleError, PlanError, is_system_name, shortened, shown
from memscale._execute import early_moments, late_moments, orderly_exit, reserving
from memscale._execute.attachment import Attachment
from memscale._execute.interrupts import undisturbed
from memscale._execute.malloc import is_short, return_freed_memory
from memscale._execute.offloading import Offloading, without_reasons
from memscale._execute.placement import Placement
from memscale._execute.settings import ExecutionSettings, is_fake
from memscale._plan import Action, AllocatorUse, LayerAction, Plan
from memscale._torch.device_memory import total_peak_bytes
from memscale._torch.overrides import EXECUTOR_ATTRIBUTE, find_module, keep_copies_clean
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.report.step_memory import StepMemory
from memscale.report.step_times import StepTimes
from memscale.techniques import TECHNIQUES, technique_of
from memscale.techniques.precision.autocast import Precision
from memscale.techniques.precision.loss_scale import LossScale
from memscale.techniques.recompute import RecomputedForward, key_value_caches

if TYPE_CHECKING:
    from memscale.report.page import Report

logger = logging.getLogger("memscale")

_IN_ORDER = sorted(TECHNIQUES, key=lambda technique: technique.place)


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """What happened since the plan was attached."""

    device_type: str
    peak_bytes: int | None
    """The device allocator's peak; None on a CPU, which keeps no such counter: use `memscale.measure()`."""
    reserved_peak_bytes: int | None
    """The allocator's peak of what it holds, which a budget bounds; None on a CPU."""
    total_peak_bytes: int | None
    """The reserved peak, the context and what others hold of the device; None on a CPU."""
    host_bytes: int
    """The most host memory that offloading took for what waits there, as the allocator of pinned memory takes it. State
    that an optimizer keeps by itself beside parameters that it steps on the host is not in it."""
    disk_bytes: int
    """The most that its file on disk held."""
    num_recomputes: int
    """Blocks recomputed in backward."""
    recompute_s: float = 0.0
    """The host's time in that. An accelerator may still be at work when the host is done."""
    transfers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Bytes moved each way, time waited and hits of prefetching, by technique."""
    loss_scale: float | None = None
    """What fp16 gradients are multiplied with now; None where nothing is scaled."""
    num_skipped_steps: int = 0
    """Steps not taken because fp16 gradients had overflowed."""


class Executor:
    """What is attached to one model. Taking it off leaves the model as it was.

        with memscale.optimize(model, optimizer, sample_input=batch) as executor:
            train(model, optimizer)
            print(executor.plan.explain(), executor.stats())

    `memscale.wrap` attaches one, too, and `memscale.detach` takes it off.
    """

    def __init__(
        self, model: nn.Module, settings: ExecutionSettings | None = None, optimizer: Optimizer | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self.settings = settings or ExecutionSettings()
        self._techniques = contextlib.ExitStack()
        self._undo = contextlib.ExitStack()
        self._placement = Placement(self._model)
        self._recomputed: list[RecomputedForward] = []
        known = weakref.ref(optimizer) if optimizer is not None else None
        self._offloading = Offloading(self._model, self.settings, known)
        self._cache_is_off = self._has_said_so = False
        self._precision: Precision | None = None
        self._begun: list[Callable[[], None]] = []
        """What is told of a forward that had begun when the techniques were attached."""
        self._loss_scale: LossScale | None = None
        """Outlives the plan: a later one goes on with it."""
        self.plan: Plan | None = None
        """None until the first training forward, when there was nothing to plan from before."""
        self.outcomes: tuple[Any, ...] = ()
        """After `apply_all_optimizations`: each technique, and what was done or why it was not."""
        self.held: list[torch.Tensor] = []
        """What exists before the step on a stage, beside the model and its inputs."""
        self._lessons: list[Callable[[], Any]] = []
        self.show_steps: Callable[[], tuple[StepMemory, StepMemory, StepTimes, PeakAgainstTime]] | None = None
        """Rehearses a plain step and one under the plan, and weighs what there would be instead, for a report; None: a
        saved plan, without a batch."""
        self.metrics_url: str | None = None
        """Where metrics are served, with `Config(observability_port=...)`."""
        self.resume_first: Callable[[], Any] | None = None
        """While the model is parked: brings it back, which must come before anything is taken off."""
        self.detached = False

    @property
    def model(self) -> nn.Module:
        """The model that it is attached to, which it does not keep alive."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this executor is gone")
        return model

    @property
    def is_orphaned(self) -> bool:
        """Whether its model is gone."""
        return self._model() is None

    def adopt(self) -> None:
        """Become the model's executor."""
        orderly_exit.be_orderly()
        model = self.model
        vars(model)[EXECUTOR_ATTRIBUTE] = self
        self._undo.callback(_forget, self._model, weakref.ref(self))
        keep_copies_clean(model, self._undo)

    def show_on(self, module: nn.Module) -> None:
        """Be found on a module around the model, too."""
        vars(module)[EXECUTOR_ATTRIBUTE] = self
        self._undo.callback(_forget, weakref.ref(module), weakref.ref(self))
        keep_copies_clean(module, self._undo)

    def apply(self, plan: Plan) -> None:
        """Put this plan in the place of the one before. All or nothing."""
        if not isinstance(plan, Plan):
            raise TypeError(f"a plan is a memscale.Plan, as executor.plan is, not {type(plan).__name__}")
        settings = self.settings.under(plan.conditions)
        if self.plan is None or not _does_the_same(self.plan, plan) or settings != self.settings:
            try:
                self._offloading.hand_over(plan.actions)
                self.suspend()
                self.settings = self._offloading.settings = settings
                self.attach(
                    plan.actions,
                    waiting_bytes=plan.movable_bytes,
                    peak_bytes=plan.predicted_peak_bytes,
                    allocator=plan.allocator,
                )
            finally:
                self._offloading.end_hand_over()
        self.plan = plan
        if self._cache_is_off and not self._has_said_so:
            self._has_said_so = True
            key_value_caches.say_switched_off(self.model)

    def apply_inside(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`apply` in the first moment of a forward with these arguments: that forward follows the plan already."""
        before = self._precision, self._begun
        self.apply(plan)
        key_value_caches.enter(self.model, args, kwargs, self._techniques)
        if self._precision is not None and self._precision is not before[0]:
            self._precision.enter(self.model, args, kwargs)
        for follow in self._begun if self._begun is not before[1] else ():
            follow()

    def turn_to(self, settings: ExecutionSettings) -> None:
        """The model computes elsewhere now: the plan is taken off, and optimizer state goes where parameters are."""
        self.suspend()
        self._placement.end()
        self._offloading.turn_to(settings)
        self.settings = settings

    @property
    def streams(self) -> bool:
        """Whether parameters of the model visit the device only while they are needed."""
        return "streaming" in self._offloading.users

    @property
    def moved_to(self) -> torch.device | None:
        """Where the user has moved the model to while it was streamed; None: nowhere, or it is not."""
        streamer = self._offloading.users.get("streaming")
        return None if streamer is None else streamer.homes.sent_to

    @property
    def keeps_waiting(self) -> bool:
        """Whether parameters or optimizer state wait elsewhere from step to step."""
        return self.streams or self._offloading.parked is not None

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied with a scale in backward, and divided by it later."""
        return self._precision is not None and self._precision.scale is not None

    @property
    def offload_users(self) -> dict[str, Any]:
        """Who moves tensors, with its `stats` and `transfers`, by technique."""
        return self._offloading.users

    def let_go(self) -> list[torch.Tensor]:
        """Between two steps: keep nothing on the device that is not needed then. Returns what is needed of ours."""
        self._offloading.let_go()
        return [] if self._loss_scale is None else self._loss_scale.tensors()

    def suspend(self) -> None:
        """Take the plan's techniques off; the model stays ours. Optimizer state goes on waiting: it may not fit."""
        with undisturbed():
            self._techniques.close()
            self.plan = None

    def attach(
        self,
        actions: Iterable[Action],
        waiting_bytes: int | None = None,
        peak_bytes: int | None = None,
        allocator: AllocatorUse | None = None,
    ) -> None:
        """Attach these actions, technique by technique, in their order.

        `waiting_bytes` are known to wait elsewhere; `StoreFullError` if there is no room for them. `peak_bytes` is what
        the step is known to need on its device. None: not known. `allocator` is what is asked of the device's.
        """
        actions = tuple(actions)
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as undo:
            failing.callback(self._placement.end)
            if self._offloading.parked is None:
                failing.callback(self._offloading.give_back)
            undo.callback(self._recomputed.clear)
            undo.callback(self._offloading.users.clear)
            undo.callback(self._forget_precision)
            if actions and self._device_type() == "cpu" and not is_fake(self.model) and is_short(peak_bytes):
                return_freed_memory(self.model, undo)
            is_placed = self._place(actions)
            self._attach_techniques(actions, undo, waiting_bytes)
            if is_placed:
                self._placement.hand_over()
            self._cache_is_off = self._watch_caches(actions, undo)
            if not is_fake(self.model):
                reserving.attach(allocator or AllocatorUse(), self.model, undo, self._undo)
            self._techniques = undo.pop_all()
            failing.pop_all()

    def _attach_techniques(
        self, actions: Sequence[Action], undo: contextlib.ExitStack, waiting_bytes: int | None
    ) -> None:
        to = Attachment(self.model, self.settings, undo, self._offloading, waiting_bytes, self._loss_scale)
        to.placed_from = self._placement.came_from
        for technique in _IN_ORDER:
            mine = [action for action in actions if technique_of(action) is technique]
            if mine:
                technique.attach(mine, to)
        to.settle_state()
        early_moments.watch(to)
        late_moments.watch(to)
        self._recomputed += to.recomputed
        self.held, self._lessons = to.held, to.lessons
        self._precision, self._begun = to.precision, to.begun
        if to.precision is not None and to.precision.scale is not None:
            self._loss_scale = to.precision.scale

    def _watch_caches(self, actions: Sequence[Action], undo: contextlib.ExitStack) -> bool:
        """Whether the model's key-value cache was switched off, because blocks are computed again."""
        of_layers = [action for action in actions if isinstance(action, LayerAction)]
        recomputed = {action.module_fqn for action in of_layers if technique_of(action).recomputes}
        return bool(recomputed) and key_value_caches.watch(self.model, recomputed, undo)

    def _forget_precision(self) -> None:
        self._precision, self._begun = None, []

    def _place(self, actions: Sequence[Action]) -> bool:
        """Put the model where it computes. True: the plan streams layers, and what streams them places the model."""
        device = self.settings.device
        is_placed = any(technique_of(action).places_model for action in actions)
        if device is not None and not is_placed and not is_fake(self.model):
            self._placement.move_to(device)
        return is_placed

    def _device_type(self) -> str:
        return self.settings.device_of(self.model).type

    def on_detach(self, callback: Any, *args: Any) -> None:
        """Call this when everything is taken off, after what was attached later."""
        self._undo.callback(callback, *args)

    def detach(self) -> None:
        """Take everything off again. A second call does nothing. A parked model is brought back to its device first.
        Ctrl-C waits until it is done; a second one does not."""
        if self.resume_first is not None:
            self.resume_first()
        with undisturbed(), contextlib.ExitStack() as last_first:
            if not self.detached:
                self.detached = True
                last_first.callback(self._undo.close)
                last_first.callback(self._placement.end)
                # When parameters are back: their state goes where they are.
                last_first.callback(self._offloading.give_back)
                last_first.callback(self._techniques.close)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model's and the optimizer's state: the loss scale of fp16.

            torch.save({"model": model.state_dict(), "memscale": executor.state_dict()}, "checkpoint.pt")

        Returns:
            Plain data, for `load_state_dict`.
        """
        return {"loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that this state was saved in. May come before there is a plan.

            executor.load_state_dict(torch.load("checkpoint.pt")["memscale"])

        Args:
            state: What `state_dict` returned.

        Raises:
            TypeError: It is no dict.
            ConfigError: It is not what `state_dict` returns; nothing of it is taken over.
        """
        if not isinstance(state, dict):
            raise TypeError(f"load_state_dict takes what state_dict() returned, a dict, not {type(state).__name__}")
        if state.get("loss_scale") is not None:
            scale = LossScale() if self._loss_scale is None else self._loss_scale
            scale.load_state_dict(state["loss_scale"])
            self._loss_scale = scale

    def learnt(self) -> list[Any]:
        """What techniques have learnt from the steps so far. A step that changes none of it is as all that follow."""
        return [lesson() for lesson in self._lessons]

    def traffic(self) -> tuple[int, int, int, int]:
        """Transfers to the next tier so far and their bytes; those back, and theirs. Without the optimizer's."""
        return self._offloading.traffic()

    def stats(self) -> Stats:
        """What was done since it was attached: peak, recomputations, bytes that were moved and time that was waited.

            print(executor.stats().peak_bytes, executor.stats().num_recomputes)

        Returns:
            `Stats`, as it is now; it does not grow.
        """
        scale = self._precision.scale if self._precision is not None else None
        device_type = self.plan.device_type if self.plan is not None else "cpu"
        on_device = device_type != "cpu" and torch.accelerator.is_available()
        return Stats(
            device_type=device_type,
            peak_bytes=torch.accelerator.max_memory_allocated() if on_device else None,
            reserved_peak_bytes=torch.accelerator.max_memory_reserved() if on_device else None,
            total_peak_bytes=total_peak_bytes() if on_device else None,
            host_bytes=self._offloading.taken_bytes(in_memory=True),
            disk_bytes=self._offloading.taken_bytes(in_memory=False),
            num_recomputes=sum(forward.num_recomputes for forward in self._recomputed),
            recompute_s=sum(forward.recompute_s for forward in self._recomputed),
            transfers={name: user.stats for name, user in self._offloading.users.items()},
            loss_scale=scale.value if scale is not None else None,
            num_skipped_steps=scale.num_skipped_steps if scale is not None else 0,
        )

    def report(
        self, path: str | pathlib.Path, *, step_ms: float | None = None, live_peak_bytes: int | None = None
    ) -> None:
        """Write one HTML page about this run: memory over a step without MemScale and with the plan, what travels when,
        the plan with its reasons, and what was predicted and measured.

            executor.report("run.html")
            executor.report("run.json")     # the same as data: `memscale report run.json` draws it, on any machine

        Args:
            path: The file; what is there is overwritten. One that ends with ".json" gets the data, without Plotly.
            step_ms: How long a step took, if somebody has timed it: it is shown beside what was predicted.
            live_peak_bytes: The peak that `memscale.measure()` showed, which nobody counts otherwise.

        Both steps are rehearsed on fake tensors, and everything that the mode allows is weighed against the plan, which
        takes about as long as planning did; a page without them says why.

        Raises:
            TypeError: `path` is no path, or a figure is no number.
            ValueError: `path` cannot be a file's, or a figure is negative or not finite.
            MemScaleError: There is no plan yet, or Plotly is not installed.
            OSError: The file cannot be written.
        """
        from memscale.report.page import Report

        if not isinstance(path, str | os.PathLike):
            raise TypeError(f'report takes the path of a file, as in report("run.html"), not {type(path).__name__}')
        if not is_system_name(os.fspath(path)):
            raise ValueError(f"there is no file with the name {shown(path)}")
        for name, figure in (("step_ms", step_ms), ("live_peak_bytes", live_peak_bytes)):
            _check_figure(name, figure)
        plan = self.plan
        if plan is None:
            raise MemScaleError("there is no plan to report on yet: it is made at the first training forward")
        stats = self.stats()
        measured = (
            ("live", plan.predicted_peak_bytes, live_peak_bytes),
            ("allocated", _allocated_of(plan), stats.peak_bytes),
            ("reserved", plan.predicted_reserved_bytes, stats.reserved_peak_bytes),
            ("total", plan.predicted_total_bytes, stats.total_peak_bytes),
        )
        seen = tuple(numbers for numbers in measured if numbers[2] is not None)
        waiting = (("on the host, in all", None, stats.host_bytes), ("on disk, in all", None, stats.disk_bytes))
        made = Report(plan, measured=seen, measured_step_ms=step_ms, elsewhere=waiting)
        self._with_steps(made).write(pathlib.Path(path))

    def _with_steps(self, report: Report) -> Report:
        """The report with what the device holds over a step, where that can be rehearsed."""
        if self.show_steps is None:
            return dataclasses.replace(report, without_steps="the plan was made before, and no batch is known")
        if self.is_orphaned or self.resume_first is not None:
            return dataclasses.replace(report, without_steps="the model is parked or gone")
        try:
            plain, planned, times, weighed = self.show_steps()
        except MemScaleError as error:
            return dataclasses.replace(report, without_steps=shortened(str(error)).rstrip("."))
        return dataclasses.replace(report, plain=plain, planned=planned, times=times, weighed=weighed)


def _check_figure(name: str, figure: object) -> None:
    """What somebody measured is shown as it is, so it has to be a number that can be shown."""
    if figure is None:
        return
    if isinstance(figure, bool) or not isinstance(figure, int | float):
        raise TypeError(f"{name} must be a number or None, not {type(figure).__name__}")
    if not 0 <= figure < math.inf:
        raise ValueError(f"{name}={shown(figure)} is not allowed; it must be a number from 0 up, or None")


def _allocated_of(plan: Plan) -> int | None:
    """What the device's allocator is to hand out: live bytes, where it caches nothing."""
    return plan.predicted_peak_bytes if plan.predicted_reserved_bytes is None else plan.predicted_allocated_bytes


def _does_the_same(one: Plan, other: Plan) -> bool:
    if without_reasons(one.actions) != without_reasons(other.actions):
        return False
    return one.allocator is other.allocator is None or (
        one.allocator is not None and one.allocator.does_the_same(other.allocator)
    )


def execute(
    model: nn.Module, plan: Plan, settings: ExecutionSettings | None = None, optimizer: Optimizer | None = None
) -> Executor:
    """Attach a plan to a model of the kind that it was made for."""
    for layer in plan.rows:
        found = type(find_module(model, layer.module_fqn)).__name__
        if found != layer.class_name:
            raise PlanError(
                f"the plan was made for another model: {layer.module_fqn!r} is a {found} here, "
                f"a {layer.class_name} there"
            )
    executor = Executor(model, settings, optimizer)
    executor.apply(plan)
    executor.adopt()
    return executor


def executor_of(model: nn.Module) -> Executor | None:
    """The model's own executor, if it is wrapped."""
    executor = vars(model).get(EXECUTOR_ATTRIBUTE)
    return executor if isinstance(executor, Executor) else None


def _forget(model_ref: weakref.ref[nn.Module], executor_ref: weakref.ref[Executor]) -> None:
    model = model_ref()
    if model is not None and vars(model).get(EXECUTOR_ATTRIBUTE) is executor_ref():
        vars(model).pop(EXECUTOR_ATTRIBUTE, None)
