"""The peak and time model on hand-made traces, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._profile import (
    CHECKPOINT,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    STREAM,
    OptimizerCost,
    Segment,
    StepTrace,
    TraceKey,
)
from tests.profiles import MB, Block, hardware_of, profile_of, trace_of

pytestmark = pytest.mark.unit
ONE = {"b": Block(keeps=100, keeps_selective=40, keeps_checkpointed=10, temporaries=20, gradients=5, time=100)}


def model_of(**changes: object) -> CostModel:
    free = OptimizerCost("none", 0, 0, 0)
    return CostModel(profile_of(ONE, optimizer=free, **changes), hardware_of())


def test_plain_step() -> None:
    """25 parameters + 1 input; stem 1, block 100, then the head's 50 on top of them, then 60 in its backward."""
    outcome = model_of().evaluate(Choice())
    assert outcome.peak_bytes == (26 + 1 + 100 + 30 + 60) * MB
    assert outcome.step_ms == pytest.approx(1 + 100 + 50 + 50 + 200 + 1)


@pytest.mark.parametrize(
    ("treatment", "peak", "ms"),
    [
        (SELECTIVE, 26 + 1 + 40 + 30 + 60, 402 + 50),  # the head's backward is still the highest
        (CHECKPOINT, 26 + 1 + 10 + 90 + 25, 402 + 100),  # now the block's recompute is
    ],
)
def test_treated_step(treatment: str, peak: int, ms: float) -> None:
    outcome = model_of().evaluate(Choice((("b", treatment),)))
    assert outcome.peak_bytes == peak * MB
    assert outcome.step_ms == pytest.approx(ms)


def test_the_optimizer_step_may_be_the_peak() -> None:
    profile = profile_of(ONE, optimizer=OptimizerCost("adamw", 50 * MB, 500 * MB, 100 * MB))
    model = CostModel(profile, hardware_of())
    assert model.evaluate(Choice()).peak_bytes == (26 + 50 + 1 + 5 + 500) * MB
    assert model.evaluate(Choice()).step_ms == pytest.approx(402 + 100)


def test_a_mixture_equals_the_whole_trace() -> None:
    """Treating every block, segment by segment, is the trace in which every block was treated."""
    profile = profile_of(5)
    model = CostModel(profile, hardware_of())
    for name in (CHECKPOINT, SELECTIVE):
        choice = Choice(tuple((f"blocks.{index}", name) for index in range(5)))
        assert model.evaluate(choice).peak_bytes == model.peak_of(profile.variants[TraceKey(name)], choice)


def test_single_blocks() -> None:
    model = model_of()
    assert model.activation_bytes("b") == 100 * MB
    assert model.saved_bytes("b", CHECKPOINT) == 90 * MB
    assert model.saved_bytes("b", SELECTIVE) == 60 * MB
    assert model.extra_ms("b", CHECKPOINT) == pytest.approx(100)
    assert model.forward_ms("b") == pytest.approx(100)


def test_traces_of_another_order_are_not_mixed() -> None:
    odd = trace_of(ONE, CHECKPOINT)
    odd = dataclasses.replace(odd, segments=(*odd.segments, Segment("backward", "b", 0, 0, 0, 0, 0)))
    profile = profile_of(ONE, variants=(SELECTIVE,))
    profile = dataclasses.replace(profile, variants={**profile.variants, TraceKey(CHECKPOINT): odd})
    model = CostModel(profile, hardware_of())
    assert CHECKPOINT not in model.treatments
    assert model.whole_treatments == (CHECKPOINT,)
    choice = Choice((("b", CHECKPOINT),))
    assert model.evaluate_whole(choice).peak_bytes == model.peak_of(odd, choice)


def test_trace_sums() -> None:
    trace = StepTrace((Segment("forward", "", 5, 3, 0, 0, 0), Segment("backward", "", 4, -2, 0, 0, 0)))
    assert trace.peak_bytes == 7
    assert trace.end_bytes == 1


@pytest.mark.parametrize(("fetched", "expected"), [(0, 402 - 300 + 500), (50, 402 - 300 + 2 * 500)])
def test_what_is_still_there_in_backward_leaves_all_the_time(fetched: int, expected: float) -> None:
    """50 MB take the link 500 ms. Fetched, they leave beside the 100 ms of forward and come back beside the 200 of
    backward; still there, they have both. See NOTE [side by side]."""
    trace = trace_of(ONE, KEEP)
    traffic = {"forward": {"sent_bytes": 50 * MB}, "backward": {"fetched_bytes": fetched * MB}}
    segments = [dataclasses.replace(s, **traffic[s.phase]) if s.module_fqn else s for s in trace.segments]
    profile = profile_of(ONE, optimizer=OptimizerCost("none", 0, 0, 0))
    profile = dataclasses.replace(profile, variants={TraceKey(OFFLOAD): StepTrace(tuple(segments))})
    model = CostModel(profile, hardware_of(), overlaps=True)
    assert model.evaluate(Choice((("b", OFFLOAD),))).step_ms == pytest.approx(expected)


TWO = {fqn: dataclasses.replace(ONE["b"], parameters=size) for fqn, size in {"first": 5, "second": 15}.items()}


@pytest.mark.parametrize(
    ("streamed", "waited"),
    [
        (("first", "second"), 50),  # the way of the first one's weights is shorter than its forward
        (("first",), 37.5),  # half an average block: of 50 and of 100 ms
        (("second",), 75),
    ],
)
def test_the_first_weights_are_waited_for_wherever_they_are(streamed: tuple[str, ...], waited: float) -> None:
    """A block's forward takes 100 ms, and again in backward; what it fetches and sends is hidden, but for the first.

    See NOTE [the first weights]."""
    profile = profile_of(TWO, variants=(CHECKPOINT, STREAM), optimizer=OptimizerCost("none", 0, 0, 0))
    model = CostModel(profile, hardware_of(link_directions=2, host_bytes_per_s=None), overlaps=True)
    hidden = Choice(tuple((fqn, CHECKPOINT) for fqn in streamed))
    choice = Choice(tuple((fqn, STREAM) for fqn in streamed))
    kept_ms = 0 if "second" not in streamed else 50  # forward waits for 15 MB longer than it computes
    extra_ms = model.evaluate(choice).step_ms - model.evaluate(hidden).step_ms
    assert extra_ms == pytest.approx(waited + kept_ms)
    blocking = CostModel(profile, hardware_of())
    assert blocking.first_fetch_ms(choice.run, 20 * MB) == 0
