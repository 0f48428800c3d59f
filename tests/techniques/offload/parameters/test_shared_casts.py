"""Calls under one autocast share a cast of each parameter: their gradients are summed in 16 bits, as by PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lanes import in_turns
from tests.techniques.offload.parameters.test_sum_order import SIZE, Calls, batch, streamed
from tests.techniques.offload.runs import DEVICE, gradients, let_autograd_finish, pair, same


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


def autocast(dtype: torch.dtype = torch.bfloat16, **options: bool) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("simgpu", dtype=dtype, **options)


class NormedBlock(nn.Module):
    """Weights that autocast casts beside some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CastByHand(NormedBlock):
    """Its own code casts one of the weights, so that plain PyTorch has a cast in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.norm(x).bfloat16(), self.up.weight.bfloat16(), self.up.bias.to(torch.bfloat16))
        return x + self.down(F.gelu(y))


class Repeated(nn.Module):
    """Blocks that are called in this order."""

    def __init__(self, order: tuple[int, ...], block: type[nn.Module] = NormedBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(max(order) + 1))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


class SideBySide(Repeated):
    """Calls of one block on the same input, so that the graph alone does not order them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.blocks[index](x * (place + 1)) for place, index in enumerate(self.order)) / 3


class Tied(nn.Module):
    """An embedding, whose weight autocast leaves alone, and heads that share it, whose weight is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(SIZE, SIZE), NormedBlock(), nn.Linear(SIZE, SIZE, bias=False)])
        self.blocks.append(nn.Linear(SIZE, SIZE))
        self.blocks[2].weight = self.blocks[3].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[..., 0] * 7).long() % SIZE
        y = self.blocks[1](self.blocks[0](ids))
        return self.blocks[3](self.blocks[2](y)) + self.blocks[2](y * 2)


class PartlyOutside(Repeated):
    """Every second call is outside of autocast, and every third one under a block of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, index in enumerate(self.order):
            with autocast(enabled=place % 2 == 0):
                x = self.blocks[index](x.float())
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two layers, twice": lambda: Repeated((0, 1, 0, 1)),
    "one layer, five times": lambda: Repeated((0,) * 5),
    "side by side": lambda: SideBySide((0, 1, 0, 0, 1)),
    "cast by hand": lambda: Repeated((0, 1, 0, 1, 0), CastByHand),
    "tied": Tied,
    "partly outside": lambda: PartlyOutside((0, 1, 0, 0, 1, 0, 1)),
}


def under_one(model: nn.Module, dtype: torch.dtype) -> None:
    for step in range(3):
        with autocast(dtype):
            loss = model(batch(step)).float().square().mean()
        loss.backward()


def two_forwards_under_one(model: nn.Module, dtype: torch.dtype) -> None:
    for step in range(2):
        with autocast(dtype):
            first, second = model(batch(step)), model(batch(step + 9))
        (first.float().square().mean() + second.float().mean()).backward()


def each_under_its_own(model: nn.Module, dtype: torch.dtype) -> None:
    outputs = []
    for step in range(3):
        with autocast(dtype):
            outputs.append(model(batch(step)).float())
    sum(output.square().mean() for output in outputs).backward()


def two_backwards(model: nn.Module, dtype: torch.dtype) -> None:
    with autocast(dtype):
        first, second = model(batch(0)).float().square().mean(), model(batch(1)).float().mean()
    first.backward()
    second.backward()


def the_same_backward_twice(model: nn.Module, dtype: torch.dtype) -> None:
    with autocast(dtype):
        loss = model(batch(0)).float().square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    under_one(model, dtype)


def one_is_thrown_away(model: nn.Module, dtype: torch.dtype) -> None:
    with autocast(dtype):
        model(batch(5))
        kept, loss = model(batch(6)), model(batch(0)).float().square().mean()
    loss.backward()
    del kept
    under_one(model, dtype)


def the_last_is_thrown_away(model: nn.Module, dtype: torch.dtype) -> None:
    with autocast(dtype):
        first = model(batch(6)).float().square().mean()
        model(batch(5))
        loss = first + model(batch(0)).float().square().mean()
    loss.backward()


def nothing_is_remembered(model: nn.Module, dtype: torch.dtype) -> None:
    for step in range(2):
        with autocast(dtype, cache_enabled=False):
            first, second = model(batch(step)), model(batch(step + 9))
        (first.float().square().mean() + second.float().mean()).backward()


def the_cache_is_emptied(model: nn.Module, dtype: torch.dtype) -> None:
    with autocast(dtype):
        first = model(batch(0))
        torch.clear_autocast_cache()
        second = model(batch(1))
    (first.float().square().mean() + second.float().mean()).backward()


LOOPS = (
    under_one,
    two_forwards_under_one,
    each_under_its_own,
    two_backwards,
    the_same_backward_twice,
    one_is_thrown_away,
    the_last_is_thrown_away,
    nothing_is_remembered,
    the_cache_is_emptied,
)


CASES = in_turns(list(MODELS), [loop.__name__ for loop in LOOPS])


@pytest.mark.parametrize(("model_name", "loop_name"), CASES)
def test_gradients_are_the_plain_ones(model_name: str, loop_name: str):
    (loop,) = [one for one in LOOPS if one.__name__ == loop_name]
    plain, model = pair(MODELS[model_name])
    with streamed(model):
        loop(model, torch.bfloat16)
        loop(plain, torch.bfloat16)
        assert same(gradients(model), gradients(plain))


def test_gradients_in_half_precision_are_the_plain_ones():
    plain, model = pair(lambda: Repeated((0, 1, 0, 1, 1, 0)))
    with streamed(model):
        two_forwards_under_one(model, torch.float16)
        two_forwards_under_one(plain, torch.float16)
        assert same(gradients(model), gradients(plain))


def test_sums_in_16_bits_are_not_those_in_32():
    """Otherwise the other tests here would show nothing."""
    in_one, each = pair(lambda: Repeated((0, 1, 0, 1)))
    under_one(in_one, torch.bfloat16)
    for step in range(3):
        with autocast(cache_enabled=False):
            loss = each.to(DEVICE)(batch(step)).float().square().mean()
        loss.backward()
    assert not same(gradients(in_one), gradients(each))


def test_a_joint_lives_no_longer_than_the_graph():
    _, model = pair(lambda: Repeated((0, 1, 0)))
    with streamed(model) as streamer:
        with autocast():
            loss = model(batch(0)).mean()
        assert len(streamer.casts) == 2 * 4
        loss.backward()
        let_autograd_finish()
        assert len(streamer.casts) == 0


def test_a_layer_that_casts_a_parameter_twice_under_autocast_is_refused():
    """Plain PyTorch casts it once, and adds up the gradients of both uses in 16 bits."""
    once, twice = Calls((1,), (0,)), Calls((2,), (0,))
    with autocast():
        with streamed(once):
            once(batch(0)).mean().backward()
        with streamed(twice), pytest.raises(RuntimeError, match="more than once under autocast"):
            twice(batch(0))


class Changing(NormedBlock):
    """Lets autocast cast a weight in one call, and uses it as it is in the next."""

    is_cast = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_cast = not self.is_cast
        return super().forward(x) if self.is_cast else x + self.up.weight.sum()


class InBoth(NormedBlock):
    """Uses a weight in 32 bits beside autocast's cast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up.weight.square().mean()


@pytest.mark.parametrize("block", [InBoth, Changing])
def test_a_weight_that_is_cast_and_used_otherwise_is_right_alone_and_refused_in_a_second_call(block: type[nn.Module]):
    plain, model = pair(lambda: Repeated((0,), block))
    with streamed(model):
        for one in (plain, model):
            with autocast():
                one(batch(0)).float().square().mean().backward()
            one.blocks[0].is_cast = False
        assert same(gradients(model), gradients(plain))
        with autocast(), pytest.raises(RuntimeError, match="uses a parameter more than once under autocast"):
            model(batch(0)).mean() + model(batch(1)).mean()
