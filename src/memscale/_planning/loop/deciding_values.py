"""Inputs whose values decide sizes, and how often a batch is looked at because of them.

NOTE [values that decide]: a plan holds for shapes, and where values of integer inputs decided sizes in its rehearsal
(a mask, lengths), for values that go no further than those. A batch that goes further is rehearsed, and planned for if
it takes more. That is bounded: new records become rare by themselves, and after `_MAX_LOOKS` of them, or a few that
changed nothing, the plan for the largest step seen stays.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

from memscale._planning.loop.demand import Demand
from memscale._planning.loop.known_plans import Known
from memscale._profile import StepTrace

logger = logging.getLogger("memscale")

_MAX_LOOKS = 32
"""The most batches that are rehearsed because of their values."""
_MAX_IDLE_LOOKS = 4
"""After so many, values are taken not to matter if each of these steps went the same way."""


class DecidingValues:
    """What is known about one model's inputs."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        """Inputs whose values decide something, by their place."""
        self._num_looks = self._num_other_steps = 0
        """Batches that were rehearsed because of their values, and those of them that were other steps."""

    def add(self, names: Iterable[str]) -> None:
        """These decided something in a rehearsal."""
        if self._num_looks < _MAX_LOOKS:
            self.names |= frozenset(names)

    @property
    def may_look(self) -> bool:
        """Whether one more batch is rehearsed because of its values."""
        return self._num_looks < (_MAX_LOOKS if self._num_other_steps else _MAX_IDLE_LOOKS)

    def begin_look(self, demand: Demand) -> None:
        """A batch is to be rehearsed whose values go further than before."""
        self._num_looks += 1
        names = ", ".join(name.partition(".")[2] for name, _ in demand.reaches)
        logger.info(
            "the values of an input (%s) decide sizes, and go further than before: rehearsing this batch", names
        )

    def covering(self, plain: StepTrace, demand: Demand, alike: Sequence[Known]) -> Known | None:
        """The first of these plans for the same shapes whose step was nowhere lower than this one, widened to its
        values; None: there is none."""
        self._num_other_steps += all(known.plain != plain for known in alike)
        for known in alike:
            if known.plain is not None and known.plain.spans(plain):
                return dataclasses.replace(known, demand=known.demand.widened(demand))
        return None

    def forget(self) -> bool:
        """Values are not followed any more. False: none was."""
        if not self.names:
            return False
        logger.info(
            "%d batches were rehearsed because of their values; from here on the plan for the largest of them stays, "
            "and other values are not followed any more",
            self._num_looks,
        )
        self.names, self._num_looks = frozenset(), _MAX_LOOKS
        return True
