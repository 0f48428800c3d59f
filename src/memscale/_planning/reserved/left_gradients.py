"""Gradients that a step leaves to the next one, in the log of several steps."""

from __future__ import annotations

import dataclasses

from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Event, Freed
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch import private
from memscale._torch.released_gradients import held_gradient


class LeftGradients:
    """Gradients that a step leaves to the next one, which lets go of them between its forward and its backward.

    NOTE [gradients that are left]: a step that is played several times finds what the one before has left. So the
    gradients of one parameter have the same serial in all steps: each step frees it, and allocates it again.
    """

    def __init__(self, rehearsal: FakeRehearsal, events: AllocationLog, storages: AllocationLog) -> None:
        self._model, self._events, self._storages = rehearsal.model, events, storages
        self._serials: list[dict[int, int]] = []
        """The serials of gradients when each recorded step begins, by the parameter's id."""

    def begin(self, held: list[Event]) -> None:
        """A step begins; `held` are the events of its storages, which get the gradients that are there already."""
        left = self._left_in(self._storages)
        held += [Allocated(serial, num_bytes) for serial, num_bytes in left.values()]
        self._note()

    def replacing_each_other(self, steps: list[list[Event]]) -> list[list[Event]]:
        """The recorded steps, with one serial for all gradients of a parameter."""
        self._note()
        latest = self._serials[-1]
        same = {serial: latest[key] for known in self._serials for key, serial in known.items() if key in latest}
        return [[_renamed(event, same) for event in events] for events in steps]

    def _note(self) -> None:
        self._serials.append({key: serial for key, (serial, _) in self._left_in(self._events).items()})

    def _left_in(self, log: AllocationLog) -> dict[int, tuple[int, int]]:
        """Serial and bytes of the gradients that are there, by the parameter's id."""
        found = {}
        for parameter in self._model.parameters():
            gradient = held_gradient(parameter)
            storage = None if gradient is None else gradient.untyped_storage()
            serial = None if storage is None else log.serial_of(private.storage_key(storage))
            if storage is not None and serial is not None:
                found[id(parameter)] = (serial, storage.nbytes())
        return found


def _renamed(event: Event, serials: dict[int, int]) -> Event:
    if isinstance(event, Allocated | Freed) and event.serial in serials:
        return dataclasses.replace(event, serial=serials[event.serial])
    return event
