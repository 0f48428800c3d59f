"""After a step that was not run again the next one is planned for less; backward passes that draw are not repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale._execute.executor import executor_of
from tests._planning.recovery.test_oom_recovery import CONFIG, SHAPE, WithLoss, build
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE, tokens

pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


class Printing(WithLoss):
    """Calls what is on no list of harmless functions."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        print(end="")
        return super().forward(ids, labels)


def call(model: nn.Module, step: int) -> torch.Tensor:
    ids = tokens(step, SHAPE)
    torch.manual_seed(step)
    return model(ids, ids.roll(1, 1))[0]  # type: ignore[no-any-return]


def wrapped(model: nn.Module) -> Any:
    memscale.wrap(model, CONFIG.replace(mode="conservative"), (tokens(0, SHAPE), tokens(0, SHAPE)))
    return executor_of(model)


def test_the_step_after_a_refusal_is_planned_for_less(simgpu_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    executor = wrapped(model)
    call(model, 0).backward()
    loss = call(model, 1)
    before = executor.plan
    with pytest.raises(torch.OutOfMemoryError, match="its graph is kept"), simgpu.fail_allocation(20):
        loss.backward(retain_graph=True)
    del loss
    assert executor.plan is before, "nothing is attached while the loop handles the error"
    loss = call(model, 2)
    assert executor.plan.predicted_peak_bytes < before.predicted_peak_bytes
    assert "not run again, the plan was tightened from" in caplog.text
    loss.backward()
    del loss
    executor.detach()


def test_a_tighter_plan_that_was_made_already_is_kept_after_a_refusal(simgpu_device: Any) -> None:
    seed(1)
    model = Printing().to(DEVICE)
    executor = wrapped(model)
    call(model, 0).backward()
    before = executor.plan
    with pytest.raises(torch.OutOfMemoryError, match="calls print"), simgpu.fail_allocation(15):
        call(model, 1)
    tighter = executor.plan
    assert tighter.predicted_peak_bytes < before.predicted_peak_bytes
    call(model, 2).backward()
    assert executor.plan is tighter
    executor.detach()


@pytest.mark.parametrize("place", ["head", "embed"])
def test_a_backward_that_draws_random_numbers_is_not_repeated(place: str, simgpu_device: Any) -> None:
    """The head's gradient has come when the pass fails, and its hook has drawn; the embedding's has not."""
    model = build()
    executor = wrapped(model)
    weight = model.get_submodule(place).weight
    hook = weight.register_hook(lambda gradient: gradient + torch.rand(()).item())
    call(model, 0).backward()
    loss = call(model, 1)
    with pytest.raises(torch.OutOfMemoryError, match="draws random numbers"), simgpu.fail_allocation(20):
        loss.backward()
    del loss
    hook.remove()
    executor.detach()
