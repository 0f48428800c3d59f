"""Random models: trees of layers as data, drawn by hypothesis and built into modules.

Every layer maps `(batch, length, WIDTH)` to the same shape, so that any of them can follow, surround or stand beside
any other. What models of the wild do that is hard to recompute, move or stream is a layer here: random numbers of three
kinds, buffers and Python attributes written in forward, in-place operators, shared, tied and frozen parts, hooks,
parametrizations, custom autograd functions, inner checkpoints, recurrent nets, routing, odd inputs and outputs.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH, LENGTH = 8, 2, 4


class Double(torch.autograd.Function):
    """Keeps a tensor and a number for its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x * ctx.factor, None


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Double.apply(x, 0.5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.mix(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class BatchNorm(nn.Module):
    """Running statistics are written in forward; the output is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, found = None, []
        for moment in x.unbind(1):
            state = self.inner(moment, state)
            found.append(state[0])
        return torch.stack(found, 1)


class Router(nn.Module):
    """Each position goes to one of two experts, by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            result = result + expert(flat) * (chosen == number).unsqueeze(1) * weight.unsqueeze(1)
        return result.view(x.shape)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu_().mul_(1.5).add_(x)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.25
        return self.inner(x)


class Counter(nn.Module):
    """A buffer and an attribute that count calls, and that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.times += 1
        self.seen.append(self.times)
        return x * (1 + self.calls / 8) + self.times / 16 + len(self.seen) / 32


class Average(nn.Module):
    """A buffer that is replaced in forward by one that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
        return x - self.mean


class Codebook(nn.Module):
    """A matrix that is saved for backward, and then written to past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.codes
        self.codes.data.mul_(0.75)
        return y


class WritesPastAutograd(nn.Module):
    """What it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x)
        y = self.inner(hidden)
        hidden.data.mul_(0.5)
        return y


class DropsLayers(nn.Module):
    """Three kinds of random numbers decide what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.5:
            x = self.inner(x)
        if torch.rand((), device="cpu").item() < 0.5:
            x = x * 2
        return x + torch.randn_like(x) / 8


class Hooked(nn.Module):
    """Hooks on a layer and on a tensor change what goes forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
        self.inner.register_forward_hook(lambda module, args, output: output + 0.5)
        self.inner.register_full_backward_hook(lambda module, given, taken: (given[0] * 0.75,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 1.5)
        return x


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.inner(x).abs().mean()
        return x / (1 + scale) + self.inner(x.detach())


def _weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def _spectral_norm() -> nn.Module:
    """Its buffers are written in forward."""
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


LEAVES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "gelu": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": BatchNorm,
    "dropout": lambda: nn.Dropout(0.3),
    "attention": Attention,
    "convolution": Convolution,
    "gru": Recurrent,
    "cell": Cell,
    "router": Router,
    "in place": InPlace,
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "changes its input": ChangesItsInput,
    "counter": Counter,
    "average": Average,
    "codebook": Codebook,
    "writes past autograd": WritesPastAutograd,
    "drops layers": DropsLayers,
    "hooked": Hooked,
    "detaches": Detaches,
    "custom": Custom,
    "weight norm": _weight_norm,
    "spectral norm": _spectral_norm,
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A node of the tree: a leaf by its name, or a way to put others together."""

    kind: str
    parts: tuple[Layer, ...] = ()


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.clone())


class Branches(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"branch{number}": part for number, part in enumerate(parts)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x.clone()) for part in self.parts.values()) / len(self.parts)


class Checkpointed(nn.Module):
    """A checkpoint of the model's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.clone(), use_reentrant=False)


class Twice(nn.Module):
    """The same module, called twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x.clone()).clone())


STATEFUL = {
    *("counter", "average", "batch norm", "spectral norm", "drops layers"),
    *("codebook", "writes past autograd"),
}
"""What a model's own checkpoint would change twice, or draw anew: plain training with it is no standard to hold to."""


def is_stateful(layer: Layer) -> bool:
    return layer.kind in STATEFUL or any(map(is_stateful, layer.parts))


def build_layer(layer: Layer) -> nn.Module:
    parts = [build_layer(part) for part in layer.parts]
    match layer.kind:
        case "sequence":
            return nn.Sequential(*parts)
        case "residual":
            return Residual(parts[0])
        case "branches":
            return Branches(parts)
        case "checkpointed":
            return parts[0] if is_stateful(layer) else Checkpointed(parts[0])
        case "twice":
            return Twice(parts[0])
        case "frozen":
            return parts[0].requires_grad_(False)
        case leaf:
            return LEAVES[leaf]()


def _around(inner: st.SearchStrategy[Layer]) -> st.SearchStrategy[Layer]:
    one = st.sampled_from(["residual", "checkpointed", "twice", "frozen"])
    several = st.sampled_from(["sequence", "branches"])
    return st.one_of(
        st.builds(lambda kind, part: Layer(kind, (part,)), one, inner),
        st.builds(lambda kind, parts: Layer(kind, tuple(parts)), several, st.lists(inner, min_size=2, max_size=3)),
    )


LAYERS = st.recursive(st.sampled_from(sorted(LEAVES)).map(Layer), _around, max_leaves=4)
FORMS = ("tensor", "tuple", "dict", "keyword")
LINKS = ("none", "tied weights", "shared block", "frozen block")


@dataclasses.dataclass(frozen=True)
class Description:
    """A model: blocks of one layer or of several kinds, how they hand on, and how they hang together."""

    layers: tuple[Layer, ...]
    form: str
    link: str


DESCRIPTIONS = st.builds(
    Description,
    st.lists(LAYERS, min_size=2, max_size=3).map(tuple) | LAYERS.map(lambda layer: (layer,) * 3),
    st.sampled_from(FORMS),
    st.sampled_from(LINKS),
)


class Block(nn.Module):
    """Takes and gives what the form says; `aside` is an output that nothing later in the chain needs."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        if self.form == "tuple":
            x, aside = x
            return self.inner(x.clone()), aside + x.mean()
        if self.form == "dict":
            return {"x": self.inner(x["x"].clone()), "aside": x["aside"] + x["x"].square().mean()}
        return self.inner(x.clone()) * scale


class RandomModel(nn.Module):
    """An embedding, the blocks, and a head."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.form = description.form
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(build_layer(layer), self.form) for layer in description.layers)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        if description.link == "tied weights":
            self.head.weight = self.table.weight
        elif description.link == "shared block":
            self.blocks.append(self.blocks[0])
        elif description.link == "frozen block":
            self.blocks[0].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> Any:
        x, aside = self.table(ids), ids.new_zeros((), dtype=torch.float32)
        state: Any = {"tuple": (x, aside), "dict": {"x": x, "aside": aside}}.get(self.form, x)
        for block in self.blocks:
            state = block(state, scale=0.5) if self.form == "keyword" else block(state)
        x, aside = _parts(state, aside)
        return {"logits": self.head(x), "aside": aside}


def _parts(state: Any, aside: torch.Tensor) -> Any:
    if isinstance(state, dict):
        return state["x"], state["aside"]
    return state if isinstance(state, tuple) else (state, aside)


def build(description: Description) -> RandomModel:
    torch.manual_seed(1)
    return RandomModel(description).train()
