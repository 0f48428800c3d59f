"""Which of the plans that were made holds for a batch."""

from __future__ import annotations

import pytest
import torch

from memscale._plan import Checkpoint
from memscale._planning.loop.demand import Demand
from memscale._planning.loop.known_plans import Known, KnownPlans, with_more
from memscale._profile import TensorSpec
from memscale._profile.inputs import Inputs
from tests.parity import plan_of

pytestmark = pytest.mark.unit


def demand(length: int, reach: int | None = None) -> Demand:
    reaches = () if reach is None else (("0.mask", (reach,)),)
    return Demand("cpu", (), (TensorSpec("x", (1, length), "float32"),), (), (), reaches=reaches)


def known(length: int, num_actions: int, reach: int | None = None) -> Known:
    actions = [Checkpoint(f"blocks.{index}") for index in range(num_actions)]
    return Known(demand(length, reach), plan_of(actions, budget_bytes=100, baseline_peak_bytes=length))


def remembered(*some: Known) -> KnownPlans:
    plans = KnownPlans()
    for one in some:
        plans = plans.beside(one).with_one(one)
    return plans


def test_the_plan_for_the_least_batch_that_holds_is_found() -> None:
    short, long = known(8, 1), known(16, 3)
    plans = remembered(short, long)
    assert plans.find(demand(4)) is short
    assert plans.find(demand(9)) is long
    assert plans.find(demand(17)) is None


def test_a_plan_for_smaller_batches_stays_only_if_it_does_less() -> None:
    assert list(remembered(same := known(8, 3), longer := known(16, 3))) == [longer]
    assert same not in list(remembered(same, longer))
    assert len(remembered(known(8, 1), longer)) == 2


def test_the_oldest_goes_where_there_are_too_many() -> None:
    plans = remembered(*(known(length, length) for length in range(1, 40)))
    assert len(plans) == 32
    assert plans.find(demand(1)).demand == demand(8)


def test_what_the_loop_holds_is_counted_where_there_is_room() -> None:
    """A plan for a batch twice as large is taken to hold twice as much."""
    short, long = known(8, 1), known(16, 3)
    batch = Inputs((torch.zeros(1, 8),))
    plans, in_force = remembered(short, long).holding(60, batch, short.plan)
    assert [one.demand for one in plans] == [short.demand]
    assert in_force == with_more(short.plan, 60)
    assert (in_force.predicted_peak_bytes, in_force.loop_bytes) == (short.plan.predicted_peak_bytes + 60, 60)


def test_a_bound_says_whether_it_fits() -> None:
    one = known(8, 1)
    assert one.bounded(99).plan.fits
    assert not one.bounded(100).plan.fits
    assert one.bounded(99).is_bound
    assert not one.bounded(99).plan.loop_bytes


def test_without_values_the_plan_for_the_largest_step_stays() -> None:
    low, high = known(8, 1, reach=3), known(8, 2, reach=5)
    plans = remembered(high, low).without_values()
    assert {one.demand for one in plans} == {demand(8)}
    assert plans.find(demand(8)) is not None


def test_a_plan_is_replaced_and_corrected_in_its_place() -> None:
    short, long = known(8, 1), known(16, 3)
    plans = remembered(short, long)
    right = with_more(long.plan, 5)
    assert [one.plan for one in plans.promising(long.plan, right)] == [short.plan, right]
    assert list(plans.replaced(short, other := known(9, 1))) == [other, long]
