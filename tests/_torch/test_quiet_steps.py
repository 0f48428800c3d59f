"""Steps that try an optimizer out are told to no hook of the user's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import memscale
from memscale import Config
from memscale._profile.optimizer_twin import SteppedModel, optimizer_cost
from memscale._torch import private
from memscale._torch.quiet_steps import quiet_steps
from memscale.techniques.offload.optimizer.separable import check_separable
from tests.models import Mlp


class Derived(torch.optim.SGD):
    """Fires the hooks of every optimizer twice a step: its own step's, and those of the step that it calls."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def seen() -> Iterator[list[type]]:
    seen: list[type] = []
    handles = [
        register(lambda optimizer, args, kwargs: seen.append(type(optimizer)))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    yield seen
    for handle in handles:
        handle.remove()


def model_with_gradients() -> Mlp:
    model = Mlp(width=8, depth=2)
    model(torch.ones(2, 8)).square().mean().backward()
    return model


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived])
def test_a_cost_is_found_without_a_hook(kind: Callable[..., torch.optim.Optimizer], seen: list[type]) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # from now on its step fires hooks
    model = model_with_gradients()
    optimizer = kind(model.parameters(), lr=0.1)
    own: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: own.append(1))
    optimizer.register_step_post_hook(lambda *_: own.append(1))
    with_hooks = optimizer_cost(SteppedModel(model, optimizer, "cpu"))
    check_separable(optimizer)
    assert not seen
    assert not own
    optimizer.step()
    assert len(own) == len(seen)
    assert len(seen) == (4 if kind is Derived else 2)
    assert with_hooks == optimizer_cost(SteppedModel(model, kind(model.parameters(), lr=0.1), "cpu"))


@pytest.mark.parametrize("how", ["wrap", "estimate", "optimize"])
def test_planning_takes_no_step_that_a_hook_sees(how: str, seen: list[type]) -> None:
    model, x = model_with_gradients(), torch.ones(2, 8)
    config = Config(force_optimize=True, enable_logging=False)
    if how == "wrap":
        memscale.detach(memscale.wrap(model, config, x))
    elif how == "estimate":
        memscale.estimate(model, x, config=config, optimizer=Derived(model.parameters(), lr=0.1))
    else:
        with memscale.optimize(model, Derived(model.parameters(), lr=0.1), config, x):
            pass
    assert not seen


def test_other_threads_fire_their_hooks_meanwhile(seen: list[type]) -> None:
    optimizer = torch.optim.SGD(model_with_gradients().parameters(), lr=0.1)
    with quiet_steps():
        optimizer.step()
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
    assert seen == [torch.optim.SGD] * 2


def test_the_table_is_as_it_was_and_what_came_meanwhile_stays() -> None:
    calls: list[str] = []
    first = register_optimizer_step_pre_hook(lambda *_: calls.append("first"))
    second = register_optimizer_step_pre_hook(lambda *_: calls.append("second"))
    before = list(private.global_step_hooks()[0].items())
    with quiet_steps(), quiet_steps():
        first.remove()
        third = register_optimizer_step_pre_hook(lambda *_: calls.append("third"))
    after = list(private.global_step_hooks()[0].items())
    assert after[:-1] == before[:-2] + before[-1:]
    optimizer = torch.optim.SGD(model_with_gradients().parameters(), lr=0.1)
    optimizer.step()
    assert calls == ["second", "third"]
    second.remove()
    third.remove()


def test_an_error_leaves_no_quiet_behind(seen: list[type]) -> None:
    optimizer = torch.optim.SGD(model_with_gradients().parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="in between"), quiet_steps():
        raise RuntimeError("in between")
    optimizer.step()
    assert len(seen) == 2


class Compiled(torch.optim.Optimizer):
    """Compiles its step as torchao's optimizers do: in one graph, or it raises."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = torch.compile(_update, fullgraph=True, backend="eager")
                update(parameter.detach(), parameter.grad, group["lr"])


def _update(parameter: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
    parameter.sub_(gradient * lr)


def test_an_optimizer_that_compiles_its_step_trains_after_it_was_tried() -> None:
    """Compiled code that has met fake tensors is never compiled again, and raises where it must be one graph."""
    plain = Mlp(width=8, depth=2)
    model = copy.deepcopy(plain)
    optimizers = [Compiled(each.parameters()) for each in (plain, model)]
    config = Config(enable_logging=False, force_optimize=True)
    with memscale.optimize(model, optimizers[1], config, sample_input=torch.ones(2, 8)) as executor:
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(0)
            for _ in range(2):
                each(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert "taken as AdamW" not in executor.plan.explain()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    torch.compiler.reset()
