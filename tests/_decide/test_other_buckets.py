"""Which sizes of buckets are worth a rehearsal, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memscale import Config
from memscale._decide.choice import Choice, RunOptions, actions_of, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.other_buckets import SIZES, redecided, sizes_worth_trying
from memscale._decide.search import Candidate
from memscale._decide.write_plan import Decision, write_plan
from memscale._plan import OPTIMIZER_BUCKET_BYTES, OffloadOptimizer, Plan, Reason
from memscale._profile import OptimizerCost
from tests.profiles import MB, Block, hardware_of, profile_of

pytestmark = pytest.mark.unit
SMALLER, LARGER = SIZES
ONE = {"b": Block(keeps=100, keeps_selective=40, keeps_checkpointed=10, temporaries=20, gradients=5, time=100)}
AWAY = Choice((), RunOptions(offloads_optimizer=1.0))
CARD = hardware_of(launch_s=1e-3)


def model_of(sizes: tuple[int, ...], num_launches: int = 15, bucket_bytes: int = OPTIMIZER_BUCKET_BYTES) -> CostModel:
    """All state arrives in 500 ms; behind it the largest bucket is stepped, 1.4 ms a MB, and leaves, 10 ms a MB."""
    cost = OptimizerCost("adamw", 50 * MB, 0, 70 * MB, 0, launched_bytes=70 * MB, bucket_launches=num_launches)
    cost = dataclasses.replace(cost, bucket_bytes=tuple(size * MB for size in sizes), offloaded_step_bytes=0)
    profile = dataclasses.replace(profile_of(ONE, optimizer=cost), bucket_bytes=bucket_bytes)
    return CostModel(profile, CARD, overlaps=True)


def plan_of(model: CostModel, choice: Choice) -> Plan:
    baseline, chosen = model.evaluate(Choice()), Candidate(choice, model.evaluate(choice))
    decision = Decision("user_config", baseline, chosen, True, Reason("the fastest of the candidates that fit"))
    return write_plan(model, resolve(Config(), CARD), decision)


def test_sizes_that_could_save_half_a_percent_are_worth_trying() -> None:
    assert sizes_worth_trying(model_of((30, 10, 10)), AWAY) == [SMALLER], "half of 342 ms of 1244"
    assert sizes_worth_trying(model_of((1,) * 50, bucket_bytes=LARGER), AWAY) == [SMALLER], (
        "three quarters of 11 ms of 913"
    )
    assert sizes_worth_trying(model_of((1,) * 50), AWAY) == [SMALLER], "half of 11 ms of 913"
    few = model_of((1,) * 70)
    assert few.optimizer.other_sizes_save_ms(AWAY.run, 0)[0] > 0.005 * few.evaluate(AWAY).step_ms
    assert sizes_worth_trying(few, AWAY) == [], "half of it is too little"
    assert sizes_worth_trying(model_of((0,) * 50), AWAY) == [], "nothing comes behind the last arrival"
    assert sizes_worth_trying(model_of((0,) * 50, num_launches=2000), AWAY) == [LARGER], "the host sets the pace"


def test_nothing_is_tried_where_nothing_travels_or_buckets_are_of_what_is_unpacked() -> None:
    model = model_of((30, 10, 10))
    assert sizes_worth_trying(model, Choice()) == []
    assert sizes_worth_trying(model, Choice((), RunOptions(quantizes_optimizer=True, offloads_optimizer=1.0))) == []


def test_a_plan_is_decided_again_in_the_buckets_of_another_profile() -> None:
    whole, small = model_of((50,)), model_of((10,) * 5, bucket_bytes=SMALLER)
    plan, eligible = plan_of(whole, AWAY), resolve(Config(), CARD)
    found = redecided(small, eligible, plan)
    assert found is not None
    assert found.predicted_slowdown < plan.predicted_slowdown
    assert found.actions == (OffloadOptimizer(SMALLER, reason=found.actions[0].reason),)
    assert found.actions[0].reason.numbers["bucket_bytes"] == SMALLER
    assert choice_of(found.actions, small.profile) == choice_of(plan.actions, whole.profile) == AWAY
    assert found.summary == plan.summary
    assert redecided(whole, eligible, plan_of(small, AWAY)) is None, "it would be slower"
    above_bytes = eligible.budget.device_bytes - found.predicted_peak_bytes + 1
    held = dataclasses.replace(plan, predicted_reserved_bytes=plan.predicted_peak_bytes + above_bytes)
    assert redecided(small, eligible, held) is None, "what is held above live bytes is taken to be the same"


@pytest.mark.parametrize("num_bytes", [SMALLER, LARGER])
def test_actions_say_the_size_that_their_profile_has(num_bytes: int) -> None:
    model = model_of((50,), bucket_bytes=num_bytes)
    assert [action.bucket_bytes for action in actions_of(AWAY, model.profile)] == [num_bytes]  # type: ignore[attr-defined]
