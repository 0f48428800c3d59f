"""A fused step under a `GradScaler` divides gradients by the scale in its kernel: so are those that were elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import StreamParameters
from memscale.techniques.offload.optimizer.on_device import StepOnDevice

SIZE, NUM_LAYERS = 8, 3
DEVICE = torch.device("simgpu", 0)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS))).to(DEVICE)


def trained(model: nn.Module, *, fused: bool) -> list[torch.Tensor]:
    """What is in `.grad` after each step, and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler, draws, found = torch.amp.GradScaler(DEVICE.type, init_scale=8.0), torch.Generator().manual_seed(1), []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, SIZE, generator=draws).to(DEVICE)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        found += [parameter.grad.to("cpu", copy=True) for parameter in model.parameters()]
    return found + [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("bucket_bytes", [600, 100])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_after_the_step_are_those_of_plain_training(
    fused: bool, bucket_bytes: int, asynchronous: bool
) -> None:
    model = chain()
    settings = ExecutionSettings(DEVICE, asynchronous=asynchronous, async_config=AsyncOffloadConfig(min_tensor_bytes=0))
    executor = Executor(model, settings=settings)
    executor.attach([StreamParameters("1"), StepOnDevice(bucket_bytes)])
    try:
        ours = trained(model, fused=fused)
    finally:
        executor.detach()
    assert all(map(torch.equal, ours, trained(chain(), fused=fused)))
