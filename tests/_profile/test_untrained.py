"""What no step trains is recognised; what another step might train is not taken for it."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._profile.inputs import Inputs
from memscale._profile.profiler import open_rehearsal
from memscale._profile.rehearsal import FakeRehearsal


def untrained(model: nn.Module, x: torch.Tensor | None = None) -> set[str]:
    """Modules with parameters that get no gradient."""
    rehearsal = FakeRehearsal(model, Inputs((torch.zeros(2, 8) if x is None else x,), {}), "cpu")
    rehearsal.run()
    return {name.removesuffix(".weight").removesuffix(".bias") for name in rehearsal.untrained}


class Branches(nn.Module):
    """One branch is used, one never, one only where it adds nothing to the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.watched = nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.watched(x)
        return self.used(self.frozen(x))


class OwnLoss(Branches):
    """Computes a loss, and gives back what the user may use in a loss of their own."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.used(x).square().mean(), "features": self.watched(x)}


class Dropping(nn.Module):
    """Drops layers by chance, or as it is told."""

    def __init__(self, kept: tuple[int, ...], *, by_chance: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head, self.kept, self.by_chance = nn.Linear(8, 8), kept, by_chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self.by_chance:
                random.random()
            if index in self.kept:
                x = layer(x)
        return self.head(x) if not self.by_chance else x


class Behind(Dropping):
    """Calls every layer and throws the last one's output away, as models do that take the last but one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        self.layers[2](x)
        return self.head(x)


def test_a_branch_that_is_never_used() -> None:
    assert untrained(Branches()) == {"unused", "watched"}


def test_what_the_users_own_loss_may_depend_on_counts() -> None:
    assert untrained(OwnLoss()) == {"unused"}


def test_layers_that_may_have_been_dropped_count() -> None:
    assert untrained(Dropping((0, 2))) == set()
    assert untrained(Dropping((0, 2), by_chance=True)) == set()
    assert untrained(Behind(())) == {"layers.2.0"}


def test_models_on_which_it_was_found() -> None:
    transformers = pytest.importorskip("transformers")
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipConfig(vision_config={**vision, "image_size": 16, "patch_size": 8}, num_labels=3)
    model = transformers.SiglipForImageClassification(config)
    found = untrained(model, torch.zeros(1, 3, 16, 16))
    assert found
    assert all(".head" in name for name in found)


@pytest.mark.parametrize("holds_gradients", [False, True])
def test_gradients_are_held_of_what_is_trained(holds_gradients: bool) -> None:
    model, inputs = Branches(), Inputs((torch.zeros(2, 8),), {})
    rehearsal, trace = open_rehearsal(model, inputs, torch.device("cpu"), holds_gradients=holds_gradients)
    assert rehearsal.untrained
    assert trace.end_bytes == pytest.approx(sum(p.nbytes for p in model.used.parameters()), abs=64)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_the_predicted_peak_is_the_measured_one(kind: str) -> None:
    """Adagrad makes state for all parameters at once; it is counted with what a step of them would need."""
    before = live_bytes()
    model, x = Branches(), torch.randn(2, 8)
    optimizer: Any = getattr(torch.optim, kind)(model.parameters(), 1e-2)
    config = Config(force_optimize=True, enable_logging=False)
    with memscale.optimize(model, optimizer, config, x) as executor, memscale.measure("cpu") as measured:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    above = executor.plan.predicted_peak_bytes - (measured.peak_bytes - before)
    assert -2048 <= above <= 2048 + (sum(p.nbytes for p in model.unused.parameters()) if kind == "Adagrad" else 0)


def live_bytes() -> int:
    """What other tests have left."""
    gc.collect()
    with memscale.measure("cpu") as measured:
        torch.empty(1)
    return measured.peak_bytes
