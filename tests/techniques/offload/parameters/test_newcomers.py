"""Parametrizations and adapters that are added to a layer while it is streamed: the same training as plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.techniques.offload.runs import (
    DEVICE,
    MODES,
    WIDTH,
    Gpt,
    backward,
    gradients,
    let_autograd_finish,
    pair,
    same,
    streamed,
    weights,
)


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, which is made beside its weight, as libraries do it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        ramp = torch.linspace(-1.0, 1.0, 2 * WIDTH, device=base.weight.device)
        self.down = nn.Parameter(ramp.reshape(2, WIDTH).clone())
        self.up = nn.Parameter(ramp.reshape(WIDTH, 2).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def symmetric(block: nn.Module) -> None:
    parametrize.register_parametrization(block.mix, "weight", Symmetric())


def weight_norm(block: nn.Module) -> None:
    parametrizations.weight_norm(block.mix)


def spectral_norm(block: nn.Module) -> None:
    parametrizations.spectral_norm(block.mix)
    norm = block.mix.parametrizations.weight[0]
    for number, vector in enumerate((norm._u, norm._v)):  # drawn by the generator of the device that they were made on
        vector.copy_(F.normalize(torch.arange(WIDTH) + 1.0 + number, dim=0))


def adapter(block: nn.Module) -> None:
    block.mix = Adapted(block.mix)


def removed_again(block: nn.Module) -> None:
    weight_norm(block)
    block(torch.ones(1, 2, WIDTH, device=DEVICE))
    parametrize.remove_parametrizations(block.mix, "weight")


CHANGES = [symmetric, weight_norm, spectral_norm, adapter, removed_again]


@MODES
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changes_while_it_is_streamed_trains_the_same(
    change: Callable[[nn.Module], None], asynchronous: bool
):
    plain, model = pair(Gpt)

    def train(trained: nn.Module, num_steps: int) -> None:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        for step in range(num_steps):
            optimizer.zero_grad()
            backward(trained, step)
            optimizer.step()

    for trained in (plain, model):
        with streamed(model, asynchronous) if trained is model else torch.enable_grad():
            train(trained, 1)
            change(trained.blocks[1])
            train(trained, 2)
            if trained is model:
                trained.to(DEVICE)
                inside = dict(trained.blocks[1].mix.named_parameters())
                assert {name: tensor.device.type for name, tensor in inside.items()} == dict.fromkeys(inside, "cpu")
        backward(trained.to(DEVICE), 7)
    assert same(gradients(model), gradients(plain))
    assert same(weights(model), weights(plain))


def test_tensors_that_came_go_where_the_parameters_came_from():
    _, model = pair(Gpt)
    with streamed(model):
        spectral_norm(model.blocks[0])
        backward(model)
        assert model.blocks[0].mix.parametrizations.weight[0]._u.device == DEVICE
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert "_apply" not in vars(model.blocks[0].mix.parametrizations.weight)
