"""Plans that were made, each for a demand: which of them holds for the batch that begins.

known = KnownPlans()
known = known.beside(new).with_one(new)
known.find(demand)                      # the one that does the least, of those that hold
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from memscale._decide.budget import needed_bytes
from memscale._plan import Plan
from memscale._planning.loop.demand import Demand
from memscale._planning.loop.held_gradients import Stay
from memscale._planning.loop.shapes import does_less
from memscale._profile import StepTrace
from memscale._profile.inputs import Inputs

_MAX_KNOWN = 32
"""The most demands whose plans are remembered."""
_WORTH_LOOSENING = 1.05
"""A plan that is predicted to take less, as a multiple of the plain step's time, is left as it is."""
_OF_ALLOCATOR = ("predicted_allocated_bytes", "predicted_reserved_bytes", "predicted_total_bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What was planned for."""

    demand: Demand
    plan: Plan
    plain: StepTrace | None = None
    """The step without techniques, where it was rehearsed."""
    stay: Stay = "none"
    """How long it counts gradients of earlier batches."""
    is_bound: bool = False
    """The plan's numbers are no less than what it takes, and may be more."""

    @property
    def is_worth_loosening(self) -> bool:
        """Whether a plan that does less would be faster, and may be found."""
        plan = self.plan
        is_settled = plan.rehearsed and not plan.provisional and plan.allocator is None
        return is_settled and plan.predicted_slowdown >= _WORTH_LOOSENING

    def bounded(self, more_bytes: int) -> Known:
        """The same with so much more on the device, which may be too much, and whether it fits then."""
        plan = with_more(self.plan, more_bytes, is_of_loop=False)
        return dataclasses.replace(self, is_bound=True, plan=dataclasses.replace(plan, fits=_has_room(plan, 0)))

    def holding(self, num_bytes: int, inputs: Inputs) -> Known | None:
        """The same, with so much more held by the loop with this batch; None where the plan has no room for that."""
        elements = sum(tensor.numel() for tensor in inputs.tensors())
        held_bytes = math.ceil(num_bytes * max(1.0, self.demand.num_elements / max(1, elements)))
        if not _has_room(self.plan, held_bytes):
            return None
        return dataclasses.replace(self, plan=with_more(self.plan, held_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPlans:
    """What was planned for. A demand covers another only where the plan for the other does less."""

    _all: tuple[Known, ...] = ()

    def __iter__(self) -> Iterator[Known]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def find(self, demand: Demand) -> Known | None:
        """The plan for the least batch, of those that hold: it does the least."""
        holding = (known for known in self._all if known.demand.covers(demand))
        return min(holding, key=lambda known: known.demand.num_elements, default=None)

    def of_shapes(self, demand: Demand) -> list[Known]:
        """Those that were rehearsed and hold for these shapes, whatever the values are."""
        return [k for k in self._all if k.plain is not None and k.demand.without_values().covers(demand)]

    def beside(self, new: Known) -> KnownPlans:
        """Those that stay beside a new one: plans for smaller batches do if they do less. See NOTE [plans by shape]."""

        def stays(known: Known) -> bool:
            is_smaller = known.demand.num_elements < new.demand.num_elements
            return not new.demand.covers(known.demand) or (is_smaller and does_less(known.plan, new.plan))

        return KnownPlans(tuple(known for known in self._all if stays(known)))

    def with_one(self, new: Known) -> KnownPlans:
        """These and the new one; the oldest goes where there are too many."""
        return KnownPlans((*self._all, new)[-_MAX_KNOWN:])

    def replaced(self, old: Known, new: Known) -> KnownPlans:
        """The same with `new` in the place of `old`."""
        return KnownPlans(tuple(new if known is old else known for known in self._all))

    def promising(self, plan: Plan, right: Plan) -> KnownPlans:
        """The same, where this plan has other numbers."""
        return KnownPlans(tuple(dataclasses.replace(k, plan=right) if k.plan is plan else k for k in self._all))

    def holding(self, num_bytes: int, inputs: Inputs, in_force: Plan | None) -> tuple[KnownPlans, Plan | None]:
        """Those that have room for so much more, which the loop holds with this batch; and `in_force` with its new
        numbers, if it is among them."""
        kept = [(known.plan, more) for known in self._all if (more := known.holding(num_bytes, inputs)) is not None]
        now = next((more.plan for plan, more in kept if plan is in_force), None)
        return KnownPlans(tuple(more for _, more in kept)), now

    def widened(self, new: Known) -> Known:
        """A plan for values of one batch holds for those of an earlier one, too, if that step was nowhere higher."""
        shapes, demand = new.demand.without_values(), new.demand
        for other in self._all:
            is_lower = new.plain is not None and other.plain is not None and new.plain.spans(other.plain)
            if is_lower and shapes.covers(other.demand):
                demand = demand.widened(other.demand)
        return dataclasses.replace(new, demand=demand)

    def without_values(self) -> KnownPlans:
        """The plan for the largest step of the same shapes holds for all values."""
        known = KnownPlans()
        for one in sorted(self._all, key=lambda known: known.plan.baseline_peak_bytes):
            new = dataclasses.replace(one, demand=one.demand.without_values())
            known = known.beside(new).with_one(new)
        return known


def with_more(plan: Plan, num_bytes: int, *, is_of_loop: bool = True) -> Plan:
    """The plan where so much more is on the device all the time. `is_of_loop`: which the loop holds for itself."""
    names = ("baseline_peak_bytes", "predicted_peak_bytes", *_OF_ALLOCATOR, *(("loop_bytes",) if is_of_loop else ()))
    known = {name: getattr(plan, name) for name in names}
    changed: dict[str, Any] = {name: number + num_bytes for name, number in known.items() if number is not None}
    return dataclasses.replace(plan, **changed)


def _has_room(plan: Plan, more_bytes: int) -> bool:
    return needed_bytes(plan) + more_bytes <= plan.budget_bytes
