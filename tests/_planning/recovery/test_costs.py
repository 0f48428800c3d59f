"""What an ordinary step does so that a failing one can be run again: nothing that grows with what the user keeps.

And where that is too little to be sure, a failing step is refused with the numbers.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale._planning.recovery import steps_beside
from memscale._torch import snapshots
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE, Gpt, tokens

CONFIG = memscale.Config(enable_logging=False, recover_from_oom=True, mode="conservative")
SHAPE = (2, 16)
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


class Keeping(Gpt):
    """Keeps Python objects, and returns a loss."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.kept: Any = None
        self.appends = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.appends:
            self.kept.extend([0] * self.appends)
        return super().forward(ids).square().mean()


def wrapped(kept: Any = None, appends: int = 0) -> tuple[Keeping, torch.Tensor]:
    seed(1)
    model = Keeping().to(DEVICE)
    model.kept, model.appends = kept, appends
    ids = tokens(0, SHAPE)
    memscale.wrap(model, CONFIG, ids)
    return model, ids


def refusal(model: nn.Module, ids: torch.Tensor) -> str:
    before = {name: value.cpu() for name, value in model.named_parameters()}
    with pytest.raises(torch.OutOfMemoryError) as caught, simgpu.fail_allocation(5):
        model(ids)
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.named_parameters())
    return str(caught.value)


def test_models_that_may_keep_something_are_repeated_only_where_that_is_asked_for(simgpu_device: Any) -> None:
    """State can hide where nobody looks, and a training must not change in silence."""
    assert memscale.Config().recover_from_oom == "forward"
    seed(1)
    model, ids = Keeping().to(DEVICE), tokens(0, SHAPE)
    model.kept = []
    config = memscale.Config(enable_logging=False, mode="conservative")
    memscale.wrap(model, config, ids)
    assert "only models of plain code are run again, and Keeping.kept is an object of list" in refusal(model, ids)
    memscale.detach(model)


def test_a_step_that_is_recorded_into_a_graph_is_left_alone(
    simgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may read random states then."""
    model, ids = wrapped()
    module = torch.get_device_module(DEVICE)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("random states are not read while a graph is recorded")

    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
    monkeypatch.setattr(module, "get_rng_state", refuse)
    model(ids).backward()
    monkeypatch.undo()
    memscale.detach(model)


def test_a_large_list_is_not_copied_in_a_step(simgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = wrapped(list(range(150_000)))
    for _ in range(3):
        model(ids).backward()
    copied: list[int] = []
    taken = steps_beside._State.__init__

    def count(self: Any, entry: Any) -> None:
        taken(self, entry)
        copied.append(self.num_elements)

    monkeypatch.setattr(steps_beside._State, "__init__", count)
    monkeypatch.setattr(snapshots.copy, "copy", lambda value: copied.append(len(value)) or value)
    for _ in range(4):  # the fourth forward of all is one in which it is looked again
        model(ids).backward()
    assert sum(copied) < 1_000
    monkeypatch.undo()
    said = refusal(model, ids)
    assert "a container of more than 100,000 elements" in said
    assert "the plan promises" in said
    memscale.detach(model)


@pytest.mark.parametrize("kept", [numpy.zeros(1 << 15), [[0] for _ in range(2_000)]], ids=["array", "lists"])
def test_what_is_not_compared_is_refused(kept: Any, simgpu_device: Any) -> None:
    model, ids = wrapped(kept)
    model(ids).backward()
    assert "cannot be compared" in refusal(model, ids)
    memscale.detach(model)


def test_a_list_that_does_not_change_is_compared_and_the_step_is_run_again(simgpu_device: Any) -> None:
    model, ids = wrapped([*range(5_000), "text", None])
    torch.manual_seed(3)
    expected = model(ids).detach().cpu()
    torch.manual_seed(3)
    with simgpu.fail_allocation(5) as fault:
        loss = model(ids)
    assert fault.fired
    assert torch.equal(loss.detach().cpu(), expected)
    model.kept[7] = True  # as large as the 7 that was there is not the same
    assert "had not changed before" in refusal(model, ids)
    del loss
    memscale.detach(model)


def test_a_list_that_grows_is_noted_until_it_is_large(simgpu_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = wrapped([], appends=400)
    with caplog.at_level(logging.INFO, "memscale"):
        for _ in range(3):
            model(ids).backward()
        num_before = len(model.kept)
        with simgpu.fail_allocation(5) as fault:
            model(ids).backward()
        assert fault.fired
        assert len(model.kept) == num_before + 400, "once, though the forward ran twice"
        assert "will not be run again" not in caplog.text
        for _ in range(5):
            model(ids).backward()
    assert "will not be run again" in caplog.text
    assert "elements" in refusal(model, ids)
    loss = model(ids)
    with (
        pytest.raises(torch.OutOfMemoryError, match="failure in backward: its forward changes"),
        simgpu.fail_allocation(2),
    ):
        loss.backward()
    del loss
    memscale.detach(model)


def test_it_can_be_turned_off(simgpu_device: Any) -> None:
    seed(1)
    model, ids = Keeping().to(DEVICE), tokens(0, SHAPE)
    memscale.wrap(model, CONFIG.replace(recover_from_oom=False), ids)
    assert "not run again" not in refusal(model, ids)
    memscale.detach(model)
