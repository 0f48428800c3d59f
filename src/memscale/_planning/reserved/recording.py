"""The allocations of whole training steps, recorded in their order on a stage of fake tensors.

    log = record_steps(rehearsal, model, "adamw")                                         # of the unmodified model
    log = record_steps(rehearsal, model, "adamw", under=UnderPlan(attach=attach, rules=rules))    # as a plan changes it

A step is forward, backward, the optimizer's step and `zero_grad()`. The log has what lives all the time (parameters,
buffers, the batch), then the first step, in which the optimizer makes its state, and a second one, which is like all
that follow. Under a plan, parameters that are streamed leave the device before the first step. Forward and backward are
the same in all steps, and are run once; unless what is attached has learnt something in the first.

The log also has what kernels allocate and free inside themselves, as far as it is known: the workspace of matrix
products, and what kernel_temporaries.py lists. It does not have workspaces of convolutions, nor what building the model
on the device left in the cache. Everything is on one stream, because tensors that are copied on other streams are
allocated on the one that computes, too. See NOTE [stream order] in transfers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._execute.reserving import watch, watch_module
from memscale._hardware import Hardware
from memscale._plan import ReleasePoint
from memscale._planning.reserved.allocation_log import (
    Allocated,
    AllocationLog,
    Asked,
    Event,
    Freed,
    LetGo,
    Origin,
    Place,
)
from memscale._planning.reserved.beginning import MODEL_FIRST, Beginning
from memscale._planning.reserved.beside_passes import note_moments, with_asking, with_early, with_late
from memscale._planning.reserved.bucket_steps import Beside, BucketRules, KnownSteps, SteppedOptimizer
from memscale._planning.reserved.event_recorder import EventRecorder, LogRecorder
from memscale._planning.reserved.known_passes import (
    KnownPasses,
    Passed,
    Stretch,
    gradients_of,
    made_again,
    may_be_known,
)
from memscale._planning.reserved.left_gradients import LeftGradients
from memscale._planning.reserved.lengthened import lengthened
from memscale._planning.reserved.shared_out import SharedOut, step_one_by_one
from memscale._profile import Segment, StepTrace
from memscale._profile.optimizer_twin import optimizer_over
from memscale._profile.rehearsal import Attach, Detachable, FakeRehearsal, left_autocast, loss_of, run_backward
from memscale._profile.shallow import Cut, shortened
from memscale._torch import private
from memscale._torch.released_gradients import held_gradient
from memscale._torch.waiting_gradients import is_waiting, waiting_elsewhere
from memscale._units import round_up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnderPlan:
    """What a plan changes about the steps."""

    attach: Attach | None = None
    """Puts its techniques on the model, for the one without the blocks that are cut; None: the model is as it is."""
    rules: BucketRules | None = None
    """How the optimizer steps; None: as it does by itself."""
    points: Iterable[ReleasePoint] = ()
    """Moments of the step that the log is to have."""
    blocks: Iterable[str] = ()
    """Blocks before whose backward memory could go back, too."""
    learns: bool = False
    """Whether the second step may differ from the first."""
    early: Sequence[tuple[str, int]] = ()
    """Layers before whose backward some of the optimizer's state is asked for, and how many bytes."""
    late: Sequence[tuple[str, int]] = ()
    """Layers before whose forward some of the state goes that still leaves from the step before, and how many bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shortcuts:
    """What spares a part of the recording."""

    cuts: Sequence[Cut] = ()
    """Blocks that forward and backward are recorded without, to which the log is then lengthened."""
    known: KnownSteps | None = None
    """Buckets that this optimizer was seen to step; more are added."""
    passes: KnownPasses | None = None
    """Those that a recording of the same plan but for the optimizer's step and its state has filled; or none yet."""


def record_steps(
    rehearsal: FakeRehearsal,
    model: nn.Module,
    optimizer: str | Optimizer,
    *,
    num_steps: int = 2,
    under: UnderPlan = UnderPlan(),
    shortcuts: Shortcuts = Shortcuts(),
    hardware: Hardware | None = None,
    names_modules: bool = False,
    beginning: Beginning = MODEL_FIRST,
) -> AllocationLog:
    """Whole steps on this stage, with an optimizer by name or the one that the user has.

    `model` is the user's, of which the stage has a copy. "none" is training without an optimizer. With a `hardware`,
    what its kernels allocate inside themselves is in the log, too. `names_modules`: the log says in which block or
    other piece of the model something is allocated. `NotAlike` where blocks that are cut do not stand for others.
    """
    log = AllocationLog()
    recorder = EventRecorder(rehearsal, log, hardware)
    with contextlib.ExitStack() as undo:
        undo.enter_context(rehearsal.stage())
        undo.callback(setattr, recorder, "log", None)  # what dies later is no part of a step
        if rehearsal.sharding is not None:
            recorder.shared = SharedOut(rehearsal, log, rehearsal.sharding)
        _see_what_is_there(rehearsal, recorder, inputs_first=beginning.inputs_first)
        log.origins = _origins(rehearsal, log)
        log.arrivals = beginning.arrivals
        if names_modules or recorder.shared is not None:
            _watch_modules(rehearsal, recorder, undo)
        stand_ins = dict(zip(map(id, model.parameters()), rehearsal.model.parameters(), strict=True))
        missing = _Missing(rehearsal, recorder, shortcuts.cuts, undo, under)
        attached = None if under.attach is None else _attached(under.attach, rehearsal, recorder, undo)
        watch(rehearsal.model, under.points, log.reach, undo)
        _watch_blocks(rehearsal, log, under.blocks, undo)
        if under.rules is not None:
            asked_at = (module_fqn for module_fqn, _ in (*under.early, *under.late))
            note_moments(rehearsal, recorder, dict.fromkeys((*_blocks_here(rehearsal), *asked_at)), undo)
        away = _leave_home(recorder, rehearsal, stand_ins, missing, were_there=not beginning.from_host)
        stepping = _optimizer_on(rehearsal, recorder, model, optimizer, stand_ins, away, under.rules, shortcuts.known)
        leaving = LeftGradients(rehearsal, recorder.events, recorder.storages) if rehearsal.leaves_gradients else None
        lesson = _Lesson(attached) if under.learns and attached is not None else None
        parts = _Parts(rehearsal, recorder, stepping, missing, leaving, list(stand_ins.values()), away)
        log.steps = parts.record_all(num_steps, lesson, shortcuts.passes)
    return log


def _see_what_is_there(rehearsal: FakeRehearsal, recorder: EventRecorder, *, inputs_first: bool = False) -> None:
    """Take down what lives all the time, in the order in which it came: parameters, buffers and the batch."""
    if inputs_first:
        _see_inputs(rehearsal, recorder)
    recorder.events.place = Place("parameters")
    if recorder.shared is not None:
        recorder.shared.take_shares()
        with recorder.without_log():
            recorder.see_all(list(rehearsal.model.parameters()), "parameters")
    recorder.see_all([list(rehearsal.model.parameters()), list(rehearsal.model.buffers())], "parameters")
    if not inputs_first:
        _see_inputs(rehearsal, recorder)


def _see_inputs(rehearsal: FakeRehearsal, recorder: EventRecorder) -> None:
    recorder.events.place = Place("inputs")
    recorder.see_all(rehearsal.inputs.tensors(), "other")


def _origins(rehearsal: FakeRehearsal, log: AllocationLog) -> dict[int, Origin]:
    """Which tensor each of the allocations is that are there."""
    kinds = {
        "parameter": rehearsal.model.parameters(),
        "buffer": rehearsal.model.buffers(),
        "input": rehearsal.inputs.tensors(),
    }
    found: dict[int, Origin] = {}
    for kind, tensors in kinds.items():
        for position, tensor in enumerate(tensors):
            serial = log.serial_of(private.storage_key(tensor.untyped_storage()))
            if serial is not None:
                found.setdefault(serial, (kind, position))
    return found


def _watch_modules(rehearsal: FakeRehearsal, recorder: EventRecorder, undo: contextlib.ExitStack) -> None:
    """Let the log say in which block or other piece of the model something is allocated."""
    undo.callback(recorder.remove_tensor_hooks)
    for module_fqn, module in rehearsal.pieces.items():
        recorder.watch(module_fqn, module, undo)


def _attached(
    attach: Attach, rehearsal: FakeRehearsal, recorder: EventRecorder, undo: contextlib.ExitStack
) -> Detachable:
    """Put a plan's techniques on, until undone."""
    attached = attach(rehearsal.model)
    undo.callback(attached.detach)
    recorder.events.place = Place("optimizer")
    recorder.see_all(getattr(attached, "held", []), "optimizer state")
    return attached


def _watch_blocks(
    rehearsal: FakeRehearsal, log: AllocationLog, blocks: Iterable[str], undo: contextlib.ExitStack
) -> None:
    """Let the log say where the backward of these begins, by the names that they have in the whole model."""
    here = set(rehearsal.model.modules())
    for module_fqn in blocks:
        if rehearsal.pieces[module_fqn] in here:
            watch_module(rehearsal.pieces[module_fqn], ReleasePoint("backward", module_fqn), log.reach_block, undo)


class _Lesson:
    """Tells whether what is attached has learnt something since it was attached."""

    def __init__(self, attached: Detachable) -> None:
        self._learnt: Callable[[], list[Any]] = getattr(attached, "learnt", list)
        self._before = self._learnt()

    @property
    def is_learnt(self) -> bool:
        return self._learnt() != self._before


class _Missing:
    """Blocks that are left out while forward and backward are recorded. The optimizer steps all of them."""

    def __init__(
        self,
        rehearsal: FakeRehearsal,
        recorder: LogRecorder,
        cuts: Sequence[Cut],
        undo: contextlib.ExitStack,
        under: UnderPlan = UnderPlan(),
    ) -> None:
        """The plan says where how much state is asked for early and goes late; its rules, how much that is at most."""
        self._recorder, self._cuts, self._mode = recorder, list(cuts), rehearsal.mode
        self._early, self._late, rules = dict(under.early), dict(under.late), under.rules
        self._early_bytes, self.late_bytes = (0, 0) if rules is None else (rules.early_bytes, rules.late_bytes)
        self.stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Parameters that are left out, by id: each with that of the block that stands for its own."""
        model = rehearsal.model
        for cut in cuts:
            present = list(model.get_submodule(cut.stands_in).parameters())
            for position in cut.left_out:
                left_out = model.get_submodule(cut.name(position)).parameters()
                self.stand_ins.update({id(p): (p, q) for p, q in zip(left_out, present, strict=True)})
        if cuts:
            containers = {cut.container_fqn for cut in cuts}
            undo.callback(self.clear_gradients)
            undo.callback(recorder.remove_tensor_hooks)
            undo.enter_context(shortened(model, self._cuts))
            here = dict.fromkeys(model.modules())
            for module_fqn, module in rehearsal.pieces.items():
                if module_fqn.rpartition(".")[0] in containers and module in here:
                    recorder.watch(module_fqn, module, undo)

    def make_gradients(self) -> None:
        """Backward leaves them, where it does for the blocks that stand for these; the log gets them otherwise."""
        alone = private.without_function_modes()
        with self._mode, self._recorder.without_log(), alone:  # they come with the blocks that are put in
            for parameter, present in self.stand_ins.values():
                if present.grad is not None and is_waiting(present.grad):
                    parameter.grad = waiting_elsewhere(parameter)
                elif present.grad is not None:
                    parameter.grad = torch.empty_like(parameter)
                    self._recorder.see(parameter.grad, "gradients")

    def clear_gradients(self) -> None:
        for parameter, _ in self.stand_ins.values():
            parameter.grad = None

    def put_in(self, log: AllocationLog, passed: Stretch, *later: Sequence[Event]) -> list[list[Event]]:
        """All parts of the step, with what the plan asks for beside them and what these blocks allocate."""
        events, marks = with_asking(passed.events, passed.marks, passed.moments, self._early, self._late)
        lists = [list(part) for part in later]
        return lengthened(events, lists, marks, self._cuts, log.new_serial) if self._cuts else [events, *lists]

    def levels(self, passed: Stretch, num_ending: int) -> tuple[int, int]:
        """How high live bytes rise in forward and backward, and where they end, of the recorder's storages.

        `num_ending`: what goes at the end before gradients do.
        """
        recorder = self._recorder
        events, ended = self.put_in(recorder.storages, passed, passed.ended)
        events, before = [*events, *ended[:num_ending]], recorder.storages.before
        return _levels(events, before, recorder.rounding_bytes, self._early_bytes, self.late_bytes)


def _blocks_here(rehearsal: FakeRehearsal) -> list[str]:
    """The names of blocks in the model as it is now, which may be a shorter one."""
    here = {name for name, _ in rehearsal.model.named_modules()}
    return [module_fqn for module_fqn in rehearsal.blocks if module_fqn in here]


def _leave_home(
    recorder: EventRecorder,
    rehearsal: FakeRehearsal,
    stand_ins: dict[int, nn.Parameter],
    missing: _Missing,
    *,
    were_there: bool,
) -> set[int]:
    """The ids of stand-ins that the plan streams: they leave the device, or never were there."""
    staying = {id(parameter) for parameter in rehearsal.model.parameters()}
    staying |= {number for number, (_, present) in missing.stand_ins.items() if id(present) in staying}
    away = [parameter for parameter in stand_ins.values() if id(parameter) not in staying]
    if away:
        keys = {private.storage_key(parameter.untyped_storage()) for parameter in away}
        (recorder.events.leave if were_there else recorder.events.forget)(keys)
    return {id(parameter) for parameter in away}


def _optimizer_on(
    rehearsal: FakeRehearsal,
    recorder: EventRecorder,
    model: nn.Module,
    optimizer: str | Optimizer,
    stand_ins: dict[int, nn.Parameter],
    away: set[int],
    rules: BucketRules | None,
    known: KnownSteps | None,
) -> SteppedOptimizer | None:
    """Buckets ask every parameter for its size and its kind, which is no affair of the stage's function modes."""
    if optimizer == "none":
        return None
    with private.without_function_modes():
        if recorder.shared is not None:
            stand_ins = recorder.shared.shares_of(stand_ins)
        stepping = optimizer_over(stand_ins, model, optimizer, rehearsal.target_type)
        if recorder.shared is not None:
            step_one_by_one(stepping, optimizer)
        ids = {id(copy): original for original, copy in stand_ins.items()}
        forgets = rehearsal.emulates_gpu
        return SteppedOptimizer(stepping, ids, recorder.events, away, rules, forgets=forgets, known=known)


class _Parts:
    """The parts of steps: forward and backward, the optimizer's step on what they leave, and the end."""

    def __init__(
        self,
        rehearsal: FakeRehearsal,
        recorder: EventRecorder,
        optimizer: SteppedOptimizer | None,
        missing: _Missing,
        leaving: LeftGradients | None,
        parameters: Sequence[nn.Parameter],
        away: set[int],
    ) -> None:
        """`parameters` are those of the whole model, in order, and `away` the ids of those that are not on the
        device."""
        self._rehearsal, self._recorder, self._optimizer = rehearsal, recorder, optimizer
        self._missing, self._leaving, self._parameters = missing, leaving, parameters
        self._staying = [parameter for parameter in parameters if id(parameter) not in away]
        self._beside: list[Beside] = []
        """How many allocations of each step's optimizer are made in backward already."""

    def record_all(self, num_steps: int, lesson: _Lesson | None, passes: KnownPasses | None) -> list[list[Event]]:
        """So many steps, in the order in which they run: the first makes the optimizer's state."""
        if self._leaving is None and passes and passes[0].suits(self._recorder.events):
            return self._record_again(num_steps, passes)
        found: KnownPasses = []
        recorded = self._record(num_steps, lesson, found)
        if len(recorded) < num_steps:
            recorded += self._record(num_steps - len(recorded), None, found)
        if self._leaving is not None:
            return self._leaving.replacing_each_other(recorded)
        if passes is not None:
            is_whole = self._recorder.shared is None  # gradients of shares are no gradients of these parameters
            passes[:] = found if is_whole and may_be_known(found) else []
        return recorded

    def _record(self, num_steps: int, lesson: _Lesson | None, passes: KnownPasses) -> list[list[Event]]:
        """Forward and backward once, steps of the optimizer on what they leave, and the end.

        One step alone where what is attached has learnt something from it, or its gradients are left to the next.
        """
        self._recorder.recall = self._rehearsal.recall()
        log, storages, recorder, missing = self._recorder.events, self._recorder.storages, self._recorder, self._missing
        before, starts = frozenset(log.before), (log.state, storages.state)
        with recorder:
            passed, held = log.begin_step(), storages.begin_step()
            moments = log.moments, storages.moments
            recorder.marks, recorder.storage_marks = [], []
            kept, loss = self._pass(held)
            events, ends, gradients = tuple(passed), (log.state, storages.state), gradients_of(self._staying)
            if (lesson is not None and lesson.is_learnt) or self._leaving is not None:
                num_steps = 1
            with left_autocast(self._rehearsal.device_type):
                missing.make_gradients()
                if recorder.shared is not None:
                    recorder.shared.make_gradients(recorder)
                stepped = self._step(num_steps)
        ended, let_go = log.begin_step(), storages.begin_step()
        del loss
        num_ending = len(let_go)
        del kept
        if self._leaving is None:
            self._clear_gradients()
        missing.clear_gradients()
        requests = Stretch(starts[0], ends[0], events, tuple(recorder.marks), tuple(moments[0]), tuple(ended))
        marks = tuple(recorder.storage_marks)
        live = Stretch(starts[1], ends[1], tuple(held), marks, tuple(moments[1]), tuple(let_go))
        known = Passed(before, requests, live, gradients, num_ending)
        passes.append(known)
        return self._whole(known, stepped)

    def _record_again(self, num_steps: int, passes: KnownPasses) -> list[list[Event]]:
        """The same where forward and backward are known: the optimizer steps on gradients as they leave them."""
        log, recorder, missing = self._recorder.events, self._recorder, self._missing
        recorder.recall = self._rehearsal.recall()
        recorded: list[list[Event]] = []
        for number, one in enumerate(passes, 1):
            known = dataclasses.replace(one, requests=one.requests.moved_to(log.state))
            with recorder:
                log.begin_step()
                with recorder.without_log():
                    for gradient in made_again(known, self._staying):
                        recorder.see(gradient, "gradients")
                log.go_on_from(known.requests.end)
                recorder.storages.go_on_from(known.storages.end)
                with left_autocast(self._rehearsal.device_type):
                    missing.make_gradients()
                    stepped = self._step(num_steps - len(recorded) if number == len(passes) else 1)
            log.begin_step()
            self._clear_gradients()
            missing.clear_gradients()
            recorded += self._whole(known, stepped)
        return recorded

    def _clear_gradients(self) -> None:
        if self._recorder.shared is not None:
            self._recorder.shared.clear_gradients()
        for parameter in self._rehearsal.model.parameters():
            parameter.grad = None

    def _whole(self, known: Passed, stepped: list[list[Event]]) -> list[list[Event]]:
        """Whole steps, of their parts."""
        log, missing = self._recorder.events, self._missing
        log.levels.append(missing.levels(known.storages, known.num_ending))
        passed, *stepped, ended = missing.put_in(log, known.requests, *stepped, known.requests.ended)
        beside, self._beside = self._beside, []
        return [self._with_beside(passed, *each, ended) for each in zip(stepped, beside, strict=True)]

    def _with_beside(
        self, passed: Sequence[Event], stepped: list[Event], beside: Beside, ended: Sequence[Event]
    ) -> list[Event]:
        """A whole step, with what its optimizer does beside forward and backward."""
        last = len(stepped) - beside.num_late
        early, inside, late = stepped[: beside.num_early], stepped[beside.num_early : last], stepped[last:]
        passed = with_late(passed, stepped, late, self._missing.late_bytes)
        return [*with_early(passed, early, self._recorder.events.new_serial), *inside, *ended]

    def _pass(self, held: list[Event]) -> tuple[list[torch.Tensor], torch.Tensor]:
        if self._leaving is not None:
            self._leaving.begin(held)
        elif self._rehearsal.holds_gradients:
            # An earlier batch of this step, whose gradients are added to.
            _pass_through(self._rehearsal, self._recorder)
            self._recorder.events.resume(self._gradients())
        return _pass_through(self._rehearsal, self._recorder)

    def _gradients(self) -> Iterator[tuple[Origin, int, int]]:
        """Those that are there, by the parameter's position, with the keys of their storages and their bytes."""
        for position, parameter in enumerate(self._parameters):
            gradient = held_gradient(parameter)
            if gradient is not None:
                storage = gradient.untyped_storage()
                yield ("gradient", position), private.storage_key(storage), storage.nbytes()

    def _step(self, num_steps: int) -> list[list[Event]]:
        """Steps of the optimizer. The stage's function modes have nothing to say there, and take time at every call."""
        stepped = []
        for _ in range(num_steps):
            stepped.append(self._recorder.events.begin_step())
            self._beside.append(Beside())
            if self._optimizer is not None:
                alone = private.without_function_modes()
                with self._recorder.optimizing(), self._rehearsal.values.unasked(), alone:
                    self._beside[-1] = self._optimizer.step()
        return stepped


def _pass_through(rehearsal: FakeRehearsal, recorder: EventRecorder) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Forward and backward of a batch; what the loop keeps of its output, and the loss."""
    recorder.move_to("forward", "", 0)
    if recorder.shared is not None:
        recorder.shared.begin_forward()
    torch.clear_autocast_cache()  # as at the beginning of the user's autocast
    earlier = _stand_ins_of_outputs(rehearsal)
    output = rehearsal.model(*rehearsal.inputs.args, **rehearsal.inputs.kwargs)
    kept, loss = rehearsal.kept_of(output), loss_of(output)
    del output, earlier
    rehearsal.clear_late()
    recorder.move_to("backward", "", -1)
    recorder.thread = "backward"
    run_backward(loss, rehearsal.device_type)
    if recorder.shared is not None:
        recorder.shared.end_backward()
    recorder.thread = "forward"
    return kept, loss


def _stand_ins_of_outputs(rehearsal: FakeRehearsal) -> list[torch.Tensor]:
    """Outputs of the step before that the loop has not let go of when a forward begins. Each recorded step frees them
    in its end and takes them anew in its beginning, so that all steps are alike."""
    sizes = rehearsal.output_sizes if rehearsal.loop.into_next else ()
    return [torch.empty(size, dtype=torch.uint8, device=rehearsal.device_type) for size in sizes]


# ---- live bytes alone


def rehearse_lengthened(rehearsal: FakeRehearsal, attach: Attach, cuts: Sequence[Cut], num_steps: int) -> StepTrace:
    """Forward and backward of the highest of so many steps without what the cuts leave out, lengthened, as one segment.

    `attach` is for the shorter model. `NotAlike` where blocks do not stand for others.
    """
    recorder = LogRecorder(rehearsal)
    with contextlib.ExitStack() as undo:
        undo.enter_context(rehearsal.stage())
        undo.callback(setattr, recorder, "log", None)
        missing = _Missing(rehearsal, recorder, cuts, undo)
        attached = attach(rehearsal.model)
        undo.callback(attached.detach)
        recorder.see_all([list(rehearsal.model.parameters()), list(rehearsal.model.buffers())], "parameters")
        recorder.see_all(rehearsal.inputs.tensors(), "other")
        recorder.see_all(getattr(attached, "held", []), "optimizer state")
        levels = [_record_pass(rehearsal, recorder, missing) for _ in range(num_steps)]
    return highest_of(levels)


def highest_of(levels: Sequence[tuple[int, int]]) -> StepTrace:
    """The highest of several steps, as one segment: how high its live bytes rise, and where they end."""
    peak_bytes, end_bytes = max(levels)
    return StepTrace((Segment("forward", "", peak_bytes, end_bytes, 0, 0, 0),))


def _record_pass(rehearsal: FakeRehearsal, recorder: LogRecorder, missing: _Missing) -> tuple[int, int]:
    start, passed = recorder.storages.state, recorder.storages.begin_step()
    recorder.storage_marks = []
    recorder.recall = rehearsal.recall()
    with recorder:
        recorder.move_to("forward", "", 0)
        rehearsal.pass_through(recorder)
    end, ended = recorder.storages.state, recorder.storages.begin_step()
    for parameter in rehearsal.model.parameters():
        parameter.grad = None
    return missing.levels(Stretch(start, end, tuple(passed), tuple(recorder.storage_marks), (), tuple(ended)), 0)


def _levels(
    events: list[Event], before: list[Event], rounding_bytes: int, early_bytes: int, late_bytes: int
) -> tuple[int, int]:
    """`late_bytes` are there from the step before, and are no part of the start."""
    sizes = {event.serial: event.num_bytes for event in before if isinstance(event, Allocated)}
    live = peak = late_bytes
    for event in events:
        if isinstance(event, LetGo):
            gone_bytes = min(event.num_bytes, late_bytes)
            late_bytes -= gone_bytes
            live -= gone_bytes
        if isinstance(event, Asked):
            asked_bytes = min(event.num_bytes, early_bytes)
            early_bytes -= asked_bytes
            live += asked_bytes
            peak = max(peak, live)
        if isinstance(event, Allocated):
            sizes[event.serial] = event.num_bytes
            live += round_up(event.num_bytes, rounding_bytes)
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= round_up(sizes[event.serial], rounding_bytes)
    return peak, live
