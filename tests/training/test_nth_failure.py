"""The n-th failure of every kind in one step, under every technique: an error, whole weights, no leak, and on it goes.

`make test` strikes at one place of each step, `make test-all` at every one of them.
"""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import simgpu
from tests.lanes import full, in_turns
from tests.training.nth_failure import (
    FAULTS,
    FILE_FAULTS,
    SECOND_STEP,
    TECHNIQUES,
    PlainRun,
    Scene,
    Strike,
    check_nothing_is_held,
    held_bytes,
)

WAYS = ("sync", "async")
NOT_REACHED = "not reached"
TO_DISK = ("activations", "kept outputs", "optimizer", "half of the optimizer")
"""Techniques that write to disk where the host has no room: parameters have their homes in host memory."""
SAMPLE = {"allocation": 97}
"""Which failure of a kind `make test` tries: the first, but for allocations, of which the first are the forward's."""


@pytest.fixture(scope="module")
def plain() -> Iterator[list[PlainRun]]:
    """One run for all; a list that is emptied, because the last test still holds it."""
    runs: list[PlainRun] = []
    yield runs
    runs.clear()


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: None) -> None:
    pass


def outcome(
    technique: str,
    way: str,
    fault: str,
    nth: int,
    directory: pathlib.Path,
    plain: list[PlainRun],
    strike: Strike = SECOND_STEP,
) -> str:
    if not plain:
        plain.append(PlainRun())
    before = held_bytes()
    to_disk = fault in FILE_FAULTS
    scene = Scene(TECHNIQUES[technique], way == "async", directory, plain[0], to_disk=to_disk)
    found = scene.fail(fault, nth, strike)
    scene.close()
    del scene
    check_nothing_is_held(before)
    assert simgpu.take_reports() == []
    return found


def known_ends(fault: str) -> set[str]:
    """How a step may end. An optimizer's step goes on where an allocation has failed, with the plain run's weights."""
    return {"before", "after", "partial"} | ({"not noticed"} if fault == "allocation" else set())


CASES = [
    *in_turns(list(TECHNIQUES), ["allocation sync", "copy async", "copy sync", "allocation async"]),
    *in_turns(TO_DISK, ["write full sync", "write async", "read async", "short read sync"]),
]


@pytest.mark.parametrize(("technique", "failure"), CASES)
def test_one_of_the_failures(technique: str, failure: str, tmp_path: pathlib.Path, plain: list[PlainRun]) -> None:
    fault, _, way = failure.rpartition(" ")
    found = outcome(technique, way, fault, SAMPLE.get(fault, 1), tmp_path, plain)
    assert found in known_ends(fault), "it is there, and nothing goes on without it"


IN_THE_OPTIMIZER = [
    ("everything, step on the device", "copy async", 1, 70),  # the host then wrote where a copy was on its way to
    ("everything, step on the device", "event async", 0, 4),
    ("stream, step on the device", "event async", 0, 52),
    ("guests and half of the optimizer", "event async", 1, 64),
    ("guests and half of the optimizer", "allocation async", 0, 40),
    ("guests and half of the optimizer", "copy sync", 0, 30),
    ("half of the optimizer", "allocation async", 0, 12),
    ("optimizer", "copy sync", 0, 3),
]
"""Failures of `optimizer.step()` alone, by technique, kind, number of the step and of the failure."""


@pytest.mark.parametrize(("technique", "failure", "step", "nth"), IN_THE_OPTIMIZER)
def test_failures_while_the_optimizer_steps(
    technique: str, failure: str, step: int, nth: int, tmp_path: pathlib.Path, plain: list[PlainRun]
) -> None:
    fault, _, way = failure.rpartition(" ")
    found = outcome(technique, way, fault, nth, tmp_path, plain, Strike(step, "optimizer"))
    assert found in known_ends(fault), "it is there, and nothing goes on without it"


@full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_failure(technique: str, fault: str, way: str, tmp_path: pathlib.Path, plain: list[PlainRun]) -> None:
    _every(technique, fault, way, tmp_path, plain)


@full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FILE_FAULTS)
@pytest.mark.parametrize("technique", TO_DISK)
def test_every_failure_of_the_disk(
    technique: str, fault: str, way: str, tmp_path: pathlib.Path, plain: list[PlainRun]
) -> None:
    _every(technique, fault, way, tmp_path, plain)


STEPPED = [technique for technique in TECHNIQUES if "optimizer" in technique or "step" in technique]


@full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("technique", [*STEPPED, "buckets", "in backward"])
def test_every_failure_while_state_is_made(
    technique: str, fault: str, way: str, tmp_path: pathlib.Path, plain: list[PlainRun]
) -> None:
    _every(technique, fault, way, tmp_path, plain, Strike(0, "optimizer"))


@full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FILE_FAULTS)
@pytest.mark.parametrize("technique", ["optimizer", "half of the optimizer"])
def test_every_failure_of_the_disk_while_state_is_made(
    technique: str, fault: str, way: str, tmp_path: pathlib.Path, plain: list[PlainRun]
) -> None:
    _every(technique, fault, way, tmp_path, plain, Strike(0, "optimizer"))


def _every(
    technique: str,
    fault: str,
    way: str,
    directory: pathlib.Path,
    plain: list[PlainRun],
    strike: Strike = SECOND_STEP,
) -> None:
    gc.collect()
    gc.freeze()  # what was there before is not looked at again after each failure
    nth = 1
    while outcome(technique, way, fault, nth, directory, plain, strike) != NOT_REACHED:
        nth += 1
