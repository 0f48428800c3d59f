"""A step of an optimizer that runs out of memory goes on, exactly; it is never left half-way in silence."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale.techniques.offload.optimizer.resumed_steps import watch_plain_steps
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE

pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "Adam, amsgrad, one by one": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=False),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop, centered": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
}


def build() -> nn.Module:
    seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(DEVICE)


def fill_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(DEVICE)


def all_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for p in model.parameters() for value in optimizer.state.get(p, {}).values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [value.detach().cpu() for value in [*model.parameters(), *gradients, *state] if value is not None]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whichever_allocation_of_a_step_fails_it_is_completed(name: str, simgpu_device: Any) -> None:
    model, plain = build(), build()
    optimizer, reference = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    with contextlib.ExitStack() as undo:
        watch_plain_steps(model, undo)
        nth, num_fired, num_passed = 1, 0, 0
        while num_passed < 2:
            fill_gradients(model, nth)
            fill_gradients(plain, nth)
            with simgpu.fail_allocation(nth) as fault:
                optimizer.step()
            reference.step()
            assert equal(all_values(model, optimizer), all_values(plain, reference))
            num_fired += fault.fired
            num_passed += not fault.fired
            nth += 1
        assert num_fired >= 3
    assert not optimizer._optimizer_step_pre_hooks


def test_state_that_a_later_step_makes_is_tried_again(simgpu_device: Any) -> None:
    """Some parameters get their first gradient in the second step."""
    model, plain = build(), build()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    with contextlib.ExitStack() as undo:
        watch_plain_steps(model, undo)
        for step in range(2):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                fill_gradients(each, step)
                if not step:
                    each[2].zero_grad()
                with simgpu.fail_allocation(1 if each is model else 1 << 30) as fault:
                    optimizer.step()
                assert fault.fired == (each is model)
        assert equal(all_values(model, optimizers[0]), all_values(plain, optimizers[1]))


def test_gradients_wait_on_the_host_where_there_is_no_room(cap: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = build(), build()
    optimizer, reference = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    with contextlib.ExitStack() as undo:
        watch_plain_steps(model, undo)
        for step in range(2):
            fill_gradients(model, step)
            fill_gradients(plain, step)
            reference.step()
            if step:
                torch.accelerator.empty_cache()
                cap(torch.accelerator.memory_allocated() + 4096)
            optimizer.step()
            assert ("of gradients wait in host memory, and the step goes on" in caplog.text) == bool(step)
            cap(1 << 30)
            assert equal(all_values(model, optimizer), all_values(plain, reference))


def test_a_first_step_for_which_there_is_no_room_changes_nothing(cap: Any) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    fill_gradients(model, 0)
    before = all_values(model, optimizer)
    with contextlib.ExitStack() as undo:
        watch_plain_steps(model, undo)
        others = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        torch.accelerator.empty_cache()
        cap(torch.accelerator.memory_allocated() + 512)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        cap(1 << 30)
        assert not optimizer.state
        assert equal(all_values(model, optimizer), before)
        del others
        optimizer.step()
    plain = build()
    reference = torch.optim.AdamW(plain.parameters())
    fill_gradients(plain, 0)
    reference.step()
    assert equal(all_values(model, optimizer), all_values(plain, reference))


def double(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(2)


def trained(*, is_watched: bool) -> tuple[list[float], list[torch.Tensor], list[float]]:
    model, seen = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with contextlib.ExitStack() as undo:
        if is_watched:
            watch_plain_steps(model, undo)
        optimizer.register_step_post_hook(lambda *_: seen.append(1.0))
        for step in range(3):
            fill_gradients(model, step)
            if step == 1:
                optimizer.register_step_pre_hook(double)
            seen.append(float(optimizer.step(lambda: torch.tensor(3.0))))
            schedule.step()
    return seen, all_values(model, optimizer), schedule.get_last_lr()


def test_hooks_closures_and_schedules_see_an_ordinary_step(simgpu_device: Any) -> None:
    plain, watched = trained(is_watched=False), trained(is_watched=True)
    assert plain[0] == watched[0]
    assert equal(plain[1], watched[1])
    assert plain[2] == watched[2]


def test_a_wrapped_model_steps_so_by_default(simgpu_device: Any) -> None:
    model = build()
    plain = copy.deepcopy(model)
    batch = torch.ones(4, 64, device=DEVICE)
    memscale.wrap(model, memscale.Config(enable_logging=False, recover_from_oom=True), batch)
    optimizer, reference = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            each(batch).square().sum().backward()
        with simgpu.fail_allocation(1 + step) as fault:
            optimizer.step()
        assert fault.fired
        reference.step()
    assert equal(all_values(model, optimizer), all_values(plain, reference))
    memscale.detach(model)


def test_hooks_run_once_where_somebody_has_put_more_around_the_step_of_the_class(
    simgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # PyTorch puts its own wrapper around the step
    inner = torch.optim.SGD.step

    @functools.wraps(inner)
    def outer(self: torch.optim.SGD, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", outer)
    plain, watched = trained(is_watched=False), trained(is_watched=True)
    assert plain[0] == watched[0]
    assert equal(plain[1], watched[1])


def test_options_that_cannot_be_copied_are_left_alone(simgpu_device: Any) -> None:
    model = build()
    optimizer = torch.optim.AdamW([{"params": [*model.parameters()], "lock": threading.Lock()}])
    with contextlib.ExitStack() as undo:
        watch_plain_steps(model, undo)
        fill_gradients(model, 0)
        optimizer.step()
    plain = build()
    reference = torch.optim.AdamW(plain.parameters())
    fill_gradients(plain, 0)
    reference.step()
    assert equal(all_values(model, optimizer), all_values(plain, reference))
