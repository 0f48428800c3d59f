"""The allocations of whole training steps in their order, and what PyTorch's caching allocator makes of them.

    log = record_steps(rehearsal, model, "adamw")                               # of the unmodified model
    log = record_steps(rehearsal, model, "adamw", attach=attach, rules=rules)   # as a plan changes it
    reserved_of(log, parse_settings("expandable_segments:True"))    # Reserved(allocated_peak_bytes=..., ...)

A step is forward, backward, the optimizer's step and `zero_grad()`. The log has what lives all the time (parameters,
buffers, the batch), then the first step, in which the optimizer makes its state, and a second one, which is like all
that follow. Under a plan, parameters that are streamed leave the device before the first step. Forward and backward are
the same in all steps, and are run once; unless what is attached may learn something in the first.

The log also has what kernels allocate and free inside themselves, as far as it is known: the workspace of matrix
products, and what kernel_temporaries.py lists. It does not have workspaces of convolutions, nor what building the model
on the device left in the cache. Everything is on one stream, because tensors that are copied on other streams are
allocated on the one that computes, too. See NOTE [stream order] in transfers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._decide.allocator import CachingAllocator
from memscale._decide.allocator.blocks import Block
from memscale._decide.allocator.settings import AllocatorSettings, parse_settings
from memscale._errors import ConfigError
from memscale._execute.reserving import watch
from memscale._hardware import Hardware
from memscale._hardware.allocator_environment import own_settings
from memscale._plan import AllocatorUse, ReleasePoint
from memscale._planning.bucket_steps import BucketRules, SteppedOptimizer
from memscale._planning.kernel_temporaries import KernelTemporaries
from memscale._profile.device_kernels import OPENED
from memscale._profile.optimizer_twin import optimizer_over
from memscale._profile.rehearsal import Attach, FakeRehearsal, left_autocast, loss_of
from memscale._profile.segments import SegmentRecorder
from memscale._torch import private
from memscale._torch.live_bytes import Kind

logger = logging.getLogger("memscale")

WORKSPACE_BYTES = 8_519_680
"""cuBLAS's workspace on cards up to sm_89: two buffers of 4 MiB and eight of 16 KiB. From sm_90 on it is 32 MiB."""

_aten = torch.ops.aten
PRODUCTS = frozenset(
    (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default)
)
"""Operators that cuBLAS computes."""

NUM_STEPS = 3
"""That are played: in the second the optimizer's state is there, in the third memory is as the second has left it."""

CARD_TYPE = "cuda"
"""The devices whose kernels are known to allocate for themselves."""

Thread = Literal["forward", "backward"]
"""Autograd computes backward in a thread of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in a step something is allocated."""

    phase: str
    """"forward", "backward", "optimizer", or what is there before a step: "parameters", "inputs"."""
    module_fqn: str = ""
    """Of the block or other piece of the model; empty outside of them, or where they are not watched."""
    operator: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocated:
    serial: int
    num_bytes: int
    place: Place | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Freed:
    serial: int


@dataclasses.dataclass(frozen=True, slots=True)
class Multiplied:
    """A matrix product: the first one of a thread makes cuBLAS take its workspace, for good."""

    thread: Thread


@dataclasses.dataclass(frozen=True, slots=True)
class Emptied:
    """What is cached goes back to the card, as by `torch.accelerator.empty_cache()`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """The step has come to a moment at which what is cached could go back."""

    point: ReleasePoint


Event = Allocated | Freed | Multiplied | Emptied | Reached


class AllocationLog:
    """What is allocated and freed, in order. `LiveBytes.log` feeds it."""

    def __init__(self) -> None:
        self.before: list[Event] = []
        """What comes before the first step."""
        self.steps: list[list[Event]] = []
        self._num_allocations = 0
        self._serials: dict[int, int] = {}
        """The serial of each allocation that lives, by the key of its storage."""
        self._have_multiplied: set[Thread] = set()
        self._forgotten: set[int] = set()
        self.place: Place | None = None
        """Of what is allocated next."""
        self._sum: tuple[int, Allocated, frozenset[int]] | None = None
        """A sum of gradients: its key, the event, and the serials of its summands. See NOTE [sums of gradients]."""

    @property
    def _now(self) -> list[Event]:
        return self.steps[-1] if self.steps else self.before

    def begin_step(self) -> list[Event]:
        """Begin another step. The list that is returned is filled as the events of the step come."""
        self.steps.append([])
        return self.steps[-1]

    def played(self, num_steps: int) -> list[list[Event]]:
        """What comes before, and that many steps, of which the last recorded one is repeated."""
        return [self.before, *(self.steps[min(index, len(self.steps) - 1)] for index in range(num_steps))]

    def allocate(self, key: int, num_bytes: int) -> None:
        old = self._serials.get(key)
        serial = self._serials[key] = self._num_allocations
        self._num_allocations += 1
        self._now.append(Allocated(serial, num_bytes, self.place))
        if old is not None:  # a storage that is resized has both for a moment
            self._free_serial(old)

    def free(self, key: int) -> None:
        serial = self._serials.pop(key, None)
        if serial is not None:  # else it has left the device before
            self._free_serial(serial)

    def pass_by(self, sizes: Iterable[int]) -> None:
        """A kernel allocates these inside itself, and frees them when it has all of them."""
        serials = []
        for num_bytes in sizes:
            serials.append(self._num_allocations)
            self._num_allocations += 1
            self._now.append(Allocated(serials[-1], num_bytes, self.place))
        for serial in serials:
            self._now.append(Freed(serial))

    def leave(self, keys: Iterable[int]) -> None:
        """What lives under these keys leaves the device, and what is cached with it."""
        for key in keys:
            self.free(key)
        self._now.append(Emptied())

    def reach(self, point: ReleasePoint) -> None:
        self._now.append(Reached(point))

    def sum_up(self, key: int, summand_keys: Iterable[int]) -> None:
        """What was allocated last is a sum of gradients under `key`.

        NOTE [sums of gradients]: where several gradients of one tensor meet, autograd adds into the memory of one that
        nobody else has. It does not for subclasses of tensors, as fake ones are: there the sum is new, and that
        gradient goes at once. So a summand that goes next is the sum.
        """
        last = self._now[-1] if self._now else None
        if isinstance(last, Allocated) and last.serial == self._serials.get(key):
            serials = (self._serials.get(summand) for summand in summand_keys)
            self._sum = (key, last, frozenset(serial for serial in serials if serial is not None))

    def _is_summed_into(self, serial: int) -> bool:
        """Whether the last event is a sum that lies in the memory of this in truth; it is taken out of the log then."""
        if self._sum is None:
            return False
        (key, allocated, summands), self._sum = self._sum, None
        if serial not in summands or not self._now or self._now[-1] is not allocated:
            return False
        self._now.pop()
        self._serials[key] = serial
        return True

    def _free_serial(self, serial: int) -> None:
        if serial not in self._forgotten and not self._is_summed_into(serial):
            self._now.append(Freed(serial))

    def multiply(self, thread: Thread) -> None:
        if thread not in self._have_multiplied:
            self._have_multiplied.add(thread)
            self._now.append(Multiplied(thread))

    def forget(self, keys: Iterable[int]) -> None:
        """What lives under these keys is on the host in a real run, and was counted here: the log forgets it."""
        gone = {self._serials[key] for key in keys} - self._forgotten
        self._forgotten |= gone
        for events in (self.before, *self.steps):
            events[:] = [event for event in events if not (isinstance(event, Allocated) and event.serial in gone)]


# ---- recording


class EventRecorder(SegmentRecorder):
    """Records what an `AllocationLog` holds while a rehearsal runs."""

    def __init__(self, rehearsal: FakeRehearsal, log: AllocationLog, hardware: Hardware | None = None) -> None:
        super().__init__(rehearsal.device_type, rehearsal.rounding_bytes, counts_fakes=rehearsal.is_fake)
        self._kernels = KernelTemporaries(hardware)
        self._is_dropout = False
        self.log = self.events = log
        self.thread: Thread = "forward"
        self.is_optimizing = False
        self._has_card_kernels = rehearsal.target_type == CARD_TYPE

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._has_card_kernels and func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        self._is_dropout = func is _aten.native_dropout.default
        self.events.place = self._place_of(func)
        result = super().run(func, args, kwargs)
        if func is _aten.add.Tensor and self.thread == "backward" and not torch.is_grad_enabled():
            self._see_sum(result, args)
        if func in PRODUCTS:
            self.events.multiply(self.thread)
        elif self._has_card_kernels:
            for sizes in self._kernels.inside(func, args, result, kwargs):
                self.events.pass_by(sizes)
        return result

    def _place_of(self, func: Any) -> Place:
        phase, module_fqn, _ = self._place
        if self.is_optimizing:
            return Place("optimizer", "", str(func))
        return Place(phase, module_fqn, str(func))

    def _see_sum(self, result: torch.Tensor, summands: tuple[Any, ...]) -> None:
        """See NOTE [sums of gradients]. A view's memory is also its base's, and is not added to."""
        num_bytes = result.untyped_storage().nbytes()
        whole = (summand for summand in summands if isinstance(summand, torch.Tensor) and summand._base is None)
        storages = [summand.untyped_storage() for summand in whole]
        alike = [private.storage_key(storage) for storage in storages if storage.nbytes() == num_bytes]
        self.events.sum_up(private.storage_key(result.untyped_storage()), alike)

    def see_all(self, tree: Any, kind: Kind | None = None) -> None:
        """The mask of a dropout is allocated before its result."""
        super().see_all(tree[::-1] if self._is_dropout else tree, kind)

    def forget(self, tensors: list[torch.Tensor]) -> None:
        self.events.forget(private.storage_key(tensor.untyped_storage()) for tensor in tensors)


def record_steps(
    rehearsal: FakeRehearsal,
    model: nn.Module,
    optimizer: str | Optimizer,
    *,
    num_steps: int = 2,
    learns: bool = False,
    attach: Attach | None = None,
    rules: BucketRules | None = None,
    hardware: Hardware | None = None,
    points: Iterable[ReleasePoint] = (),
    names_modules: bool = False,
) -> AllocationLog:
    """Whole steps on this stage, with an optimizer by name or the one that the user has.

    `model` is the user's, of which the stage has a copy. "none" is training without an optimizer. `attach` puts a
    plan's techniques on, and `rules` say how the optimizer steps under it; None: as it is. With a `hardware`, what its
    kernels allocate inside themselves is in the log, too. `learns`: the second step may differ from the first.
    `points`: moments of the step that the log is to have.
    `names_modules`: the log says in which block or other piece of the model something is allocated.
    """
    log = AllocationLog()
    recorder = EventRecorder(rehearsal, log, hardware)
    with contextlib.ExitStack() as undo:
        undo.enter_context(rehearsal.stage())
        undo.callback(setattr, recorder, "log", None)  # what dies later is no part of a step
        log.place = Place("parameters")
        recorder.see_all([list(rehearsal.model.parameters()), list(rehearsal.model.buffers())], "parameters")
        log.place = Place("inputs")
        recorder.see_all(rehearsal.inputs.tensors(), "other")
        if names_modules:
            undo.callback(recorder.remove_tensor_hooks)
            for module_fqn, module in rehearsal.pieces.items():
                recorder.watch(module_fqn, module, undo)
        stand_ins = dict(zip(map(id, model.parameters()), rehearsal.model.parameters(), strict=True))
        if attach is not None:
            attached = attach(rehearsal.model)
            undo.callback(attached.detach)
            log.place = Place("optimizer")
            recorder.see_all(getattr(attached, "held", []), "optimizer state")
        watch(rehearsal.model, points, log.reach, undo)
        away = _leave_home(recorder, rehearsal, stand_ins)
        stepping = _optimizer_on(rehearsal, recorder, model, optimizer, stand_ins, away, rules)
        recorded = list[list[Event]]()  # in the order in which they run: the first makes the optimizer's state
        for num_stepped in (1, num_steps - 1) if learns else (num_steps,):
            recorded += _record_parts(rehearsal, recorder, stepping, num_stepped)
        log.steps = recorded
    return log


def _leave_home(recorder: EventRecorder, rehearsal: FakeRehearsal, stand_ins: dict[int, nn.Parameter]) -> set[int]:
    """The ids of stand-ins that the plan streams: they leave the device."""
    staying = {id(parameter) for parameter in rehearsal.model.parameters()}
    away = [parameter for parameter in stand_ins.values() if id(parameter) not in staying]
    if away:
        recorder.events.leave({private.storage_key(parameter.untyped_storage()) for parameter in away})
    return {id(parameter) for parameter in away}


def _optimizer_on(
    rehearsal: FakeRehearsal,
    recorder: EventRecorder,
    model: nn.Module,
    optimizer: str | Optimizer,
    stand_ins: dict[int, nn.Parameter],
    away: set[int],
    rules: BucketRules | None,
) -> SteppedOptimizer | None:
    if optimizer == "none":
        return None
    stepping = optimizer_over(stand_ins, model, optimizer, rehearsal.target_type)
    ids = {id(copy): original for original, copy in stand_ins.items()}
    return SteppedOptimizer(stepping, ids, away, rules, recorder.forget if rehearsal.emulates_gpu else None)


def _record_parts(
    rehearsal: FakeRehearsal, recorder: EventRecorder, optimizer: SteppedOptimizer | None, num_steps: int
) -> list[list[Event]]:
    """Forward and backward once, steps of the optimizer on what they leave, and the end: as many whole steps."""
    log = recorder.events
    with recorder:
        passed = log.begin_step()
        recorder.move_to("forward", "", 0)
        if rehearsal.holds_gradients:
            rehearsal.hold_gradients(recorder)
        earlier = _stand_ins_of_outputs(rehearsal)
        output = rehearsal.model(*rehearsal.inputs.args, **rehearsal.inputs.kwargs)
        kept, loss = rehearsal.kept_of(output), loss_of(output)
        del output, earlier
        recorder.move_to("backward", "", -1)
        recorder.thread = "backward"
        with left_autocast(rehearsal.device_type):
            loss.backward()
            recorder.thread = "forward"
            stepped = []
            for _ in range(num_steps):
                stepped.append(log.begin_step())
                if optimizer is not None:
                    recorder.is_optimizing = True
                    optimizer.step()
                    recorder.is_optimizing = False
    ended = log.begin_step()
    del loss, kept
    for parameter in rehearsal.model.parameters():
        parameter.grad = None
    return [[*passed, *events, *ended] for events in stepped]


def _stand_ins_of_outputs(rehearsal: FakeRehearsal) -> list[torch.Tensor]:
    """Outputs of the step before that the loop has not let go of when a forward begins. Each recorded step frees them
    in its end and takes them anew in its beginning, so that all steps are alike."""
    sizes = rehearsal.output_sizes if rehearsal.loop.into_next else ()
    return [torch.empty(size, dtype=torch.uint8, device=rehearsal.device_type) for size in sizes]


# ---- what the allocator makes of it


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """The highest value of each figure, over all steps."""

    requested_peak_bytes: int
    """What the storages ask for."""
    allocated_peak_bytes: int
    """What the allocator hands out for them."""
    reserved_peak_bytes: int
    """What is held for that."""
    rises: frozenset[ReleasePoint] = frozenset()
    """The moments after which, and before the next, what is held came to be more than before."""


def allocator_settings() -> AllocatorSettings:
    """As this process has configured PyTorch's allocator by its environment; the defaults where the model of it does
    not know a setting."""
    try:
        return parse_settings(own_settings())
    except ConfigError as error:
        logger.info("Reserved memory is predicted for PyTorch's default allocator settings: %s.", error)
        return AllocatorSettings()


def reserved_of(
    log: AllocationLog,
    settings: AllocatorSettings | None = None,
    *,
    num_steps: int = NUM_STEPS,
    workspace_bytes: int = WORKSPACE_BYTES,
    capacity_bytes: int | None = None,
    use: AllocatorUse | None = None,
) -> Reserved:
    """What PyTorch's allocator hands out and holds in that many steps, of which the last recorded one is repeated.

    `workspace_bytes` is what cuBLAS takes for each thread that multiplies matrices; 0: nothing. `use` is what a plan
    asks of the allocator, once it is attached. Raises `OutOfMemoryError` where `capacity_bytes` do not suffice.
    """
    memory = CachingAllocator(settings, capacity_bytes)
    replay = Replay(memory, workspace_bytes)
    before, *steps = log.played(num_steps)
    replay.play(before)
    memory.reset_peaks()  # what streamed parameters took before they left is no part of a step
    if use is not None:
        replay.follow(use)
    for events in steps:
        replay.play(events)
    return Reserved(
        memory.peak_requested_bytes, memory.peak_allocated_bytes, memory.peak_reserved_bytes, frozenset(replay.rises)
    )


class Replay:
    """A step may be played several times. What it leaves behind is then replaced: the new comes, the old goes, as when
    a variable gets another value."""

    def __init__(self, memory: CachingAllocator, workspace_bytes: int) -> None:
        self._memory = memory
        self._workspace_bytes = workspace_bytes
        self._blocks: dict[int, Block] = {}
        self._threads: set[Thread] = set()
        self._releases: frozenset[ReleasePoint] = frozenset()
        self._passed: ReleasePoint | None = None
        self.rises: set[ReleasePoint] = set()

    def follow(self, use: AllocatorUse) -> None:
        """As the executor does when a plan is attached."""
        if use.settings:
            self._memory.configure(parse_settings(use.settings))
        self._releases = frozenset(use.releases)

    def play(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Allocated):
                self._allocate(event)
            elif isinstance(event, Reached):
                self._reach(event.point)
            elif isinstance(event, Multiplied):
                self._multiply(event.thread)
            elif isinstance(event, Emptied):
                self._memory.empty_cache()
            elif event.serial in self._blocks:  # else it was made before the step, and went when that was first played
                self._memory.free(self._blocks.pop(event.serial))

    def _allocate(self, event: Allocated) -> None:
        memory, old = self._memory, self._blocks.get(event.serial)
        highest_bytes = memory.peak_reserved_bytes
        self._blocks[event.serial] = memory.allocate(event.num_bytes)
        if memory.peak_reserved_bytes > highest_bytes and self._passed is not None:
            self.rises.add(self._passed)
        if old is not None:
            memory.free(old)

    def _reach(self, point: ReleasePoint) -> None:
        self._passed = point
        if point in self._releases:
            self._memory.empty_cache()

    def _multiply(self, thread: Thread) -> None:
        if self._workspace_bytes and thread not in self._threads:
            self._threads.add(thread)
            self._memory.allocate(self._workspace_bytes)
