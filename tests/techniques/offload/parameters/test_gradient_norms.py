"""Gradients of a streamed model are clipped as those of the plain model are, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale._plan import StreamParameters
from memscale.techniques.offload.parameters import streaming
from tests.techniques.offload.runs import DEVICE

ACCELERATOR = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: Any) -> None:
    """Registers the device; every test must give its device and pinned bytes back."""


class Net(nn.Module):
    """Parameters of two dtypes; the middle block stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.blocks[1].double()
        self.blocks[3].double()
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x.to(block.weight.dtype)).tanh()
        return self.head(x.float())


@contextlib.contextmanager
def streamed(model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        streaming.attach([StreamParameters(f"blocks.{index}") for index in (0, 1, 3, 4)], model, DEVICE, undo)
        yield


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(8, 64, device="cpu", generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    model(x).square().sum().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_of_gradients_is_that_of_the_plain_model(norm_type: float, foreach: bool | None) -> None:
    plain = Net().to(DEVICE)
    model = copy.deepcopy(plain)
    with streamed(model):
        for seed in range(6):  # one sum in another order may round to the same bits
            for each in (plain, model):
                each.zero_grad()
                backward(each, seed)
            assert model.blocks[0].weight.grad.device.type == "cpu"
            ours, theirs = (
                nn.utils.get_total_norm(gradients(each), norm_type, foreach=foreach) for each in (model, plain)
            )
            assert ours.device == theirs.device
            assert torch.equal(ours, theirs)
            clipped = [
                nn.utils.clip_grad_norm_(each.parameters(), 0.1, norm_type, foreach=foreach) for each in (model, plain)
            ]
            assert torch.equal(*clipped)
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(gradients(model), gradients(plain), strict=True))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_streamed_model_is_clipped_together_with_others(is_first: bool) -> None:
    """With another streamed model, and with one that is not."""
    plain = [Net().to(DEVICE) for _ in range(3)]
    ours, place = copy.deepcopy(plain), 0 if is_first else 2
    with streamed(ours[1]), streamed(ours[place]):
        for seed in range(6):
            for models in (plain, ours):
                for number, model in enumerate(models):
                    model.zero_grad()
                    backward(model, 3 * seed + number)
            norms = [
                nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 0.1)
                for models in (ours, plain)
            ]
            assert torch.equal(*norms)
    pairs = zip(_gradients_of(ours), _gradients_of(plain), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def _gradients_of(models: list[nn.Module]) -> list[torch.Tensor]:
    return [gradient for model in models for gradient in gradients(model)]


def test_gradients_visit_the_device_one_at_a_time() -> None:
    model = Net().to(DEVICE)
    with streamed(model):
        backward(model, 0)
        ACCELERATOR.synchronize()
        before = ACCELERATOR.memory_allocated()
        ACCELERATOR.reset_peak_memory_stats()
        nn.utils.get_total_norm(gradients(model))
        largest = max(gradient.nbytes for gradient in gradients(model))
        norms = 512 * 3 * len(gradients(model))  # each takes a block of the allocator's: of its own, moved, stacked
        assert largest <= ACCELERATOR.max_memory_allocated() - before <= largest + norms


def test_a_norm_that_is_not_finite_is_refused_as_ever() -> None:
    model = Net().to(DEVICE)
    with streamed(model):
        backward(model, 0)
        model.blocks[0].weight.grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_gradients_of_others_and_of_a_model_without_any_pass_through() -> None:
    other = nn.Linear(3, 3)
    other(torch.ones(2, 3, device="cpu")).sum().backward()
    expected = nn.utils.get_total_norm(gradients(other))
    model = Net().to(DEVICE)
    with streamed(model):
        assert torch.equal(nn.utils.get_total_norm(gradients(other)), expected)
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0.0


def test_the_host_takes_the_norm_where_the_device_is_full(caplog: pytest.LogCaptureFixture) -> None:
    model = Net().to(DEVICE)
    with streamed(model):
        backward(model, 0)
        ACCELERATOR.synchronize()
        expected = nn.utils.get_total_norm(gradients(model))
        largest = max(gradient.nbytes for gradient in gradients(model))
        cap = simgpu.get_cap()
        simgpu.set_cap(ACCELERATOR.memory_allocated() + largest // 2)
        try:
            with caplog.at_level(logging.WARNING, logger="memscale"):
                torch.testing.assert_close(nn.utils.get_total_norm(gradients(model)), expected)
        finally:
            simgpu.set_cap(cap)
    assert "has no room for a gradient" in caplog.text
