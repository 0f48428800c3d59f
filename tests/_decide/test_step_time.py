"""Who sets the pace of a piece of a step, against numbers worked out by hand. See NOTE [pace]."""

from __future__ import annotations

import dataclasses

import pytest

from memscale._decide.step_time import Moved, Pace, StepWork, Turn
from memscale._profile import Segment
from tests.profiles import MB, hardware_of

pytestmark = pytest.mark.unit


def moving(phase: str = "forward", **changes: int) -> Segment:
    """100 ms of compute, 10 launches."""
    return Segment(phase, "b", 0, 0, 0, 0, 100 * MB, num_launches=10, **changes)  # type: ignore[arg-type]


def pace_of(*, overlaps: bool, **changes: object) -> Pace:
    return Pace(hardware_of(launch_s=1e-3, blocking_link_bytes_per_s=5e7, **changes), overlaps=overlaps)


def test_matmuls_take_the_slower_of_math_and_memory() -> None:
    pace = Pace(hardware_of())
    by_math = Segment("forward", "", 0, 0, flops=6 * 10**11, matmul_bytes=10, other_bytes=0)
    by_memory = Segment("forward", "", 0, 0, flops=10, matmul_bytes=10**9, other_bytes=0)
    assert pace.run_ms([by_math]) == pytest.approx(1000)  # 60 % of nominal
    assert pace.run_ms([by_memory]) == pytest.approx(1000)


def test_the_host_sets_the_pace_of_small_operators() -> None:
    pace = pace_of(overlaps=False)
    assert pace.run_ms([moving()]) == pytest.approx(100)
    assert pace.run_ms([dataclasses.replace(moving(), num_launches=300)]) == pytest.approx(300)


def test_transfers_that_wait_come_on_top() -> None:
    moved = moving(num_sends=2, sent_bytes=5 * MB, num_fetches=1, fetched_bytes=10 * MB)
    assert pace_of(overlaps=False).run_ms([moved]) == pytest.approx(100 + 3 + 100 + 200)


def test_transfers_beside_compute_cost_what_it_does_not_hide() -> None:
    pace = pace_of(overlaps=True)
    hidden = moving(num_sends=1, sent_bytes=9 * MB, num_fetches=1, fetched_bytes=8 * MB)
    assert pace.run_ms([hidden]) == pytest.approx(100)
    both = moving(num_sends=1, sent_bytes=30 * MB, num_fetches=1, fetched_bytes=20 * MB)
    assert pace.run_ms([both]) == pytest.approx(300)
    assert pace_of(overlaps=True, link_directions=1).run_ms([both]) == pytest.approx(500)


def test_a_clock_with_one_host_thread_waits_for_gradients_to_land() -> None:
    landing = moving("backward", num_sends=1, sent_bytes=5 * MB)
    assert pace_of(overlaps=True).run_ms([landing]) == pytest.approx(100)
    assert pace_of(overlaps=True, has_one_host_thread=True).run_ms([landing]) == pytest.approx(150)


# ---- transfers beside other blocks: see NOTE [side by side]


def spread_of(
    forward: list[dict[str, int]], backward: list[dict[str, int]], streamed: str = "abc"
) -> list[tuple[float, ...]]:
    """Of blocks of 10, 20 and 10 MB: what comes and goes in the forward and the backward of each, in MB."""
    names = ["a", "b", "c"]
    segments = [moving(**{name: size * MB for name, size in traffic.items()}) for traffic in (*forward, *backward)]
    runs = [(name, [segment]) for name, segment in zip([*names, *reversed(names)], segments, strict=True)]
    sizes = {name: size * MB for name, size in zip(names, (10, 20, 10), strict=True) if name in streamed}
    spread = pace_of(overlaps=True).spread(runs, sizes)
    return [
        tuple(
            round(size / MB, 6)
            for size in (
                segment.fetched_bytes + spread[index].in_bytes + spread[index].first_bytes,
                segment.sent_bytes + spread[index].out_bytes,
                spread[index].first_bytes,
            )
        )
        for index, segment in enumerate(segments)
    ]


def test_weights_that_are_fetched_ahead_count_where_they_are_waited_for() -> None:
    """Forward asks for all at once, backward for two at once and not for the last block's, which stayed."""
    found = spread_of([{"fetched_bytes": 40}, {}, {}], [{"fetched_bytes": 30}, {}, {}])
    assert found[:3] == [(10, 0, 10), (20, 0, 0), (10, 0, 0)]
    assert found[3:] == [(7.5, 0, 0), (15, 0, 0), (7.5, 0, 0)]


def test_inputs_that_come_back_are_told_from_weights() -> None:
    """Each block sends 5 MB of inputs and gets them back beside its weights."""
    sent = {"sent_bytes": 5, "num_sends": 1}
    found = spread_of(
        [{**sent, "fetched_bytes": 40}, sent, sent], [{"fetched_bytes": 35}, {"fetched_bytes": 5}, {"fetched_bytes": 5}]
    )
    assert found[:3] == [(10, 5, 10), (20, 5, 0), (10, 5, 0)]
    assert found[3:] == [(12.5, 0, 0), (20, 0, 0), (12.5, 0, 0)]


def test_weights_count_with_the_blocks_that_are_streamed() -> None:
    """Of three blocks the last two: the middle one comes first, and again for backward; the last one has stayed."""
    found = spread_of([{}, {"fetched_bytes": 30}, {}], [{}, {"fetched_bytes": 20}, {}], "bc")
    assert found[:3] == [(0, 0, 0), (20, 0, 20), (10, 0, 0)]
    assert [round(coming * 30) for coming, _, _ in found[3:]] == [200, 400, 0]


@pytest.mark.parametrize(
    ("changes", "staying_ms", "turn", "expected"),
    [
        ({}, 0, Turn(10 * MB, 30, 5 * MB), 400 + 30 + 50),  # what arrives sets the pace
        ({}, 900, Turn(10 * MB, 30, 5 * MB), 100 + 900 + 50),  # what is computed does, from the start
        ({"link_directions": 1}, 0, Turn(10 * MB, 30, 5 * MB), 600 + 30),  # one way for both
        ({}, 300, Turn(40 * MB, 100, 20 * MB), 400 + 100 + 200),  # one turn: what stays is computed while it arrives
    ],
)
def test_turns_wait_for_the_first_and_the_last(
    changes: dict[str, object], staying_ms: float, turn: Turn, expected: float
) -> None:
    """40 MB arrive, take 100 ms, and half of them leave, beside what stays."""
    moved = Moved(in_bytes=40 * MB, out_bytes=20 * MB)
    works = [StepWork(100, 0, moved=moved, turn=turn, travelling_ms=100), StepWork(staying_ms, 0)]
    assert pace_of(overlaps=True, **changes).turns_ms(works) == pytest.approx(expected)


def test_what_nothing_hides_comes_on_top() -> None:
    assert pace_of(overlaps=True).run_ms([moving()], more=Moved(first_bytes=5 * MB)) == pytest.approx(150)


def test_products_in_16_bits_and_what_needs_memory_have_shares_of_their_own() -> None:
    """A model that is in 16 bits itself is not taken for one in 32."""
    hardware = hardware_of(half_matmul_efficiency=0.5, memory_efficiency=0.25)
    mixed = Segment("forward", "", 0, 0, flops=8 * 10**11, half_flops=5 * 10**11, matmul_bytes=0, other_bytes=10**6)
    assert Pace(hardware).run_ms([mixed]) == pytest.approx(500 + 500 + 4)
    assert Pace(hardware_of()).memory_ms(10**6) == pytest.approx(1)
