"""What travels when: spans that add up to the step that was predicted, one after the other or side by side."""

from __future__ import annotations

import itertools

import pytest
import torch

from memscale import Config, Hardware
from memscale._decide.choice import Choice, choice_of
from memscale._plan import Action, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.questions.step_times import step_times
from memscale._profile.inputs import Inputs
from memscale.report.step_times import LANES, StepTimes
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests.models import WIDTH, features, small

pytestmark = pytest.mark.unit
CARD = Hardware.from_name("RTX 3090")
EVERY = tuple(StreamParameters(f"blocks.{index}") for index in range(4))
STREAMED = tuple(StreamParameters(f"blocks.{index}") for index in range(2))


def planner_of(overlaps: bool | None = None) -> Planner:
    job = Job(small(), Config(async_offload=overlaps), CARD, "adamw")
    return Planner(job, Inputs((features(0, 4096, WIDTH),), {}))


def times_of(actions: tuple[Action, ...], overlaps: bool) -> StepTimes:
    planner = planner_of(overlaps)
    return step_times(planner, actions, planner.job.eligible)


def test_a_plain_step_adds_up_to_what_is_predicted() -> None:
    planner = planner_of()
    times = step_times(planner, (), planner.job.eligible)
    assert times.total_ms == pytest.approx(planner.cost_model().evaluate(Choice()).step_ms)
    assert times.moved_bytes("link in") == times.moved_bytes("link out") == 0
    assert {span.phase for span in times.spans} == {"forward", "backward", "optimizer"}
    for lane in LANES:
        spans = sorted((span for span in times.spans if span.lane == lane), key=lambda span: span.start_ms)
        assert all(span.ms > 0 for span in spans)
        assert all(one.end_ms <= next_one.start_ms + 1e-9 for one, next_one in itertools.pairwise(spans))


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_is_streamed_travels(overlaps: bool) -> None:
    times = times_of(STREAMED, overlaps)
    blocks = {span.module_fqn for span in times.spans if span.lane == "link in" and span.module_fqn}
    assert {"blocks.0", "blocks.1"} <= blocks
    assert overlaps or len(blocks) == 2, "side by side, what blocks fetch is spread over all of them"
    weights = sum(parameter.numel() * 4 for parameter in small().blocks[0].parameters())
    num_fetches = 3 if overlaps else 4  # side by side, backward finds the last one still there
    assert times.moved_bytes("link in") == num_fetches * weights
    assert all(span.end_ms <= times.total_ms + 1e-9 for span in times.spans if span.phase == "optimizer")


def test_lanes_that_block_follow_one_another() -> None:
    times = times_of(STREAMED, overlaps=False)
    forward = [span for span in times.spans if (span.module_fqn, span.phase) == ("blocks.0", "forward")]
    by_lane = {span.lane: span for span in forward}
    assert by_lane["compute"].start_ms == pytest.approx(by_lane["link in"].end_ms)
    assert by_lane["link in"].ms == pytest.approx((by_lane["link in"].num_bytes or 0) / 8e9 * 1e3)


@pytest.mark.parametrize("steps_on_device", [False, True])
def test_a_plan_adds_up_about(steps_on_device: bool) -> None:
    """Blocks are mixed from traces where a plan is decided, and rehearsed as a whole here."""
    actions: tuple[Action, ...] = (*EVERY, StepOnDevice(1 << 20)) if steps_on_device else EVERY
    times = times_of(actions, overlaps=False)
    planner = planner_of(False)
    planner.look_into_everything(planner.job.eligible)
    predicted = planner.cost_model().evaluate(choice_of(actions, planner.profile)).step_ms
    assert times.total_ms == pytest.approx(predicted, rel=0.1)
    assert any(span.lane == "link in" and span.phase == "optimizer" for span in times.spans) == steps_on_device


def test_state_travels_in_the_optimizer_step() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    planner = Planner(Job(model, Config(), CARD, "adamw"), Inputs((torch.randn(2, 512),), {}))
    times = step_times(planner, (OffloadOptimizer(1 << 20),), planner.job.eligible)
    moved = [span for span in times.spans if span.lane == "link in"]
    assert {span.phase for span in moved} == {"optimizer"}
    assert sum(span.num_bytes or 0 for span in moved) == pytest.approx(planner.profile.optimizer.state_bytes, rel=0.01)


@pytest.mark.parametrize("overlaps", [False, True])
def test_activations_that_wait_elsewhere_travel(overlaps: bool) -> None:
    """A planner that has not planned has no trace in which every block's activations do."""
    planner = Planner(
        Job(small(), Config(async_offload=overlaps), CARD, "adamw"), Inputs((features(0, 1 << 16, WIDTH),), {})
    )
    actions = (OffloadActivations("blocks.1"), OffloadActivations("blocks.2"))
    times = step_times(planner, actions, planner.job.eligible)
    assert {span.module_fqn for span in times.spans if span.lane == "link out"} == {"blocks.1", "blocks.2"}
    assert times.moved_bytes("link out") > 0
    assert overlaps or times.moved_bytes("link in") == times.moved_bytes("link out")
