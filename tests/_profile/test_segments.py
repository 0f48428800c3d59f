"""Segments cover a step, tell layers apart, and count what touches memory."""

from __future__ import annotations

import torch
from torch import nn

from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import FakeRehearsal
from tests.models import case


def test_segments_cover_the_step() -> None:
    model = case("gpt2").build()
    rehearsal = FakeRehearsal(model, Inputs.from_sample(case("gpt2").batch(0)), "cpu")
    trace = rehearsal.run()
    for fqn in find_blocks(model):
        phases = [s.phase for s in trace.segments if s.module_fqn == fqn]
        assert phases == ["forward", "backward"]
    unique = {id(p): p for p in model.parameters()}.values()
    assert trace.end_bytes == sum(p.nbytes for p in unique), "what a step leaves behind is the gradients"
    assert trace.peak_bytes >= trace.end_bytes
    assert all(s.peak_bytes >= max(0, s.net_bytes) for s in trace.segments)
    assert rehearsal.num_calls["transformer.h.0"] == 1


def test_a_layer_called_many_times_is_counted_as_often() -> None:
    rehearsal = FakeRehearsal(case("albert").build(), Inputs.from_sample(case("albert").batch(0)), "cpu")
    rehearsal.run()
    assert 6 in rehearsal.num_calls.values()


class Curious(nn.Module):
    """Asks tensors where they are."""

    def __init__(self, num_questions: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.num_questions = num_questions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_questions):
            assert x.device.type == "cpu"
        return torch.relu(self.inner(x))


def test_only_operators_that_touch_memory_are_traffic() -> None:
    inputs = Inputs(args=(torch.empty(4, 8, device="meta"),))
    silent, curious = (FakeRehearsal(Curious(number), inputs, "cpu").run() for number in (0, 50))
    assert curious.segments == silent.segments
    in_forward = sum(segment.other_bytes for segment in silent.segments if segment.phase == "forward")
    relu, square, mean = 2 * 128, 2 * 128, 128 + 4
    assert relu + square + mean <= in_forward <= relu + square + mean + 64
