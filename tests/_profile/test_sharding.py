"""What sharing a model out does to a step."""

from __future__ import annotations

import pytest
from torch import nn

from memscale._profile import Segment, StepTrace
from memscale._profile.sharding import Sharding, Unit, sharding_of

pytestmark = pytest.mark.unit


def segment(phase: str, name: str, peak: int, net: int) -> Segment:
    return Segment(phase, name, peak, net, 0, 0, 0)  # type: ignore[arg-type]


TRACE = StepTrace(
    (
        segment("forward", "", 0, 0),
        segment("forward", "0", 50, 40),
        segment("forward", "1", 50, 40),
        segment("backward", "", 10, 0),
        segment("backward", "1", 30, 60),  # 40 of activations go, 100 of gradients come
        segment("backward", "0", 30, 60),
        segment("backward", "", 0, 20),
    )
)
SHARDING = Sharding(4, {"0": Unit(100, 100), "1": Unit(100, 100)}, Unit(20, 20))


def test_gradients_end_as_the_share_of_one_rank() -> None:
    assert TRACE.end_bytes == 100 + 100 + 20
    assert SHARDING.applied(TRACE).end_bytes == 25 + 25 + 5
    assert SHARDING.parameter_bytes == 220 // 4


def test_a_unit_is_there_twice_in_forward_and_beside_the_next_buffer_in_backward() -> None:
    forward = SHARDING.applied(StepTrace(TRACE.segments[:3])).segments
    live_bytes = forward[0].net_bytes
    assert live_bytes == 20 + 20, "the rest, and the buffer that it came in"
    # Block 0 computes beside its parameters, their buffer and the rest, whose own buffer has gone.
    assert live_bytes + forward[1].peak_bytes == 20 + 100 + 100 + 50
    whole = SHARDING.applied(TRACE).segments
    live_bytes = sum(each.net_bytes for each in whole[:4])
    assert live_bytes == 20 + 80 + 100, "the rest, activations, and the buffer of block 1"
    # Its gradients are copied into a buffer, when its activations and parameters have gone and block 0 is gathered.
    assert live_bytes + whole[4].peak_bytes == 20 + 40 + 100 + 100 + 100


def test_shares_are_padded_to_equal_rows() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False))
    sharding = sharding_of(model, ["0"], 4)
    assert sharding.units == {"0": Unit(8 * 3 * 4, 8 * 3 * 4)}
    assert sharding.rest == Unit(4 * 5 * 4, 4 * 5 * 4)
