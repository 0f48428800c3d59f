"""Runs that are killed go on, and end where a run that nobody killed ends."""

from __future__ import annotations

import pathlib

import pytest
import torch

from benchmarks import crashes
from tests.lanes import full


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_where_it_should(tmp_path: pathlib.Path) -> None:
    places = crashes.survive(tmp_path, "cpu", kills=3, seed=2, steps=5, cold_share=0)
    assert [place.split(":")[0] for place in places] == ["start", "training", "training"]


@full
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_fifty_kills(device: str, tmp_path: pathlib.Path) -> None:
    assert len(crashes.survive(tmp_path, device, crashes.KILLS, seed=1)) > crashes.KILLS * 3 // 4


def test_a_difference_of_one_bit_is_seen() -> None:
    saved = {"model": {"weight": torch.ones(2)}, "groups": [{"lr": 0.1}], "step": 3}
    other = {"model": {"weight": torch.ones(2) + 1e-7}, "groups": [{"lr": 0.1}], "step": 3}
    assert crashes.differences(saved, saved) == []
    assert crashes.differences(saved, other) == ["checkpoint.model.weight"]
    assert crashes.differences(saved, {**saved, "groups": [{"lr": 0.2}]}) == ["checkpoint.groups.0.lr"]


def test_files_that_are_left_are_seen(tmp_path: pathlib.Path) -> None:
    crashes._refuse_left_files(tmp_path, after_start=True)
    (tmp_path / "empty").touch()
    crashes._refuse_left_files(tmp_path, after_start=False)
    with pytest.raises(RuntimeError, match="files are left: empty"):
        crashes._refuse_left_files(tmp_path, after_start=True)
