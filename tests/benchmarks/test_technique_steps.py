"""The pictures of techniques: what is drawn is what was measured, and each technique lowers its peak."""

from __future__ import annotations

import json

import pytest

from benchmarks import technique_steps
from tests.lanes import full

pytestmark = pytest.mark.unit


def test_the_highest_moment_is_kept() -> None:
    samples = [{"parameters": 1, "activations": number} for number in (*range(500), *range(499, 0, -1))]
    kept = technique_steps.thinned(samples, 10)
    assert len(kept) == 10
    assert max(sample["activations"] for sample in kept) == 499
    assert technique_steps.thinned(samples[:3], 10) == samples[:3]


@pytest.mark.parametrize("name", technique_steps.WAYS)
def test_kept_data_is_of_the_same_training_in_fewer_bytes(name: str) -> None:
    data = json.loads(technique_steps.DATA.read_text())[name]
    assert data["shape"] == str(technique_steps.WAYS[name][1])
    assert data["wrapped"]["loss"] == data["plain"]["loss"]
    assert data["wrapped"]["peak_bytes"] < 0.8 * data["plain"]["peak_bytes"]
    for side in ("plain", "wrapped"):
        drawn = max(sum(sample.values()) for sample in data[side]["timeline"])
        assert drawn == pytest.approx(data[side]["peak_bytes"], rel=0.01), "beside the batch, all of it is drawn"


@full
def test_a_step_is_measured_anew() -> None:
    _, shape, options = technique_steps.WAYS["checkpointing"]
    kept = json.loads(technique_steps.DATA.read_text())["checkpointing"]["wrapped"]
    assert technique_steps.measure(shape, options)["peak_bytes"] == kept["peak_bytes"]
