"""Nobody asked for it: failing forwards of models of plain code are run again, and nothing else is."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale._planning.recovery.repeated_step import OpenOutputs
from tests._planning.recovery.loop_programs import Body
from tests._planning.recovery.sessions import BY_DEFAULT, Session, is_same, ran
from tests.techniques.offload.runs import DEVICE

LEAST = "a failing backward is repeated only"


class Gated(Body):
    """No output tells what `hidden` is: the gate is zero, as the second factor of LoRA is at first."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.gate = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.gate * self.hidden(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def written_without_a_trace(session: Session) -> Any:
    """A loop that halves a weight between the forward and its backward."""
    model = session.wrap(Gated())
    losses = []
    for step in range(4):
        loss = session.forward(step, model, session.x(step))
        model.hidden.weight.data.mul_(0.5)
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


def stepped(session: Session) -> Any:
    model = session.wrap(Gated())
    return session.train(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


@pytest.mark.parametrize("number", [1, 5, 9, 14])
def test_a_failing_forward_is_run_again(number: int, simgpu_device: Any) -> None:
    expected, weights, _, _ = ran(stepped, None, 0)
    found, weights_now, said, session = ran(stepped, "forward", number, BY_DEFAULT)
    assert said is None
    assert session.fired
    assert is_same(found, expected)
    assert is_same(weights_now, weights)


def test_a_failing_backward_is_refused_where_a_weight_may_have_been_written_to(simgpu_device: Any) -> None:
    """Nothing tells of it but the weight itself: where repetition is asked for, that is silently another training."""
    _, _, said, session = ran(written_without_a_trace, "backward", 5, BY_DEFAULT)
    assert session.fired
    assert said is not None
    assert LEAST in said
    assert "is not run again after this failure in backward: " in said
    assert "the plan promises" in said


def test_after_a_failing_backward_the_loop_goes_on_under_a_tighter_plan(
    simgpu_device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(fails=False)
    with caplog.at_level(logging.WARNING, "memscale"):
        found = trained(fails=True)
    assert "after a step that ran out of memory and was not run again, the plan was tightened" in caplog.text
    assert is_same(found, expected)


def trained(*, fails: bool) -> list[torch.Tensor]:
    """Two steps; a loop that does the batch again by itself after an error."""
    torch.manual_seed(1)
    model = Gated().to(DEVICE)
    x = torch.randn(256, 16).to(DEVICE)
    config = BY_DEFAULT.replace(mode="balanced")
    executor: Any = memscale.executor_of(memscale.wrap(model, config, x)) if fails else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss = model(x)
        if fails and step == 0:
            with pytest.raises(torch.OutOfMemoryError, match=LEAST), simgpu.fail_allocation(3):
                loss.backward()
            optimizer.zero_grad()
            del loss
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    if executor is not None:
        executor.detach()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_nothing_of_a_step_is_kept_until_its_backward(simgpu_device: Any) -> None:
    """Its batch, its outputs and their gradients: what no plan counts is not held where no backward is repeated."""
    model = Gated().to(DEVICE)
    memscale.wrap(model, BY_DEFAULT, torch.randn(8, 16).to(DEVICE))
    batch = torch.randn(8, 16).to(DEVICE)
    loss = model(batch)
    held = [other for other in gc.get_referrers(batch) if type(other).__module__.startswith("memscale")]
    assert not held
    assert not loss._backward_hooks
    memscale.detach(model)


def test_outputs_are_open_until_their_gradient_comes_or_their_graph_is_gone() -> None:
    opened, weight = OpenOutputs(), torch.ones(3, requires_grad=True)
    first, second = weight * 2, weight * 3
    opened.add([first, "text"])
    opened.add([second])
    assert opened
    second.sum().backward()
    assert opened, "the first one waits still"
    total = first.sum()
    del first
    assert opened, "its graph lives in the sum"
    del total
    assert not opened


def test_a_forward_that_shares_casts_with_one_that_still_waits_is_refused(simgpu_device: Any) -> None:
    """The backward of a forward in between does not end the waiting of the first one."""
    model = Gated().to(DEVICE)
    xs = [torch.randn(8, 16).to(DEVICE) for _ in range(3)]
    memscale.wrap(model, BY_DEFAULT, xs[0])
    model(xs[0]).backward()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        first = model(xs[0])
        model(xs[1]).backward()
        with pytest.raises(torch.OutOfMemoryError, match="may share casts"), simgpu.fail_allocation(5):
            model(xs[2])
    first.backward()
    memscale.detach(model)
