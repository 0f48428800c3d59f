"""The suite of `benchmarks.models`, and odd models that only tests need."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from benchmarks.models import Case, Mlp, MlpBlock, ResNet, case, suite
from torch import nn

__all__ = ["ODD_CASES", "SUITE", "Case", "Chain", "Mlp", "MlpBlock", "ResNet", "case", "odd", "square_loss", "suite"]

SUITE = suite()
WIDTH = 16


def square_loss(output: Any) -> torch.Tensor:
    return output.square().mean()


def features(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (8, WIDTH)), generator=torch.Generator().manual_seed(1000 + step))


class Chain(nn.Module):
    """Blocks one after another, and a head."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def small() -> Chain:
    """Four blocks."""
    return Chain(*(TwoLinears() for _ in range(4)))


# ---- state that a forward changes


class OldSpectral(nn.Module):
    """Power iteration by a hook: every forward changes its vectors, and computes with the changed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class NewSpectral(OldSpectral):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class OldWeightNorm(OldSpectral):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Orthogonal(OldSpectral):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


class Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


class FrozenNorm(Normed):
    """Stays in eval mode whatever the model does, as detection models keep their backbones."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


class Ema(nn.Module):
    """A buffer that is replaced, not written to, and one that every forward multiplies by one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("constant", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.constant.mul_(1.0)
        return x + self.dropout(self.linear(x - self.average) * self.constant)


# ---- randomness from elsewhere


class HostDropout(TwoLinears):
    """Drops whole blocks and single features by Python's and NumPy's generators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.gauss() + numpy.random.randn()
        mask = torch.from_numpy(numpy.random.rand(WIDTH) > 0.3)
        return x + scale * torch.tanh(super().forward(x)) * mask


class OwnGenerator(TwoLinears):
    """Draws from generators that it holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = numpy.random.default_rng(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return super().forward(x * noise) * (self.python.random() + self.numpy.random())


class Counter(TwoLinears):
    """A Python attribute steers the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


# ---- arguments and results


class Appending(TwoLinears):
    def forward(self, x: torch.Tensor, trail: list[torch.Tensor]) -> torch.Tensor:
        x = super().forward(x) + sum(len(entry) for entry in trail) / 100
        trail.append(x)
        return x


class AppendingChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trail: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, trail)
        assert len(trail) == len(self.blocks)
        return self.head(x) + sum(entry.mean() for entry in trail)


class Mixed(TwoLinears):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, str, dict[str, Any]]:
        return super().forward(x), None, "text", {"mean": x.mean().item(), "nothing": []}


class MixedChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, nothing, text, extras = block(x)
            assert nothing is None
            assert text == "text"
            assert extras["nothing"] == []
        return self.head(x)


@dataclasses.dataclass
class State:
    """A plain dataclass: no pytree knows it."""

    hidden: torch.Tensor
    step: int


class DataclassBlock(TwoLinears):
    def forward(self, state: State) -> State:
        return State(super().forward(state.hidden) * state.step, state.step + 1)


class DataclassChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x, 1)
        for block in self.blocks:
            state = block(state)
        return self.head(state.hidden)


class KeywordBlock(TwoLinears):
    def forward(self, *, hidden: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return super().forward(hidden) * factor


class KeywordChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(hidden=x, factor=0.5)
        return self.head(x)


class OutputBlock(TwoLinears):
    def forward(self, x: torch.Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=super().forward(x), hidden_states=(x,))


class OutputChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for block in self.blocks:
            output = block(x)
            x, total = output.last_hidden_state, total + output.hidden_states[0].mean()
        return self.head(x) + total


# ---- kernels


class Inplace(nn.Module):
    """In-place activations on what selective checkpointing would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.conv(x.reshape(-1, 4, WIDTH // 4)).reshape(-1, WIDTH))
        return F.leaky_relu_(self.linear(x), 0.3)


class InplaceInput(TwoLinears):
    """Changes its own input; running it twice is not running it once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        F.leaky_relu_(x, 0.3)
        return super().forward(x)


class InplaceInputChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, (hidden, _) = self.lstm(x)
        return x + output + hidden.mean()


class ComplexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.linear = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.fft.ifft(torch.fft.fft(x) * self.mix).real)


class MixedDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x.double()).bfloat16()).float()


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(TwoLinears() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Shared(nn.Module):
    """One block registered under two names and called three times."""

    def __init__(self) -> None:
        super().__init__()
        block = TwoLinears()
        self.blocks = nn.Sequential(block, TwoLinears(), block)
        self.again = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.blocks(x))


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"first": TwoLinears(), "second": TwoLinears()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks["second"](self.blocks["first"](x))


class Awkward(TwoLinears):
    """Attributes that cannot be copied or pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = lambda x: torch.tanh(x)
        self.endless = iter(int, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(x))


class Parallel(nn.Module):
    """A wrapper in the manner of DataParallel: cuts the batch, calls the module once for each part."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.module(part) for part in x.chunk(2)])


class NoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def odd(name: str) -> Case:
    return next(entry for entry in ODD_CASES if entry.name == name)


def _case(name: str, build: Any, *shape: int, **options: Any) -> Case:
    return Case(name, build, lambda n: {"x": features(n, *shape)}, square_loss, **options)


def _chain(block: Any, chain: Any = Chain, depth: int = 3) -> Any:
    return lambda: chain(*(block() for _ in range(depth)))


ODD_CASES: tuple[Case, ...] = (
    _case("spectral norm by hooks", _chain(OldSpectral)),
    _case("spectral norm by parametrization", _chain(NewSpectral)),
    _case("weight norm", _chain(OldWeightNorm)),
    _case("orthogonal", _chain(Orthogonal)),
    _case("batch norm with a plain average", _chain(lambda: Normed(momentum=None))),
    _case("frozen batch norm", _chain(FrozenNorm)),
    _case("buffers replaced", _chain(Ema)),
    _case("python and numpy randomness", _chain(HostDropout)),
    _case("generators of its own", _chain(OwnGenerator), is_static=False),
    _case("a counter that steers", _chain(Counter)),
    _case("a list argument that grows", _chain(Appending, AppendingChain)),
    _case("results that are no tensors", _chain(Mixed, MixedChain), is_static=False),
    _case("dataclass state", _chain(DataclassBlock, DataclassChain)),
    _case("keywords only", _chain(KeywordBlock, KeywordChain)),
    _case("model outputs", _chain(OutputBlock, OutputChain)),
    _case("in-place on kept outputs", _chain(Inplace)),
    _case("in-place on its input", _chain(InplaceInput, InplaceInputChain)),
    _case("lstm", _chain(Recurrent), 4, 6, WIDTH),
    _case("complex", _chain(ComplexBlock)),
    _case("mixed dtypes", _chain(MixedDtype)),
    Case(
        "float64",
        lambda: Chain(*(TwoLinears() for _ in range(3))).double(),
        lambda n: {"x": features(n).double()},
        square_loss,
    ),
    Case(
        "sparse embedding",
        SparseEmbedding,
        lambda n: {"tokens": torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(n))},
        square_loss,
    ),
    Case(
        "input that requires grad",
        _chain(TwoLinears),
        lambda n: {"x": features(n).requires_grad_()},
        square_loss,
    ),
    Case("empty batch", _chain(TwoLinears), lambda n: {"x": features(n, 0, WIDTH)}, lambda out: out.sum()),
    _case("scalar loss", lambda: Chain(*(TwoLinears() for _ in range(3))), 1, WIDTH),
    _case("shared block", Shared),
    _case("module dict", Dictionary),
    _case("awkward attributes", _chain(Awkward), is_static=False),
    _case("parallel wrapper", lambda: Parallel(Chain(*(TwoLinears() for _ in range(3))))),
    _case("blocks without parameters", _chain(NoParameters)),
)
