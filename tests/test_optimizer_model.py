"""The optimizer's step under a plan, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memscale._choice import Choice, Run
from memscale._peak import CostModel
from memscale._profile import OptimizerCost
from tests.profiles import MB, Block, hardware_of, profile_of

ONE = {"b": Block(keeps=100, keeps_selective=40, keeps_checkpointed=10, temporaries=20, gradients=5, time=100)}


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [
        (False, 402 + 70 + 6 + 2 * 1000),  # 50 MB each way from memory that is not pinned
        (True, 402 + 70 + 500 + 300),  # stepped and sent; the first bucket of 30 MB is waited for
    ],
)
def test_a_step_whose_state_waits_elsewhere(overlaps: bool, expected: float) -> None:
    cost = OptimizerCost(
        "adamw", 50 * MB, 0, 70 * MB, 0, num_launches=5, launched_bytes=70 * MB, num_buckets=3, bucket_launches=15
    )
    cost = dataclasses.replace(cost, first_bucket_bytes=30 * MB)
    hardware = hardware_of(launch_s=1e-3, blocking_link_bytes_per_s=5e7)
    model = CostModel(profile_of(ONE, optimizer=cost), hardware, overlaps=overlaps)
    choice = Choice((), Run(offloads_optimizer=True))
    assert model.evaluate(choice).step_ms == pytest.approx(expected)


def test_the_hosts_share_of_the_step_is_counted_unless_the_clock_does_not() -> None:
    profile = dataclasses.replace(profile_of(ONE, variants=("stream",)), rest_optimizer=OptimizerCost("adamw", 0, 0, 0))
    choice = Choice((("b", "stream"),))
    on_host, uncounted = (
        CostModel(profile, hardware_of(host_bytes_per_s=rate)).evaluate(choice).step_ms for rate in (1e8, None)
    )
    share = 5 / 25  # of the trainable bytes
    assert on_host - uncounted == pytest.approx(share * 100 * MB / 1e8 * 1e3)
