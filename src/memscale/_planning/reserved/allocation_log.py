"""What a training step allocates and frees, in order: the events, and the log that they are written into."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

from memscale._plan import ReleasePoint

Thread = Literal["forward", "backward"]
"""Autograd computes backward in a thread of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in a step something is allocated."""

    phase: str
    """"forward", "backward", "optimizer", or what is there before a step: "parameters", "inputs"."""
    module_fqn: str = ""
    """The block or other piece of the model; empty outside of them, or where they are not watched."""
    operator: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocated:
    serial: int
    num_bytes: int
    place: Place | None = dataclasses.field(default=None, compare=False)
    stream: int = 0
    """0 is the one that computes."""


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
    is_block: bool = False
    """Whether a block begins. There are many such moments, and they are asked for last."""


Arrival = Literal["before", "once", "each step"]
"""When the batch comes to the device: before a plan is attached, after that and once, or a new one with each step.

NOTE [arriving batches]: a loop makes a plan from a batch that lies on the host, or on the device, and then moves each
batch to the device, or keeps one there. Nobody knows which until it trains. Where batches are large, each of them takes
another place among the weights, and what is reserved may differ by some percent: steps are played with every order that
may come, and the highest is told.
"""

Origin = tuple[str, int]
"""A tensor of the model's or the loop's: "parameter", "buffer", "input" or "gradient", and which of them in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """A later batch of the same step begins, whose gradients are added to those of the batches before."""

    gradients: tuple[tuple[Origin, int, int], ...]
    """The gradients that are there: which they are, their serials and their bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """So much more of the optimizer's state is asked for. No whole step has it: what comes then is in its place."""

    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LetGo:
    """So much of the state that still leaves from the step before goes. No whole step has it: what goes is freed in its
    place."""

    num_bytes: int


Event = Allocated | Freed | Multiplied | Emptied | Reached | Resumed | Asked | LetGo


class Moment(NamedTuple):
    """A step has come to a layer when it had so many events, and so many of a recorder's marks."""

    point: ReleasePoint
    num_events: int
    num_marks: int


LogState = tuple[int, frozenset[Thread], frozenset[int]]
"""What decides how a log goes on: how many allocations it had, which threads have multiplied, what it has forgotten."""


class AllocationLog:
    """What is allocated and freed, in order. `LiveBytes.log` feeds it."""

    def __init__(self) -> None:
        self.before: list[Event] = []
        """What comes before the first step."""
        self.steps: list[list[Event]] = []
        self.levels: list[tuple[int, int]] = []
        """How high live bytes rise above the start in each forward and backward that was run, and where they end."""
        self._num_allocations = 0
        self._serials: dict[int, int] = {}
        """The serial of each allocation that lives, by the key of its storage."""
        self._have_multiplied: set[Thread] = set()
        self._forgotten: set[int] = set()
        self.origins: dict[int, Origin] = {}
        """What is there before the first step, by serial."""
        self.arrivals: tuple[Arrival, ...] = ("before",)
        """When the batch may come. See NOTE [arriving batches]."""
        self.moments: list[Moment] = []
        """Those that the step that is under way has come to."""
        self.place: Place | None = None
        """The place of what is allocated next."""
        self._sum: tuple[int, Allocated, frozenset[int]] | None = None
        """A sum of gradients: its key, the event, and the serials of its summands. See NOTE [sums of gradients]."""

    @property
    def _now(self) -> list[Event]:
        return self.steps[-1] if self.steps else self.before

    def begin_step(self) -> list[Event]:
        """Begin another step. The list that is returned is filled as the events of the step come."""
        self.steps.append([])
        self.moments = []
        return self.steps[-1]

    def played(self, num_steps: int, arrival: Arrival = "before") -> list[list[Event]]:
        """What comes before, and that many steps, of which the last recorded one is repeated."""
        steps = [self.steps[min(index, len(self.steps) - 1)] for index in range(num_steps)]
        if arrival == "before":
            return [self.before, *steps]
        batch = [event for event in self.before if self._is_batch(event)]
        before = [event for event in self.before if not self._is_batch(event)]
        num_arrivals = 1 if arrival == "once" else num_steps
        return [before, *([*batch, *step] for step in steps[:num_arrivals]), *steps[num_arrivals:]]

    def _is_batch(self, event: Event) -> bool:
        return isinstance(event, Allocated) and self.origins.get(event.serial, ("", 0))[0] == "input"

    def allocate(self, key: int, num_bytes: int) -> None:
        old = self._serials.get(key)
        serial = self._serials[key] = self.new_serial()
        self._now.append(Allocated(serial, num_bytes, self.place))
        if old is not None:  # a storage that is resized has both for a moment
            self._free_serial(old)

    def free(self, key: int) -> None:
        serial = self._serials.pop(key, None)
        if serial is not None:  # else it has left the device before
            self._free_serial(serial)

    def take(self, num_bytes: int, stream: int = 0) -> int:
        """Something is allocated that no tensor of the rehearsal stands for; its serial."""
        serial = self.new_serial()
        self._now.append(Allocated(serial, num_bytes, self.place, stream))
        return serial

    def give_back(self, serial: int) -> None:
        """What was taken goes."""
        self._now.append(Freed(serial))

    def pass_by(self, *groups: Iterable[int]) -> None:
        """A kernel allocates these sizes inside itself, one group after the other, and frees them all.

        What is in the next group as well stays until then; of equal ones that which came last.
        """
        now, here = self._now, list[Allocated]()
        for group in groups:
            missing, staying = list(group), list[Allocated]()
            for one in reversed(here):
                if one.num_bytes in missing:
                    missing.remove(one.num_bytes)
                    staying.append(one)
                else:
                    now.append(Freed(one.serial))
            new = [Allocated(self.new_serial(), num_bytes, self.place) for num_bytes in missing]
            now += new
            here = [*staying[::-1], *new]
        now += [Freed(one.serial) for one in here]

    def leave(self, keys: Iterable[int]) -> None:
        """What lives under these keys leaves the device, and what is cached with it."""
        for key in keys:
            self.free(key)
        self._now.append(Emptied())

    def reach(self, point: ReleasePoint) -> None:
        self._now.append(Reached(point))

    def reach_block(self, point: ReleasePoint) -> None:
        self._now.append(Reached(point, is_block=True))

    def note(self, point: ReleasePoint, num_marks: int) -> None:
        """The step has come to a moment that is no event: nothing happens then, unless a plan asks for something."""
        self.moments.append(Moment(point, len(self._now), num_marks))

    def resume(self, gradients: Iterable[tuple[Origin, int, int]]) -> None:
        """A later batch of the step begins; which gradients are there, the keys of their storages, and their bytes."""
        found = ((origin, self.serial_of(key), num_bytes) for origin, key, num_bytes in gradients)
        self._now.append(Resumed(tuple((origin, serial, size) for origin, serial, size in found if serial is not None)))

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
        for index, moment in enumerate(self.moments):
            self.moments[index] = moment._replace(num_events=min(moment.num_events, len(self._now)))
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
        """What lives under these keys is on the host in a real run, and was counted here: the log forgets it.

        What it never knew it need not forget: counters of a step that another log has recorded.
        """
        known = (self._serials.get(key) for key in keys)
        gone = {serial for serial in known if serial is not None} - self._forgotten
        self._forgotten |= gone
        for events in (*reversed(self.steps), self.before):
            if gone:  # most likely what was allocated last, and a log is long
                found = {event.serial for event in events if isinstance(event, Allocated)} & gone
                gone -= found
                events[:] = [event for event in events if not (isinstance(event, Allocated) and event.serial in found)]

    # ---- what happens again

    def new_serial(self) -> int:
        """The next serial number, which no other allocation has."""
        self._num_allocations += 1
        return self._num_allocations - 1

    def serial_of(self, key: int) -> int | None:
        """The allocation that lives under this key; None: it is not in the log."""
        serial = self._serials.get(key)
        return None if serial in self._forgotten else serial

    @property
    def num_events(self) -> int:
        """How many events the step that is under way has had."""
        return len(self._now)

    def since(self, num_events: int) -> list[Event]:
        """What came after so many events of the step."""
        return self._now[num_events:]

    @property
    def state(self) -> LogState:
        return self._num_allocations, frozenset(self._have_multiplied), frozenset(self._forgotten)

    def go_on_from(self, state: LogState) -> None:
        """Take this state, as if what led to it had been recorded."""
        self._num_allocations, threads, forgotten = state
        self._have_multiplied, self._forgotten = set(threads), set(forgotten)

    def again(self, events: Iterable[Event], serials: dict[int, int]) -> None:
        """Take down these events once more, with serials of their own, which are added to `serials` by the old ones."""
        for event in events:
            if isinstance(event, Allocated):
                serial = serials[event.serial] = self.new_serial()
                self._now.append(Allocated(serial, event.num_bytes, event.place, event.stream))
            elif isinstance(event, Freed):
                self._now.append(Freed(serials[event.serial]))
            else:
                self._now.append(event)
