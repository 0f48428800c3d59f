"""Loops that examples leave out, under plans: bit for bit what a plain model does, and no race."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import simgpu
from memscale import OffloadError
from tests.lanes import in_turns
from tests.techniques.offload.runs import loss_of
from tests.techniques.offload.tiers import same
from tests.training.nth_failure import TECHNIQUES
from tests.training.odd_loops import LOOPS, Side, plain, treated

PLANS = (
    *("everything, step on the device", "guests and half of the optimizer", "kept outputs", "optimizer"),
    *("checkpoint and activations", "buckets", "stream", "guests and early state"),
    "early and late state",
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


@pytest.mark.parametrize("loop", ["parameters that share memory", "memory shared after some steps"])
@pytest.mark.parametrize("technique", ["optimizer", "buckets", "everything, step on the device"])
def test_parameters_that_share_memory_are_stepped_in_turns(technique: str, loop: str, tmp_path: pathlib.Path) -> None:
    run = LOOPS[loop]
    ways = {"asynchronous": True, "early": False, "directory": tmp_path}
    for found in treated(run, TECHNIQUES[technique], **ways):
        assert same(found, plain(run))


def functional_gradients(side: Side) -> None:
    """`torch.func.grad` over the model, and then a usual loop."""

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        return loss_of(lambda ids: torch.func.functional_call(side.model, parameters, (ids,)))

    found = torch.func.grad(loss)({name: value.detach() for name, value in side.model.named_parameters()})
    side.note(found)
    side.train()


@pytest.mark.parametrize("technique", ["activations", "kept outputs", "checkpoint and activations"])
def test_transforms_of_torch_func_take_the_plain_path(technique: str, tmp_path: pathlib.Path) -> None:
    expected = plain(functional_gradients)
    ways = {"asynchronous": True, "early": False, "directory": tmp_path}
    for found in treated(functional_gradients, TECHNIQUES[technique], **ways):
        assert same(found, expected)


def test_transforms_of_torch_func_over_streamed_parameters_are_refused(tmp_path: pathlib.Path) -> None:
    ways = {"asynchronous": True, "early": False, "directory": tmp_path}
    with pytest.raises(OffloadError, match=r"cannot run over a model whose parameters are streamed: .*detach"):
        list(treated(functional_gradients, TECHNIQUES["stream"], **ways))
