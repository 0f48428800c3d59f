"""State beside the arguments: a recompute sees what its forward saw, and nothing is changed twice."""

from __future__ import annotations

import collections
import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import memscale
from memscale._execute.executor import Executor
from memscale._plan import Checkpoint
from tests.models import Mlp, small, square_loss
from tests.parity import SELECTIVE, checkpoint_all, seed


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class _Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _train(model: nn.Module) -> list[torch.Tensor]:
    seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen


def _assert_same(model: nn.Module, after_wrap: Callable[[Any], Any] = lambda model: None) -> None:
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    after_wrap(model)
    after_wrap(twin)
    ours, theirs = _train(model), _train(twin)
    memscale.detach(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class _SharedBuffer(_Block):
    def __init__(self) -> None:
        super().__init__()
        mean = torch.zeros(8)
        self.net[0].register_buffer("mean", mean)
        self.net[2].register_buffer("mean", mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.net[0].mean.lerp_(x.mean(0), 0.3)
        return self.net(x * (1 + self.net[2].mean))


class _BufferView(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.zeros(16))
        self.register_buffer("head", self.flat[:8], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.flat[:8].lerp_(x.mean(0), 0.3)
        return self.net(x * (1 + self.head))


class _LateBuffer(_Block):
    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = x.detach().mean(0)
        self.mean = new if self.mean is None else self.mean * 0.9 + new * 0.1
        return self.net(x * (1 + self.mean))


class _LateRegistered(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        else:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.net(x * (1 + self.mean))


class _TensorAttribute(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.net(x * (1 + self.mean))


class _NestedAttribute(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"forward": {"n": 0}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["forward"]["n"] += 1
        return self.net(x * self.counts["forward"]["n"])


class _LaterAttribute(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.scale = 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls > 2:
            self.scale *= 0.5
        return self.net(x * self.scale)


@pytest.mark.parametrize(
    "block",
    [
        _SharedBuffer,
        _BufferView,
        _LateBuffer,
        _LateRegistered,
        _TensorAttribute,
        _NestedAttribute,
        _LaterAttribute,
    ],
)
def test_state_that_a_forward_changes(block: Callable[[], nn.Module]) -> None:
    _assert_same(_Chain(block))


class _Tally:
    """An object of the user's."""

    def __init__(self) -> None:
        self.num_calls, self.mean, self.rng = 0, torch.zeros(8), random.Random(1)


class _SlottedTally:
    __slots__ = ("num_calls",)

    def __init__(self) -> None:
        self.num_calls = 0


def _count(tally: Any, x: torch.Tensor) -> float:
    tally.num_calls += 1
    return float(tally.num_calls)


def _average(tally: _Tally, x: torch.Tensor) -> torch.Tensor:
    return tally.mean.lerp_(x.detach().mean(0), 0.1)


def _tick(counts: dict[str, int], x: torch.Tensor) -> float:
    counts["calls"] += 1
    return float(counts["calls"])


def _add(numbers: Any, x: torch.Tensor) -> float:
    numbers[0] += 1
    return float(numbers[0])


def _grow(raw: bytearray, x: torch.Tensor) -> float:
    raw.append(1)
    return float(len(raw))


HELD = [
    (_Tally, _count),
    (_Tally, _average),
    (_Tally, lambda tally, x: tally.rng.random()),
    (_SlottedTally, _count),
    (lambda: [{"tally": _Tally()}], lambda held, x: _count(held[0]["tally"], x)),
    (collections.Counter, _tick),
    (lambda: collections.defaultdict(int), _tick),
    (lambda: collections.UserDict(calls=0), _tick),
    (lambda: numpy.zeros(2), _add),
    (lambda: [torch.zeros(8)], lambda held, x: held[0].lerp_(x.detach().mean(0), 0.1)),
    (lambda: {"mean": torch.zeros(8)}, lambda held, x: held["mean"].lerp_(x.detach().mean(0), 0.1)),
    (lambda: bytearray(b"a"), _grow),
]


class _Holds(_Block):
    def __init__(self, make: Callable[[], Any], use: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.held, self.use = make(), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * (1 + self.use(self.held, x)))


@pytest.mark.parametrize(("make", "use"), HELD)
def test_what_an_attribute_holds_and_a_forward_changes(
    make: Callable[[], Any], use: Callable[[Any, torch.Tensor], Any]
) -> None:
    model = _Chain(lambda: _Holds(make, use))
    held = [block.held for block in model.blocks]  # type: ignore[union-attr]
    _assert_same(model)
    assert all(block.held is before for block, before in zip(model.blocks, held, strict=True))  # type: ignore[union-attr]


class _Moves(_Block):
    """Its first forward takes what a parameter carries and keeps it elsewhere, as 8-bit layers of bitsandbytes do."""

    def __init__(self) -> None:
        super().__init__()
        self.held = _Tally()
        self.net[0].weight.scale = torch.tensor(3.0)  # type: ignore[union-attr, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.net[0].weight
        if weight.scale is not None:  # type: ignore[union-attr]
            self.held.scale, weight.scale = weight.scale, None  # type: ignore[union-attr, assignment, attr-defined]
        scale = getattr(self.held, "scale", None)
        return self.net(x * (1.0 if scale is None else scale))


def test_what_a_parameter_carries_is_there_again_for_the_recompute() -> None:
    """Copies of a parameter leave its attributes behind, so each model is made by itself."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_Chain(_Moves))
    checkpoint_all(models[0])
    ours, theirs = map(_train, models)
    memscale.detach(models[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(block.net[0].weight.scale is None for block in models[0].blocks)  # type: ignore[union-attr, index]


def test_8_bit_weights_of_bitsandbytes_have_the_same_gradients() -> None:
    from bitsandbytes.nn import Linear8bitLt

    class Packed(_Block):
        def __init__(self) -> None:
            super().__init__()
            plain = nn.Linear(8, 8)
            self.packed = Linear8bitLt(8, 8, has_fp16_weights=False)
            self.packed.load_state_dict(plain.state_dict())
            self.packed.to("cpu")  # packs

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.packed(x))

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_Chain(Packed))
    assert models[0].blocks[0].packed.weight.dtype == torch.int8  # type: ignore[union-attr, index]
    checkpoint_all(models[0])
    ours, theirs = map(_train, models)
    memscale.detach(models[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_object_that_blocks_share_shows_each_of_them_what_it_saw() -> None:
    tally = _Tally()
    _assert_same(_Chain(lambda: _Holds(lambda: tally, _count)))


def test_a_large_tensor_in_a_container_that_is_changed_in_place_is_refused_once() -> None:
    def use(held: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return held[0].add_(1)[0]

    model = _Chain(lambda: _Holds(lambda: [torch.zeros(300_000)], use))
    twin = copy.deepcopy(model)
    executor = checkpoint_all(model)
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="attribute 'held' of _Holds was changed in place"):
        model(x).square().mean().backward()
    model.zero_grad()
    twin(x)
    for trained in (model, twin):
        trained(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    executor.detach()


class _State:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _StateBlock(_Block):
    def forward(self, state: _State) -> _State:
        state.hidden = state.hidden + self.net(state.hidden)
        return state


def test_a_plain_object_among_the_arguments_that_the_block_changes_is_refused() -> None:
    """Every recompute would find the object as the last block left it."""
    model, state = _Chain(_StateBlock), _State(torch.randn(4, 8))
    checkpoint_all(model)
    with pytest.raises(RuntimeError, match=r"blocks\.0 changes its input in place"):
        model.blocks[0](state)
    del state.hidden  # it holds the graph, and the graph holds the arguments
    memscale.detach(model)


class _LateTensor(_Block):
    """An attribute's tensor is changed in place from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.scale = 0, torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls > 2:
            self.scale.mul_(0.5)
        return self.net(x * self.scale)


def test_a_tensor_that_is_changed_late_is_refused_once() -> None:
    model = _Chain(_LateTensor)
    checkpoint_all(model)
    x = torch.randn(4, 8)
    for _ in range(2):
        model(x).sum().backward()
    for _ in range(3):  # once for each block
        with pytest.raises(RuntimeError, match="'scale' of _LateTensor was changed in place"):
            model(x).sum().backward()
    model(x).sum().backward()
    memscale.detach(model)


class _LateTensorBesideStatistics(_LateTensor):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rate = nn.BatchNorm1d(8), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x)) * self.rate


def test_a_refusal_leaves_the_module_as_it_was() -> None:
    """It comes in backward: nothing that a recompute would have been shown may stay."""
    model = _Chain(_LateTensorBesideStatistics)
    checkpoint_all(model)
    x = torch.randn(4, 8)
    for _ in range(2):
        model(x).sum().backward()
    loss = model(x).sum()
    for block in model.blocks:
        block.rate = 0.25
    buffers, values = list(model.buffers()), [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(RuntimeError, match="'scale' of _LateTensorBesideStatistics was changed in place"):
        loss.backward()
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), values, strict=True))
    assert [block.rate for block in model.blocks] == [0.25] * 3
    memscale.detach(model)


class _PlainBlock(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


def _put_batch_norm(model: Any) -> None:
    for block in model.blocks:
        block.net[1] = nn.BatchNorm1d(32)


def _put_spectral_norm(model: Any) -> None:
    seed()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.net[0])


@pytest.mark.parametrize("change", [_put_batch_norm, _put_spectral_norm])
def test_parts_that_are_put_in_after_wrap(change: Callable[[Any], Any]) -> None:
    model = _Chain(_PlainBlock)
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    change(model)
    change(twin)
    assert all(torch.equal(a, b) for a, b in zip(_train(model), _train(twin), strict=True))
    memscale.detach(model)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


# ---- between forward and backward


@pytest.mark.parametrize(
    "change",
    [
        lambda model: [setattr(block.dropout, "p", 0.5) for block in model.blocks],
        lambda model: model.eval(),
        lambda model: [setattr(block, "norm_scale", 7) for block in model.blocks],
        lambda model: [delattr(block.norm, "eps") or setattr(block.norm, "eps", 1.0) for block in model.blocks],
    ],
    ids=["a rate", "the training mode", "a new attribute", "an attribute made anew"],
)
def test_what_is_set_between_forward_and_backward_does_not_reach_the_recompute(change: Any) -> None:
    plain = Mlp(width=16, depth=3)
    checkpointed = copy.deepcopy(plain)
    executor = Executor(checkpointed)
    executor.attach([Checkpoint(f"blocks.{index}") for index in range(3)])
    for _ in range(2):
        for model in (plain, checkpointed):
            torch.manual_seed(1)
            model.train()
            loss = model(torch.ones(4, 16)).square().sum()
            change(model)
            loss.backward()
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(checkpointed.modules(), plain.modules(), strict=True):
        assert ours.training == theirs.training
    assert checkpointed.blocks[0].dropout.p == plain.blocks[0].dropout.p
    assert checkpointed.blocks[0].norm.eps == plain.blocks[0].norm.eps
    executor.detach()


def test_what_a_forward_replaced_dies_at_once() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(8, 8), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.inner(x).detach()
            return self.last + self.inner(x)

    model = nn.Sequential(Keeps())
    executor = Executor(model)
    executor.attach([Checkpoint("0")])
    for _ in range(2):  # the second forward knows which attributes change
        model(torch.ones(2, 8)).sum().backward()
    earlier = weakref.ref(model[0].last)
    model(torch.ones(2, 8)).sum().backward()
    assert earlier() is None
    executor.detach()


def test_an_executor_that_outlives_its_model_holds_none_of_its_parameters() -> None:
    model = small()
    executor = checkpoint_all(model)
    parts = [weakref.ref(parameter) for parameter in model.parameters()]
    square_loss(model(torch.ones(4, 16))).backward()
    del model
    gc.collect()
    assert executor.plan is not None
    assert [part for part in parts if part() is not None] == []


class _Normed(_Block):
    """Its statistics cannot be told to change by what the first step leaves: a mean of zero, or no run at all."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first, self.num_calls = first, 0
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("stats", torch.zeros(2, 8))
        self.register_buffer("mean_of_stats", self.stats[0], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 1 and self.first == "dropped":
            return self.net(x)
        if self.num_calls == 1:
            x = x - x
        self.stats.data[0].lerp_(x.detach().mean(0), 0.5)
        return self.net(self.norm(x) + self.mean_of_stats)


@pytest.mark.parametrize("first", ["zero", "dropped"])
@pytest.mark.parametrize("keep", [(), SELECTIVE])
@pytest.mark.parametrize("stay_in_evaluation", [False, True])
def test_statistics_that_a_first_forward_left_alone_are_counted_once(
    first: str, stay_in_evaluation: bool, keep: tuple[Any, ...]
) -> None:
    model = _Chain(lambda: _Normed(first))
    if stay_in_evaluation:  # the flags of the other parts decide what was learned, too
        model.blocks[0].net.eval()
    twin = copy.deepcopy(model)
    checkpoint_all(model, keep)
    ours, theirs = _train(model), _train(twin)
    memscale.detach(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    assert twin.blocks[0].norm.num_batches_tracked == 4 - (first == "dropped")


_GLOBAL_STATISTICS: list[torch.Tensor] = []


class _Statistics(_Block):
    """Normalises by statistics that are no buffers, from the second call on, and looks at them before and after."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.num_calls = place, 0
        mean, var = torch.zeros(8), torch.ones(8)
        if place == "attribute":
            self.mean, self.var = mean, var
        elif place == "list":
            self.held = [mean, var]
        elif place == "rows":
            self.rows = {"all": torch.stack([mean, var])}
        elif place == "module":
            self.hidden = [nn.BatchNorm1d(8)]
        elif place == "closure":
            self.find = lambda: (mean, var)
        elif place == "global":
            _GLOBAL_STATISTICS[:] = [mean, var]
        elif place == "buffers":  # known by another name as well
            self.register_buffer("mean", mean)
            self.register_buffer("var", var)
            self.held = [mean, var]

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.place == "attribute":
            return self.mean, self.var
        if self.place == "rows":
            return self.rows["all"][0], self.rows["all"][1]
        if self.place == "module":
            norm = self.hidden[0]
            return norm.running_mean, norm.running_var
        if self.place == "closure":
            return self.find()
        mean, var = _GLOBAL_STATISTICS if self.place == "global" else self.held
        return mean, var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 1:
            return self.net(x)
        mean, var = self.statistics()
        x = x * (1 + mean.clone())
        x = functional.batch_norm(x, mean, var, training=True, momentum=0.3)
        return self.net(x + mean.clone() * var.clone())


@pytest.mark.parametrize("keep", [(), SELECTIVE])
@pytest.mark.parametrize("place", ["attribute", "list", "rows", "module", "closure", "global", "buffers"])
def test_statistics_that_are_no_buffers_are_counted_once(place: str, keep: tuple[Any, ...]) -> None:
    seen = []
    for wrapped in (True, False):
        seed(3)
        model = _Chain(lambda: _Statistics(place))
        executor = checkpoint_all(model, keep) if wrapped else None
        seen.append([*_train(model), *(t.clone() for block in model.blocks for t in block.statistics())])
        if executor is not None:
            executor.detach()
    _GLOBAL_STATISTICS.clear()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


class _Scratch(_Block):
    """Counts in a tensor that is too large to be copied at every step."""

    def __init__(self) -> None:
        super().__init__()
        counts = torch.zeros(1 << 16)
        self.count = lambda: counts.add_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * self.count()[0])


def test_a_large_tensor_of_a_closure_that_is_changed_in_place_is_refused() -> None:
    model = _Chain(_Scratch)
    checkpoint_all(model)
    with pytest.raises(RuntimeError, match="a global, a closure or an object, was changed in place by this forward"):
        model(torch.randn(4, 8))
    memscale.detach(model)


_GLOBAL_CODEBOOK: list[torch.Tensor] = []


class _Quantizer(_Block):
    """Keeps a moving average in a large tensor, which it writes to without autograd being told."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        codebook = torch.zeros(300, 64)  # above what is copied before every forward
        if place == "attribute":
            self.codebook = codebook
        elif place == "list":
            self.held = [codebook]
        elif place == "closure":
            self.find = lambda: codebook
        elif place == "global":
            _GLOBAL_CODEBOOK[:] = [codebook]
        elif place == "parameter":
            self.codebook = nn.Parameter(codebook, requires_grad=False)

    def look_up(self) -> torch.Tensor:
        if self.place in ("attribute", "parameter"):
            return self.codebook
        if self.place == "closure":
            return self.find()
        return (_GLOBAL_CODEBOOK if self.place == "global" else self.held)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codebook = self.look_up()
        scale = 1 + codebook[0, 0].clone()
        codebook.data.mul_(0.7).add_(x.detach().mean())
        return self.net(x * scale)


@pytest.mark.parametrize("keep", [(), SELECTIVE])
@pytest.mark.parametrize("place", ["attribute", "list", "closure", "global"])
def test_large_tensors_that_are_written_to_in_silence_are_written_to_once(place: str, keep: tuple[Any, ...]) -> None:
    seen = []
    for wrapped in (True, False):
        seed(3)
        model = _Chain(lambda: _Quantizer(place))
        executor = checkpoint_all(model, keep) if wrapped else None
        seen.append([*_train(model), *(block.look_up().clone() for block in model.blocks)])
        if executor is not None:
            executor.detach()
    _GLOBAL_CODEBOOK.clear()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_parameter_that_is_written_to_in_silence_is_refused_once() -> None:
    model = _Chain(lambda: _Quantizer("parameter"))
    executor = checkpoint_all(model)
    for _ in model.blocks:
        with pytest.raises(
            RuntimeError, match=r"changed by this forward without autograd being told \(through .data\)"
        ):
            model(torch.randn(4, 8))
    twin = copy.deepcopy(model)
    for trained in (model, twin):
        seed(4)
        trained(torch.randn(4, 8)).sum().backward()
    executor.detach()
    for block, other in zip(model.blocks, twin.blocks, strict=True):
        assert torch.equal(block.codebook, other.codebook)
        assert torch.equal(block.net[0].weight.grad, other.net[0].weight.grad)
