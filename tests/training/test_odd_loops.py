"""Loops that examples leave out, under plans: bit for bit what a plain model does, and no race."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import simgpu
from tests.lanes import in_turns
from tests.techniques.offload.tiers import same
from tests.training.nth_failure import TECHNIQUES
from tests.training.odd_loops import LOOPS, plain, treated

PLANS = (
    *("everything, step on the device", "guests and half of the optimizer", "kept outputs", "optimizer"),
    *("checkpoint and activations", "buckets", "stream"),
)
"""Of the plans of the n-th failure. A step in backward leaves no gradients to compare, and has tests of its own."""


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: None) -> None:
    pass


@pytest.mark.parametrize(("loop", "technique"), in_turns(list(LOOPS), PLANS))
def test_it_trains_the_same(loop: str, technique: str, tmp_path: pathlib.Path) -> None:
    turn = list(LOOPS).index(loop) + PLANS.index(technique)
    ways = {"asynchronous": turn % 2 == 0, "early": turn % 4 < 2}
    expected = plain(LOOPS[loop])
    for found in treated(LOOPS[loop], TECHNIQUES[technique], **ways, directory=tmp_path):
        assert same(found, expected), ways
    assert simgpu.take_reports() == []
