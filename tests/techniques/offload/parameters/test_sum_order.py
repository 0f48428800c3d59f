"""Gradients of parameters that several streamed calls use are summed as plain PyTorch sums them, bit for bit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memscale._plan import StreamParameters
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.parameters.streamer import Streamer
from tests.techniques.offload.runs import DEVICE, MODES, gradients, let_autograd_finish, pair, same

SIZE = 16


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


class Uses(nn.Module):
    """A layer that uses its weight so many times."""

    def __init__(self, num_uses: int = 2) -> None:
        super().__init__()
        self.num_uses = num_uses
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.2)
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(self.num_uses):
            y = torch.tanh(F.linear(y, self.weight))
        return x + y + self.bias


class Calls(nn.Module):
    """Layers that are called in this order."""

    def __init__(self, uses: tuple[int, ...], order: tuple[int, ...], *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uses(num_uses) for num_uses in uses)
        self.order = order
        if tied:
            for block in self.blocks:
                block.weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Aside(Uses):
    """Its second use of the weight is seen only by who looks at an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = F.linear(x, self.weight).square().mean()
        return x + torch.tanh(F.linear(x, self.weight)) + self.bias


class WithAside(Calls):
    def __init__(self) -> None:
        super().__init__((2, 2), (0, 1, 0, 1))
        self.blocks = nn.ModuleList([Aside(), Aside()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside = torch.zeros((), device=x.device)
        for index in self.order:
            x = self.blocks[index](x)
            aside = aside + self.blocks[index].aside
        return x + aside


class CastByHand(Uses):
    """Casts its weight by itself for each use, so that plain PyTorch has two casts as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.bfloat16(), self.weight.bfloat16())
        return x + torch.tanh(F.linear(y, self.weight.bfloat16())).float() + self.bias


class WithCastByHand(Calls):
    def __init__(self) -> None:
        super().__init__((2, 2), (0, 1, 0, 1))
        self.blocks = nn.ModuleList([CastByHand(), CastByHand()])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "called twice": lambda: Calls((2, 2), (0, 1, 0, 1)),
    "called three times": lambda: Calls((3,), (0, 0, 0)),
    "tied, twice then once": lambda: Calls((2, 1), (0, 1), tied=True),
    "tied, once then twice": lambda: Calls((1, 2), (0, 1), tied=True),
    "tied, twice, once, once, twice": lambda: Calls((2, 1, 1, 2), (0, 1, 2, 3), tied=True),
    "tied, once, twice, once, and again": lambda: Calls((1, 2, 1), (0, 1, 2, 1, 0), tied=True),
    "kept aside": WithAside,
    "cast by hand": WithCastByHand,
}


@contextlib.contextmanager
def streamed(model: nn.Module, asynchronous: bool = True) -> Iterator[Streamer]:
    actions = [StreamParameters(f"blocks.{index}") for index in range(len(model.blocks))]
    with contextlib.ExitStack() as undo:
        yield streaming.attach(actions, model, DEVICE, undo, streaming.Streaming(asynchronous))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, SIZE, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)


def one_pass(model: nn.Module) -> None:
    for step in range(3):
        model(batch(step)).square().mean().backward()


def one_backward_of_two_forwards(model: nn.Module) -> None:
    for step in range(2):
        (model(batch(step)).square().mean() + model(batch(step + 9)).mean()).backward()


def two_backwards_of_two_forwards(model: nn.Module) -> None:
    first, second = model(batch(0)).square().mean(), model(batch(1)).mean()
    first.backward()
    second.backward()


def the_same_backward_twice(model: nn.Module) -> None:
    loss = model(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    model(batch(1)).square().mean().backward()


def the_last_is_thrown_away(model: nn.Module) -> None:
    first = model(batch(0)).square().mean()
    model(batch(1))
    (first + model(batch(2)).square().mean()).backward()


LOOPS = (
    one_pass,
    one_backward_of_two_forwards,
    two_backwards_of_two_forwards,
    the_same_backward_twice,
    the_last_is_thrown_away,
)


@MODES
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_gradients_are_the_plain_ones(build, loop, asynchronous: bool):
    plain, model = pair(build)
    with streamed(model, asynchronous):
        loop(model)
        loop(plain)
        assert same(gradients(model), gradients(plain))
    for block in (*model.blocks, *plain.blocks):
        vars(block).pop("aside", None)


@MODES
def test_what_is_unfrozen_later_is_counted_anew(asynchronous: bool):
    plain, model = pair(lambda: Calls((2, 2), (0, 1, 0, 1)))
    with streamed(model, asynchronous):
        for one in (model, plain):
            one.blocks[0].weight.requires_grad_(False)
            one_pass(one)
            one.blocks[0].weight.requires_grad_(True)
            one_pass(one)
        assert same(gradients(model), gradients(plain))


@MODES
@pytest.mark.parametrize("uses", [(0, 3, 1, 1), (1, 3, 1, 1), (1, 3, 0, 1), (3, 2, 2, 0)])
def test_calls_that_use_it_as_often_as_none_before_are_counted(uses: tuple[int, ...], asynchronous: bool):
    """Layers that drop parts by chance. The first call is alone in its step."""
    plain, model = pair(lambda: Calls((2,), (0,)))
    with streamed(model, asynchronous):
        for one in (model, plain):
            losses = []
            for number, num_uses in enumerate(uses):
                one.blocks[0].num_uses = num_uses
                losses.append(one(batch(number)).square().mean())
                if number == 0:
                    losses.pop().backward()
            sum(losses).backward()
        assert same(gradients(model), gradients(plain))


def test_where_every_call_uses_it_once_every_gradient_goes_home_on_its_own():
    _, model = pair(lambda: Calls((1, 1), (0, 1, 0, 1), tied=True))
    with streamed(model) as streamer:
        loss = model(batch(0)).mean()
        assert len(streamer.tails) == 0
        loss.backward()


def test_a_tail_lives_no_longer_than_the_graph():
    _, model = pair(lambda: Calls((2, 2), (0, 1, 0, 1)))
    with streamed(model) as streamer:
        loss = model(batch(0)).mean()
        assert len(streamer.tails) == 2
        loss.backward()
        let_autograd_finish()
        assert len(streamer.tails) == 0  # though the loss is still there
        loss = model(batch(0)).mean()
        del loss
        gc.collect()
        assert len(streamer.tails) == 0
