"""Steps inside of an autocast block that stays open: the bits of plain PyTorch, or a sentence."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale import MemScaleError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, StreamParameters
from memscale.techniques.offload.optimizer.on_device import StepOnDevice

SIZE = 8
PLANS: dict[str, list[Action]] = {
    "checkpoint": [Checkpoint("0"), Checkpoint("1")],
    "selective": [Checkpoint("0", keep=("matmul", "attention"))],
    "stream": [StepOnDevice(600), StreamParameters("0"), StreamParameters("1")],
}
Loop = Callable[[nn.Module, torch.optim.Optimizer, str], None]


def pair(device: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)) for _ in range(2)]
    plain = nn.Sequential(*blocks, nn.Linear(SIZE, 2)).to(device)
    return plain, copy.deepcopy(plain)


def autocast(device: str, *, remembers: bool = True) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, cache_enabled=remembers)


def loss_of(model: nn.Module, device: str, number: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(number)
    return model(torch.randn(4, SIZE, generator=draws).to(device)).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, number: int, *, batches: int = 1) -> None:
    optimizer.zero_grad()
    for batch in range(batches):
        loss_of(model, device, 10 * number + batch).backward()
    optimizer.step()


def one_block(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    with autocast(device):
        for number in range(3):
            step(model, optimizer, device, number)


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    with autocast(device):
        step(model, optimizer, device, 0)
        with torch.no_grad():
            loss_of(model, device, 1)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    with autocast(device):
        for number in range(2):
            loss_of(model, device, number).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad


def a_block_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    for number in range(3):
        with autocast(device):
            step(model, optimizer, device, number, batches=2)


def forgotten(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    with autocast(device):
        for number in range(3):
            step(model, optimizer, device, number)
            torch.clear_autocast_cache()


def not_remembered(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    with autocast(device, remembers=False):
        for number in range(3):
            step(model, optimizer, device, number)


def trained(model: nn.Module, loop: Loop, device: str) -> list[torch.Tensor]:
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-1), device)
    found = [value for parameter in model.parameters() for value in (parameter.detach(), parameter.grad)]
    return [value.to("cpu", copy=True) for value in found]


@contextlib.contextmanager
def treated(model: nn.Module, plan: str, device: str):
    executor = Executor(model, ExecutionSettings(torch.device(device), asynchronous=False))
    executor.attach(PLANS[plan])
    try:
        yield
    finally:
        executor.detach()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", [one_block, evaluated, by_hand])
def test_parameters_that_change_in_an_open_block_are_refused(loop: Loop, plan: str) -> None:
    """Plain training goes on with casts of the old ones; this one would not have."""
    _, model = pair("simgpu")
    warnings.filterwarnings("ignore", "no optimizer of this Sequential was ever seen to step")  # where it is by hand
    with treated(model, plan, "simgpu"), pytest.raises(MemScaleError, match="autocast block that is still open"):
        trained(model, loop, "simgpu")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", [a_block_a_step, forgotten, not_remembered])
def test_where_nothing_is_remembered_over_a_step_training_is_the_same(loop: Loop, plan: str) -> None:
    plain, model = pair("simgpu")
    theirs = trained(plain, loop, "simgpu")
    with treated(model, plan, "simgpu"):
        assert all(map(torch.equal, trained(model, loop, "simgpu"), theirs))


def test_on_a_cpu_the_open_block_is_as_in_plain_training() -> None:
    plain, model = pair("cpu")
    theirs = trained(plain, one_block, "cpu")
    with treated(model, "checkpoint", "cpu"):
        assert all(map(torch.equal, trained(model, one_block, "cpu"), theirs))


def test_the_next_block_is_trained_after_one_that_was_refused() -> None:
    plain, model = pair("simgpu")
    with treated(model, "checkpoint", "simgpu"):
        state = copy.deepcopy(model.state_dict())
        with pytest.raises(MemScaleError, match="still open"):
            trained(model, one_block, "simgpu")
        model.load_state_dict(state)
        model.zero_grad()
        theirs = trained(plain, a_block_a_step, "simgpu")
        assert all(map(torch.equal, trained(model, a_block_a_step, "simgpu"), theirs))
