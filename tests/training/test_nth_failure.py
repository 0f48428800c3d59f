"""The n-th failure of every kind in one step, under every technique: an error, whole weights, no leak, and on it goes.

`make test` strikes at one place of each step, `make test-all` at every one of them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lanes import full, in_turns
from tests.training.nth_failure import (
    FAULTS,
    FILE_FAULTS,
    TECHNIQUES,
    PlainRun,
    Scene,
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


def outcome(technique: str, way: str, fault: str, nth: int, directory: pathlib.Path, plain: list[PlainRun]) -> str:
    if not plain:
        plain.append(PlainRun())
    before = held_bytes()
    to_disk = fault in FILE_FAULTS
    scene = Scene(TECHNIQUES[technique], way == "async", directory, plain[0], to_disk=to_disk)
    found = scene.fail(fault, nth)
    scene.close()
    del scene
    check_nothing_is_held(before)
    return found


CASES = [
    *in_turns(list(TECHNIQUES), ["allocation sync", "copy async", "copy sync", "allocation async"]),
    *in_turns(TO_DISK, ["write full sync", "write async", "read async", "short read sync"]),
]


@pytest.mark.parametrize(("technique", "failure"), CASES)
def test_one_of_the_failures(technique: str, failure: str, tmp_path: pathlib.Path, plain: list[PlainRun]) -> None:
    fault, _, way = failure.rpartition(" ")
    found = outcome(technique, way, fault, SAMPLE.get(fault, 1), tmp_path, plain)
    goes_on = {"not noticed"} if fault == "allocation" else set()  # an optimizer's step does, with the plain weights
    assert found in {"before", "after", "partial"} | goes_on, "it is there, and nothing goes on without it"


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


def _every(technique: str, fault: str, way: str, directory: pathlib.Path, plain: list[PlainRun]) -> None:
    nth = 1
    while outcome(technique, way, fault, nth, directory, plain) != NOT_REACHED:
        nth += 1
