"""Models that users park are not all alike: tied, half frozen, with statistics, with state in 8 bits, two at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.techniques.optimizer8bit import blocks
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE, same

NUM_STEPS = 3
TABLES = 65_536 + 1024
"""What the process keeps on a device to read state in 8 bits by."""
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(32, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.head(x + self.inner(x)).square().mean()


class Counting(nn.Module):
    """Statistics, a buffer that no file has, and one that is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("also_seen", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return (self.last(self.norm(self.first(x)).relu()) * self.seen).square().mean()


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    model[2].requires_grad_(False)
    return model


def _numbers(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randn(8, 16).to(DEVICE)


def _ids(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randint(0, 32, (4, 8)).to(DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "tied": (Tied, _ids),
    "statistics": (Counting, _numbers),
    "frozen": (_frozen, _numbers),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "conservative": {"mode": "conservative"},
    "as low as balanced goes": {"mode": "balanced", "force_optimize": True},
    "as low as aggressive goes, in full precision": {
        "mode": "aggressive", "force_optimize": True, "use_mixed_precision": False, "use_8bit_optimizer": False,
    },
}  # fmt: skip


def trained(name: str, wishes: dict[str, Any] | None, *, parks: bool, left_bytes: int = 0) -> dict[str, torch.Tensor]:
    build, batch = MODELS[name]
    seed(1)
    model = build().to(DEVICE)
    if wishes is not None:
        memscale.wrap(model, memscale.Config(enable_logging=False, **wishes), batch(0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(NUM_STEPS):
        model(batch(step)).mean().backward()
        if parks:
            _park(model, left_bytes)
        optimizer.step()
        optimizer.zero_grad()
        if parks:
            _park(model, left_bytes)
    found = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    found |= {f"buffer {name}": value.cpu() for name, value in model.named_buffers(remove_duplicate=False)}
    found |= {
        f"state {number} {key}": value.cpu()
        for number, entry in enumerate(optimizer.state_dict()["state"].values())
        for key, value in entry.items()
    }
    if wishes is not None:
        memscale.detach(model)
    return found


def _park(model: nn.Module, left_bytes: int) -> None:
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    with memscale.parked(model) as num_bytes:
        gc.collect()
        assert num_bytes > 0
        assert torch.accelerator.memory_allocated() <= left_bytes
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(one is other for one, other in zip(buffers, model.buffers(), strict=True))


@pytest.mark.parametrize("wishes", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_leaves_no_byte_and_trains_on_bit_for_bit(name: str, wishes: str, simgpu_device: Any) -> None:
    assert same(trained(name, CONFIGS[wishes], parks=True), trained(name, None, parks=False))


def test_state_in_8_bits_is_parked_as_it_is(simgpu_device: Any) -> None:
    wishes = {"mode": "aggressive", "use_8bit_optimizer": True, "use_mixed_precision": False, "force_optimize": True}
    assert same(trained("frozen", wishes, parks=True, left_bytes=TABLES), trained("frozen", wishes, parks=False))
    blocks.code_book.cache_clear()
    blocks._table.cache_clear()


def test_two_models_of_one_optimizer_are_parked_one_after_the_other(simgpu_device: Any) -> None:
    """The state of both is the optimizer's; what goes is that of the model that is parked."""
    runs = [_two(parks=parks) for parks in (False, True)]
    assert same(*runs)


def _two(*, parks: bool) -> dict[str, torch.Tensor]:
    seed(1)
    first, second = (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(DEVICE) for _ in range(2))
    config = memscale.Config(enable_logging=False, mode="balanced", force_optimize=True)
    if parks:
        for model in (first, second):
            memscale.wrap(model, config, _numbers(0))
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    for step in range(NUM_STEPS):
        second(first(_numbers(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if parks:
            with memscale.parked(first):
                assert all(p.device.type == "cpu" for p in first.parameters())
                assert torch.isfinite(second(_numbers(9))).all(), "the other one runs meanwhile"
                with memscale.parked(second):
                    gc.collect()
                    assert torch.accelerator.memory_allocated() == 0
    found = {f"{number} {name}": value.detach().cpu()
             for number, model in enumerate((first, second)) for name, value in model.state_dict().items()}  # fmt: skip
    if parks:
        memscale.detach(first)
        memscale.detach(second)
    return found
