"""The optimizer's step under a plan, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._profile import CHECKPOINT, STREAM, OptimizerCost, StateShare
from memscale.techniques.offload.pinned import PAGE_BYTES
from tests.profiles import MB, Block, hardware_of, profile_of

pytestmark = pytest.mark.unit
ONE = {"b": Block(keeps=100, keeps_selective=40, keeps_checkpointed=10, temporaries=20, gradients=5, time=100)}


@pytest.mark.parametrize(
    ("overlaps", "sizes", "expected"),
    [
        # 50 MB each way from memory that is not pinned
        (False, (30, 10, 10), 70 + 6 + 2 * 1000),
        # All that arrives, with steps and what leaves beside it; behind it the largest bucket is stepped and leaves.
        (True, (30, 10, 10), 500 + 70 * 30 / 50 + 300),
        (True, (10, 20, 20), 500 + 70 * 20 / 50 + 200),
        (True, (50,), 500 + 70 + 500),
    ],
)
def test_a_step_whose_state_waits_elsewhere(overlaps: bool, sizes: tuple[int, ...], expected: float) -> None:
    cost = OptimizerCost("adamw", 50 * MB, 0, 70 * MB, 0, num_launches=5, launched_bytes=70 * MB, bucket_launches=15)
    cost = dataclasses.replace(cost, bucket_bytes=tuple(size * MB for size in sizes))
    hardware = hardware_of(launch_s=1e-3, blocking_link_bytes_per_s=5e7)
    model = CostModel(profile_of(ONE, optimizer=cost), hardware, overlaps=overlaps)
    choice = Choice((), RunOptions(offloads_optimizer=True))
    assert model.evaluate(choice).step_ms == pytest.approx(402 + expected)


@pytest.mark.parametrize(
    ("sizes", "num_launches", "smaller_ms", "larger_ms"),
    [
        ((30, 10, 10), 15, 70 * 30 / 50 + 300, 0),  # the last step and departure; what the host does is hidden
        ((50,), 15, 70 + 500, 0),
        # The host sets the pace: 2,000 launches, 6 copies and three times 0.4 ms; behind them the last bucket leaves.
        ((30, 10, 10), 2000, 300, 2007.2 + 300 - (500 + 70 * 30 / 50 + 300)),
    ],
)
def test_what_buckets_of_other_sizes_could_save(
    sizes: tuple[int, ...], num_launches: int, smaller_ms: float, larger_ms: float
) -> None:
    cost = OptimizerCost("adamw", 50 * MB, 0, 70 * MB, 0, launched_bytes=70 * MB, bucket_launches=num_launches)
    cost = dataclasses.replace(cost, bucket_bytes=tuple(size * MB for size in sizes))
    model = CostModel(profile_of(ONE, optimizer=cost), hardware_of(launch_s=1e-3), overlaps=True)
    found = model.optimizer.other_sizes_save_ms(RunOptions(offloads_optimizer=1.0), 0)
    assert found == (pytest.approx(smaller_ms), pytest.approx(larger_ms, abs=1e-6))


def split_model(split_step_bytes: int | None = 3 * MB) -> CostModel:
    """In parts, the block takes 80 launches and what is beside it 16."""
    whole = OptimizerCost("adamw", 50 * MB, 12 * MB, 70 * MB, num_launches=8, launched_bytes=70 * MB, split_launches=96)
    rest = OptimizerCost("adamw", 40 * MB, 2 * MB, 56 * MB, num_launches=16, launched_bytes=56 * MB, split_launches=16)
    whole = dataclasses.replace(whole, split_step_bytes=split_step_bytes)
    profile = profile_of(ONE, variants=(CHECKPOINT, STREAM), optimizer=whole)
    return CostModel(
        dataclasses.replace(profile, rest_optimizer=rest), hardware_of(launch_s=0.01, host_bytes_per_s=None)
    )


def test_streaming_makes_the_optimizer_step_the_others_in_parts() -> None:
    optimizer = split_model().optimizer
    assert optimizer.step_ms(RunOptions(), 0) == pytest.approx(8 * 10)
    assert optimizer.step_ms(RunOptions(), 5 * MB) == pytest.approx(16 * 10)
    half = optimizer.step_ms(RunOptions(), np.array([0, 2.5 * MB, 5 * MB]))
    assert half == pytest.approx([80, (96 + 16) / 2 * 10, 160])


def test_buckets_are_stepped_at_once_whatever_is_streamed() -> None:
    optimizer = split_model().optimizer
    for run in (RunOptions(offloads_optimizer=True), RunOptions(quantizes_optimizer=True)):
        assert optimizer.step_ms(run, 5 * MB) < optimizer.step_ms(run, 0)


def test_in_parts_the_largest_decides() -> None:
    streamed = np.array([0, 1, 5 * MB])
    assert list(split_model().optimizer.step_bytes(RunOptions(), streamed)) == pytest.approx([12 * MB, 3 * MB, 2 * MB])
    more = split_model(split_step_bytes=20 * MB).optimizer  # of the state that is made, part by part
    assert list(more.step_bytes(RunOptions(), streamed)) == pytest.approx([12 * MB, 20 * MB, 2 * MB])
    at_once = split_model(split_step_bytes=None).optimizer
    assert list(at_once.step_bytes(RunOptions(), streamed)) == pytest.approx([12 * MB, 12 * MB, 2 * MB])


def test_the_hosts_share_of_the_step_is_counted_unless_the_clock_does_not() -> None:
    profile = dataclasses.replace(profile_of(ONE, variants=(STREAM,)), rest_optimizer=OptimizerCost("adamw", 0, 0, 0))
    choice = Choice((("b", STREAM),))
    on_host, uncounted = (
        CostModel(profile, hardware_of(host_bytes_per_s=rate)).evaluate(choice).step_ms for rate in (1e8, None)
    )
    share = 5 / 25  # of the trainable bytes
    assert on_host - uncounted == pytest.approx(share * 100 * MB / 1e8 * 1e3)


def test_the_state_of_what_is_streamed_waits_whatever_share_of_the_rest_stays() -> None:
    """Half of the state stays; of the rest's 10 MB beside a streamed block that is 5 MB, less a bucket of 2 MB, which
    may be missing. Each bucket waits in whole pages."""
    share = StateShare(0.5, 25 * MB, 0, (True, False))
    whole = OptimizerCost("adamw", 50 * MB, 0, 70 * MB, 0, bucket_bytes=25 * (2 * MB,), shares=(share,))
    rest = OptimizerCost("adamw", 10 * MB, 0, 14 * MB, 0)
    profile = dataclasses.replace(profile_of(ONE, optimizer=whole), rest_optimizer=rest)
    optimizer = CostModel(profile, hardware_of()).optimizer
    run = RunOptions(offloads_optimizer=0.5)
    block_bytes = sum(layer.trainable_bytes for layer in profile.layers if layer.is_block)
    pages = 26 * PAGE_BYTES
    assert optimizer.bytes_away(run, 0) == (0, 25 * MB + pages)
    assert optimizer.bytes_away(run, block_bytes) == (0, 47 * MB + pages)


@pytest.mark.parametrize("streamed_bytes", [0, 3 * MB, 5 * MB])
@pytest.mark.parametrize("run", [RunOptions(), RunOptions(steps_in_buckets=True)])
def test_what_choices_are_judged_by_is_what_each_question_says(run: RunOptions, streamed_bytes: int) -> None:
    optimizer = split_model().optimizer
    at_home_bytes, anywhere_bytes = optimizer.bytes_away(run, streamed_bytes)
    expected = (
        round(optimizer.resident_bytes(run, streamed_bytes)),
        round(optimizer.step_bytes(run, streamed_bytes)),
        round(at_home_bytes),
        round(anywhere_bytes),
        optimizer.step_ms(run, streamed_bytes),
    )
    assert optimizer.costs_of(run, streamed_bytes) == expected
    assert optimizer.costs_of(run, streamed_bytes) is optimizer.costs_of(run, streamed_bytes), "it is worked out once"


def test_what_blocks_change_is_added_up_in_any_run() -> None:
    model = split_model()
    choice = Choice((("b", STREAM),))
    assert model.resident_bytes(choice) == model.resident_bytes(Choice()) - model.blocks["b"].param_bytes - 10 * MB
    assert model.extras(choice.run, "b", STREAM) is model.extras(RunOptions(num_tiles=2), "b", STREAM)
