"""Parameters that are read while their module does not run stay on the device when the rest is streamed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale
from memscale._plan import StreamParameters
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from tests.techniques.offload.runs import DEVICE

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


class Model(nn.Module):
    """A language model whose loss is computed where the weight of its head is, as TRL's fused head does it."""

    def __init__(self, *, fused: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.fused = fused
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        if self.fused:
            place = self.head.weight.device
            logits, ids = x.to(place) @ self.head.weight.t(), ids.to(place)
        else:
            logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("fused", "tied", "found"),
    [(False, False, set()), (True, False, {"head"}), (False, True, set()), (True, True, {"embed", "head"})],
)
def test_what_is_read_elsewhere_is_found(fused: bool, tied: bool, found: set[str]) -> None:
    rehearsal = FakeRehearsal(Model(fused=fused, tied=tied), Inputs((torch.zeros(2, 4, dtype=torch.long),), {}), "cpu")
    rehearsal.run()
    assert rehearsal.readings.outside(["embed", "norm", "head"]) == found
    assert rehearsal.readings.outside(rehearsal.blocks) == set()


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_others_read_stays_and_the_training_is_the_same(tied: bool) -> None:
    torch.manual_seed(0)
    plain = Model(fused=True, tied=tied).to(DEVICE)
    model = copy.deepcopy(plain)
    ids = torch.randint(64, (2, 4), device="cpu").to(DEVICE)
    memscale.wrap(model, memscale.Config(force_optimize=True, enable_logging=False), ids)
    streamed = {a.module_fqn for a in model._memscale_executor.plan.actions if isinstance(a, StreamParameters)}
    assert {"blocks.0", "norm"} <= streamed
    assert model.head.weight.device == DEVICE
    assert train(model, ids) == train(plain, ids)
    memscale.detach(model)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


class Read(Model):
    """Parameters of blocks are read beside their blocks, by code that runs wherever they are."""

    def __init__(self, how: str) -> None:
        super().__init__(fused=False, tied=False)
        self.how = how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.beside(ids).to(ids.device)

    def beside(self, ids: torch.Tensor) -> torch.Tensor:
        weights = [block[0].weight for block in self.blocks]
        place = weights[0].device
        if self.how == "penalty":
            return sum(weight.square().sum() for weight in weights)
        if self.how == "stacked":
            return torch.stack(weights).square().mean()
        if self.how == "view":
            return (self.embed(ids).to(place) @ weights[1][:32]).mean()
        if self.how == "without gradient":
            return weights[2].data.norm()
        assert self.how == "part"
        return self.blocks[1][0](self.embed(ids)).mean()


@pytest.mark.parametrize("how", ["penalty", "stacked", "view", "without gradient", "part"])
def test_blocks_whose_parameters_are_read_beside_them_stay_and_nothing_is_computed_on_the_host(how: str) -> None:
    torch.manual_seed(0)
    plain = Read(how).to(DEVICE)
    model = copy.deepcopy(plain)
    ids = torch.randint(64, (2, 4), device="cpu").to(DEVICE)
    memscale.wrap(model, memscale.Config(force_optimize=True, enable_logging=False), ids)
    assert not [a for a in model._memscale_executor.plan.actions if isinstance(a, StreamParameters)]
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    assert train(model, ids) == train(plain, ids)
    memscale.detach(model)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


class Neighbours(Model):
    """Each block is given a weight of the one before it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) + (x.to(weight.device) @ weight).to(x.device)

    def __init__(self) -> None:
        super().__init__(fused=False, tied=False)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for place, block in enumerate(self.blocks):
            x = x + block(x, self.blocks[place - 1].first.weight)
        return self.head(self.norm(x)).square().mean()


def test_a_weight_that_another_block_is_given_stays() -> None:
    """It came from the device in the forward and from the host in the recompute, and backward failed."""
    torch.manual_seed(0)
    plain = Neighbours().to(DEVICE)
    model = copy.deepcopy(plain)
    ids = torch.randint(64, (2, 4), device="cpu").to(DEVICE)
    memscale.wrap(model, memscale.Config(force_optimize=True, enable_logging=False), ids)
    assert train(model, ids) == train(plain, ids)
    memscale.detach(model)


def train(model: nn.Module, ids: torch.Tensor) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(ids)
        assert loss.device == DEVICE
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses
