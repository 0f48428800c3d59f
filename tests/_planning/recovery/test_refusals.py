"""State that a repetition of a step would see twice, or not at all: it is put back, or the step is refused."""

from __future__ import annotations

import argparse
import queue
import threading
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale._execute.executor import executor_of
from tests._planning.recovery.test_oom_recovery import CONFIG, SHAPE, WithLoss
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE, tokens


class Habits(WithLoss):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.options = argparse.Namespace(calls=0)
        self.other = nn.Linear(32, 32)
        if habit == "hidden":
            self.teacher = [nn.Linear(32, 32).to(DEVICE)]
        if habit == "queue":
            self.queue: Any = queue.Queue()
        if habit == "lock":
            self.lock = threading.Lock()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, found: Any = None) -> Any:
        self.options.calls += 1
        if self.habit == "hidden":
            with torch.no_grad():
                self.teacher[0].weight.mul_(0.5)
        if self.habit == "queue":
            self.queue.put(1)
        if found is not None:
            found.append(self.embed(ids).mean())
        loss, _ = super().forward(ids, labels)
        return loss * self.options.calls, self.other(torch.ones(2, 32, device=DEVICE))


def trained(habit: str) -> Any:
    seed(1)
    model = Habits(habit).to(DEVICE)
    memscale.wrap(model, CONFIG.replace(mode="conservative"))
    for step in range(3):
        call(model, step)[0].backward()
    model.zero_grad()
    return model


def call(model: nn.Module, step: int, **more: Any) -> Any:
    ids = tokens(step, SHAPE)
    return model(ids, ids.roll(1, 1), **more)


def test_what_an_argparse_namespace_holds_is_put_back(simgpu_device: Any) -> None:
    model = trained("")
    with simgpu.fail_allocation(15) as fault:
        call(model, 3)
    assert fault.fired
    assert model.options.calls == 4
    executor_of(model).detach()


@pytest.mark.parametrize("habit", ["hidden", "queue"])
def test_what_nobody_has_noted_is_a_refusal(habit: str, simgpu_device: Any) -> None:
    model = trained(habit)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"cannot be compared|calls queue\.put"),
        simgpu.fail_allocation(15),
    ):
        call(model, 3)
    executor_of(model).detach()


def test_a_list_that_the_forward_was_given_holds_what_one_forward_put_there(simgpu_device: Any) -> None:
    model = trained("")
    call(model, 3, found=[])[0].backward()
    found: list[Any] = []
    with simgpu.fail_allocation(3) as fault:
        call(model, 4, found=found)
    assert fault.fired
    assert len(found) == 1
    with pytest.raises(torch.OutOfMemoryError, match="a list or a dictionary"), simgpu.fail_allocation(15):
        call(model, 5, found=[])
    executor_of(model).detach()


def test_an_output_for_another_loss_keeps_its_graph(simgpu_device: Any) -> None:
    model = trained("")
    loss, other = call(model, 3)
    with pytest.raises(torch.OutOfMemoryError, match="this loss does not use"), simgpu.fail_allocation(15):
        loss.backward()
    assert other.requires_grad
    del loss, other
    executor_of(model).detach()


def test_a_model_that_cannot_be_profiled_again_runs_out_of_memory(simgpu_device: Any) -> None:
    model = trained("lock")
    loss = call(model, 3)[0]
    with pytest.raises(torch.OutOfMemoryError, match="could be made"), simgpu.fail_allocation(15):
        loss.backward()
    executor_of(model).detach()
