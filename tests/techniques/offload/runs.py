"""Training runs on the simulated device, plain and with layers streamed or offloaded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import simgpu  # noqa: F401  (registers the device)
from memscale._plan import StreamParameters
from memscale._profile.layers import find_blocks
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.parameters.streamer import Streamer
from tests.models import Case
from tests.parity import equal, seed

DEVICE = torch.device("simgpu", 0)
WIDTH, VOCABULARY = 32, 64
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Boom(Exception):
    """What `explode` raises."""


def explode(*_: Any) -> None:
    """A hook that fails."""
    raise Boom


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.mix(self.norm1(x))).cumsum(1) * self.scale
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Blocks between an embedding and a head that shares its weight."""

    def __init__(self, num_layers: int = 3, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.run(self.embed(ids))))


def tokens(step: int = 0, shape: tuple[int, int] = (2, 16)) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(step), device="cpu").to(DEVICE)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    ids = tokens(step)
    return F.cross_entropy(model(ids).reshape(-1, VOCABULARY).float(), ids.roll(1, 1).reshape(-1))


def backward(model: nn.Module, step: int = 0, loss: Callable[[nn.Module], torch.Tensor] | None = None) -> torch.Tensor:
    torch.manual_seed(step)
    value = loss(model) if loss is not None else loss_of(model, step)
    value.backward()
    return value.detach().cpu()


def let_autograd_finish() -> None:
    """The device's autograd thread drops a failed pass a moment after `backward()` has raised; the next one waits."""
    x = torch.ones(1, device=DEVICE, requires_grad=True)
    (x * 2).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().cpu().clone() for n, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return list(ours) == list(theirs) and all(equal(ours[name], theirs[name]) for name in ours)


def streamed_actions(model: nn.Module) -> list[StreamParameters]:
    return [StreamParameters(module_fqn) for module_fqn in find_blocks(model)]


@contextlib.contextmanager
def streamed(model: nn.Module, asynchronous: bool = True, **settings: Any) -> Iterator[Streamer]:
    with contextlib.ExitStack() as undo:
        how = streaming.Streaming(asynchronous, **settings)
        yield streaming.attach(streamed_actions(model), model, DEVICE, undo, how)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model twice: one on the device, one on the CPU that is to be streamed."""
    seed(1)
    model = build()
    return copy.deepcopy(model).to(DEVICE), model


# ---- whole training loops


@dataclasses.dataclass
class Run:
    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = dataclasses.field(default_factory=list)
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    rng: torch.Tensor | None = None

    def assert_same(self, other: Run) -> None:
        assert self.losses == other.losses
        for step, (ours, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            assert same(ours, theirs), f"gradients of step {step} differ"
        assert same(self.state, other.state), "weights or buffers differ"
        assert self.rng is not None
        assert other.rng is not None
        assert torch.equal(self.rng, other.rng), "the device's random state differs"


def on(device: torch.device, batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def without_caches(model: nn.Module) -> nn.Module:
    """For streaming that is attached by itself: whose cache a block is given is known to the executor alone."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    return model


def train(
    model: nn.Module,
    case: Case,
    steps: int = 3,
    accumulation: int = 2,
    device: torch.device = DEVICE,
    keep: list[Any] | None = None,
) -> Run:
    """Steps with accumulation, clipping and a scheduler. `keep` gets the optimizer, for who wants it to live on."""
    run = Run()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if keep is not None:
        keep.append(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    seed(3)
    for step in range(steps):
        for part in range(accumulation):
            loss = case.loss(model(**on(device, case.batch(step * accumulation + part))))
            (loss / accumulation).backward()
            run.losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        run.gradients.append(gradients(model))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.state = weights(model)
    run.rng = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return run
