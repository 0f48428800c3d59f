"""Fused steps change parameters without new versions; whoever asks is told of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from memscale._execute.executor import Executor
from memscale._plan import Checkpoint
from memscale._torch.unversioned_steps import STEPS, UnversionedSteps

pytestmark = pytest.mark.unit


def stepped(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_it_tells_fused_steps_from_those_that_autograd_knows_of() -> None:
    model, steps = nn.Linear(2, 2), UnversionedSteps()
    undo = steps.watch()
    stepped(model, foreach=False)
    assert steps.count == 0
    before = model.weight._version
    model.bias.grad, others = None, nn.Linear(2, 2)
    stepped(model, fused=True)
    assert model.weight._version == before
    assert steps.count == 1
    assert steps.has_stepped(model.weight, since=0)
    assert not steps.has_stepped(model.weight, since=1)
    assert not steps.has_stepped(others.weight, since=0)
    undo()
    stepped(model, fused=True)
    assert steps.count == 1


def test_a_step_that_fails_keeps_no_parameter() -> None:
    model, steps = nn.Linear(2, 2), UnversionedSteps()
    undo = steps.watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails() -> torch.Tensor:
        raise KeyError("of the loss")

    with pytest.raises(KeyError, match="of the loss"):
        optimizer.step(fails)
    reference = weakref.ref(model.weight)
    optimizer.param_groups.clear()
    del model
    gc.collect()
    assert reference() is None
    undo()


def clamp(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.clamp_(-1, 1)


@pytest.mark.parametrize("how", ["groups", "hook", "closure"])
def test_fused_steps_are_told_beside_parameters_that_change_in_the_ordinary_way(how: str) -> None:
    first, second, steps = nn.Linear(2, 2), nn.Linear(2, 2), UnversionedSteps()
    undo = steps.watch()
    groups = [{"params": list(first.parameters()), "fused": how != "groups"}, {"params": list(second.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
    if how == "hook":
        optimizer.register_step_pre_hook(lambda *_: clamp(first.weight))

    def gradients() -> torch.Tensor:
        loss = second(first(torch.ones(1, 2))).sum()
        loss.backward()
        return loss

    if how == "closure":
        optimizer.step(gradients)
    else:
        gradients()
        optimizer.step()
    assert steps.has_stepped(second.weight, since=0)
    assert steps.has_stepped(first.bias, since=0) == (how != "groups")
    undo()


def test_a_fused_step_between_a_forward_and_its_backward_is_refused() -> None:
    """Plain PyTorch does not notice it either; a recompute would use the new weights for everything."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), nn.Linear(2, 2))
    executor = Executor(model)
    executor.attach([Checkpoint("0")])
    optimizer = stepped(model, fused=True)
    loss = model(torch.ones(1, 2)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    executor.detach()
    gc.collect()  # models of other tests, that nobody has detached
    assert STEPS._leave is None, "nobody watches any more"
