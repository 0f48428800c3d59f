"""Profiles of sizes that were not profiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memscale import Config
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.questions.profile_scaling import at_size, can_scale
from memscale._profile import CHECKPOINT, OFFLOAD, STREAM, Profile, TraceKey
from memscale._profile.inputs import Inputs
from tests.profiles import Block, full_profile, hardware_of, profile_of, with_tiled_head

pytestmark = pytest.mark.unit
HARDWARE = hardware_of()


def encoder() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(2)))


def profile_at(model: nn.Module, batch: int) -> Profile:
    inputs = Inputs((torch.zeros(batch, 32, 64, device="meta"),))
    planner = Planner(Job(model, Config(), HARDWARE), inputs)
    planner.look_into_everything(planner.job.eligible.under(Config()))
    return planner.profile


@pytest.mark.slow
def test_drawn_profiles_are_those_of_their_size() -> None:
    """Between and beyond: to the allocator's rounding."""
    model = encoder()
    small, large = profile_at(model, 4), profile_at(model, 8)
    for batch in (6, 24):
        drawn, true = at_size(small, large, (4, 8), batch), profile_at(model, batch)
        assert drawn.variants.keys() == true.variants.keys()
        assert drawn.inputs == true.inputs
        for treatment in (CHECKPOINT, OFFLOAD, STREAM):
            choice = Choice(
                tuple((name, treatment) for name in map(str, range(2))), RunOptions(offloads_optimizer=True)
            )
            ours, theirs = (CostModel(profile, HARDWARE).evaluate(choice) for profile in (drawn, true))
            assert abs(ours.peak_bytes / theirs.peak_bytes - 1) < 0.01
            assert abs(ours.step_ms / theirs.step_ms - 1) < 0.02


def test_tiles_go_by_rank() -> None:
    blocks = {"b": Block()}
    small = with_tiled_head(full_profile(blocks), blocks, {128: 100, 256: 150})
    large = with_tiled_head(full_profile(blocks), blocks, {128: 200, 512: 400})
    drawn = at_size(small, large, (1, 2), 3)
    assert set(drawn.variants) == set(large.variants)
    largest = drawn.variants[TraceKey(head_rows=512)]
    assert max(segment.peak_bytes for segment in largest.segments) == 780 * 10**6


def test_other_pieces_cannot_be_scaled() -> None:
    assert can_scale(profile_of(4), profile_of(4))
    assert not can_scale(profile_of(4), profile_of(5))
    assert not can_scale(profile_of(4), dataclasses.replace(profile_of(4), inputs=()))
