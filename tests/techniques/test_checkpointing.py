"""What checkpointing keeps, recomputes and refuses; that it frees memory, in absolute bytes."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memscale
from memscale import Config, MemScaleError
from memscale._execute.executor import execute
from memscale._plan import Checkpoint
from memscale.techniques.checkpointing.checkpointed_forward import _draws_random_numbers, attach
from tests.models import WIDTH, Case, Chain, Mlp, TwoLinears, case, odd, square_loss
from tests.parity import SELECTIVE, assert_same_training, checkpoint_all, plan_of, seed

pytestmark = pytest.mark.unit
F32 = 4


class Counted(nn.Module):
    """Counts every run, recomputes included: beside the module, where nothing is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NUM_RUNS[self] = NUM_RUNS.get(self, 0) + 1
        return torch.tanh(self.linear(x))


NUM_RUNS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """What a forward leaves behind, its output included."""
    gc.collect()
    with memscale.measure("cpu") as before:
        pass
    output = model(x)
    with memscale.measure("cpu") as after:
        pass
    assert output.requires_grad
    return after.peak_bytes - before.peak_bytes


class Twice(nn.Module):
    """A block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TwoLinears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x))


def test_a_block_that_is_called_again_under_one_autocast_keeps_its_products() -> None:
    """The forward of the second call finds the casts of the weights made, and its recompute makes them."""
    plain = Twice()
    model = copy.deepcopy(plain)
    with contextlib.ExitStack() as undo:
        attach(Checkpoint("block", keep=("matmul",)), model.block, undo)
        for one in (plain, model):
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(torch.ones(4, WIDTH)).float().square().mean()
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Wide(nn.Module):
    """y = relu(x A) B: keeps relu's result of 10 times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 160, bias=False), nn.Linear(160, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def test_bytes_kept_by_hand() -> None:
    """A batch of 32: relu's result is 32 x 160, a block's output 32 x 16."""
    blocks, x = 3, torch.randn(32, 16)
    inner, output = 32 * 160 * F32, 32 * 16 * F32
    model = nn.Sequential(*(Wide() for _ in range(blocks)))
    assert kept_bytes(model, x) == blocks * (inner + output)
    executor = checkpoint_all(model)
    kept_bytes(model, x)  # what changes is learned at the first forward
    slack = blocks * 20_000  # RNG states of torch, Python and NumPy
    assert kept_bytes(model, x) <= blocks * output + slack
    executor.detach()
    assert kept_bytes(model, x) == blocks * (inner + output)


def test_selective_keeps_matmuls_and_recomputes_the_rest() -> None:
    x = torch.randn(32, 16)
    inner, output = 32 * 160 * F32, 32 * 16 * F32
    model = nn.Sequential(Wide())
    checkpoint_all(model, keep=("matmul",))
    kept_bytes(model, x)
    assert inner + output <= kept_bytes(model, x) <= inner + 2 * output + 20_000


def test_only_a_backward_recomputes() -> None:
    model = Chain(Counted(), Counted())
    x = torch.randn(4, 16)
    executor = checkpoint_all(model)
    loss = square_loss(model(x))
    assert [NUM_RUNS[block] for block in model.blocks] == [1, 1]
    loss.backward()
    assert [NUM_RUNS[block] for block in model.blocks] == [2, 2]
    assert executor.stats().num_recomputes == 2
    with torch.no_grad():
        model(x)
    assert [NUM_RUNS[block] for block in model.blocks] == [3, 3]


def test_what_needs_no_gradient_is_not_recomputed() -> None:
    model = Chain(Counted(), Counted())
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    executor = checkpoint_all(model)
    square_loss(model(torch.randn(4, 16))).backward()
    assert executor.stats().num_recomputes == 0


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_with_dropout_is_never_kept(p: float) -> None:
    """A kept operator does not advance the RNG in the recompute; dropout after it would draw other numbers."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.ones(1, 1, 2, 4)
    assert _draws_random_numbers(op, (q, q, q, p), {}) == (p > 0)
    assert _draws_random_numbers(op, (q, q, q), {"dropout_p": p}) == (p > 0)
    assert not _draws_random_numbers(op, (q, q, q), {})


class Attention(nn.Module):
    """Attention without dropout, then dropout: the second must see the RNG where the forward saw it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0).squeeze(1)
        return x + F.dropout(self.out(F.dropout(attended, 0.3)), 0.3)


@pytest.mark.parametrize("keep", [(), ("matmul",), ("attention",), SELECTIVE], ids=str)
def test_dropout_after_attention(keep: Any) -> None:
    entry = Case("attention", lambda: Chain(*(Attention() for _ in range(3))), odd("lstm").batch, square_loss)
    assert_same_training(entry, lambda model: checkpoint_all(model, keep=keep))


# ---- what is refused, clearly


def test_parameters_changed_between_forward_and_backward() -> None:
    """PyTorch refuses this for the plain model; a recompute with the new weights would be silently wrong."""
    for wrapped in (False, True):
        model = Chain(TwoLinears(), TwoLinears())
        if wrapped:
            checkpoint_all(model)
        loss = square_loss(model(torch.randn(4, 16)))
        with torch.no_grad():
            model.blocks[0].down.weight.add_(1.0)
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            loss.backward()


def test_a_buffer_that_changes_only_later_is_refused_once() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("scale", torch.ones(1, 1))  # small vectors are copied at any rate
            self.grows = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.grows:
                self.scale.add_(1)
            return self.linear(x) * self.scale

    model, x = Chain(Late()), torch.randn(4, 16)
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    square_loss(model(x)).backward()
    model.blocks[0].grows = twin.blocks[0].grows = True
    with pytest.raises(RuntimeError, match="'scale' of Late"):
        model(x)
    twin(x)
    for each in (model, twin):
        each.zero_grad()
        square_loss(each(x)).backward()
    assert torch.equal(model.blocks[0].linear.weight.grad, twin.blocks[0].linear.weight.grad)


# ---- the functional way


def test_functional_call_uses_the_parameters_it_was_given() -> None:
    """Others are in place when the recompute comes; it must find those of the forward."""
    seed(1)
    model = Chain(TwoLinears(), TwoLinears())
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    x = torch.randn(4, 16)
    gradients = []
    for each in (model, twin):
        given = {name: (p * 1.5).detach().requires_grad_() for name, p in each.named_parameters()}
        loss = square_loss(torch.func.functional_call(each, given, x))
        gradients.append(torch.autograd.grad(loss, list(given.values())))
        assert all(p.grad is None for p in each.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_functional_transforms_keep_everything_and_are_right() -> None:
    model = Chain(TwoLinears(), TwoLinears())
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    parameters, x = dict(twin.named_parameters()), torch.randn(3, 16)

    def loss(module: nn.Module, given: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return square_loss(torch.func.functional_call(module, given, row))

    wanted = torch.func.vmap(lambda row: torch.func.grad(lambda p: loss(twin, p, row))(parameters))(x)
    found = torch.func.vmap(lambda row: torch.func.grad(lambda p: loss(model, p, row))(parameters))(x)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_compiled_blocks() -> None:
    """A block that the user has compiled is checkpointed from the outside."""
    seed(1)
    model = Mlp(depth=2)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.blocks[0] = torch.compile(each.blocks[0], backend="eager")
    checkpoint_all(model)
    x = torch.randn(4, 64)
    results = []
    for each in (model, twin):
        seed()
        square_loss(each(x)).backward()
        results.append([p.grad for p in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- what the module does stays as it was


def test_attributes_change_once_a_forward() -> None:
    class Noting(TwoLinears):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.trail, self.seen = 0, [], {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.trail.append(self.calls)
            self.seen[self.calls] = True
            self.last = x.detach()
            return super().forward(x)

    model: Any = Chain(Noting(), Noting())
    checkpoint_all(model)
    for step in range(1, 4):
        square_loss(model(torch.randn(4, 16))).backward()
        for block in model.blocks:
            assert block.calls == step
            assert block.trail == list(range(1, step + 1))
            assert list(block.seen) == block.trail


def test_stateful_blocks_carry_their_state() -> None:
    """Hidden state from step to step, as truncated backpropagation through time does it."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.hidden = nn.GRUCell(16, 16), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.zeros_like(x) if self.hidden is None else self.hidden
            after = self.cell(x, before)
            self.hidden = after.detach()
            return x + after

    entry = Case("stateful", lambda: Chain(*(Stateful() for _ in range(3))), odd("keywords only").batch, square_loss)
    assert_same_training(entry, checkpoint_all)


def test_hooks_of_the_user_see_each_forward_once() -> None:
    model = Chain(TwoLinears(), TwoLinears())
    calls: list[str] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append("block"))
    model.blocks[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpoint_all(model)
    square_loss(model(torch.randn(4, 16))).backward()
    assert calls == ["block", "backward"]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert"])
def test_the_peak_falls_in_bytes(name: str) -> None:
    entry = case(name)
    peaks = []
    for treat in (False, True):
        seed(1)
        model = entry.build()
        if treat:
            checkpoint_all(model)
        batch = entry.batch(0)
        gc.collect()
        with memscale.measure("cpu") as measured:
            entry.loss(model(**batch)).backward()
        peaks.append(measured.breakdown["activations"])
        del model
    assert peaks[1] < 0.75 * peaks[0]


class Products(TorchDispatchMode):
    """Counts the products of linear layers that are really computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("keep", "num_products"), [(("attention",), 2), (("matmul",), 0), (("matmul", "attention"), 0)]
)
def test_plans_name_operators_to_keep(keep: tuple[str, ...], num_products: int) -> None:
    """Of the two products of a block, as many are computed again as are not kept."""
    counts, gradients = [], []
    for plan in (plan_of([]), plan_of([Checkpoint("blocks.0", keep=keep)])):
        seed(1)
        model, x = Mlp(depth=1), torch.randn(4, 64)
        executor = execute(model, plan)
        with Products() as products:
            square_loss(model(x)).backward()
        counts.append(products.count)
        gradients.append([parameter.grad for parameter in model.parameters()])
        executor.detach()
    assert counts[1] - counts[0] == num_products
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---- what is kept is not written to


class Writes(nn.Module):
    """Changes the output of a matrix product through a view that has a version counter of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8, bias=False)
        self.gru = nn.GRU(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "gru":
            output: torch.Tensor = self.gru(x)[0]
            return output
        y: torch.Tensor = self.linear(x)
        if self.how == "data":
            y.data.mul_(2)
        else:
            y += x
        return torch.tanh(y) * x


@pytest.mark.parametrize("how", ["gru", "residual", "data"])
def test_a_kept_output_that_is_written_to_is_refused_and_never_planned(how: str) -> None:
    def train(wrapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Writes(how) for _ in range(3)))
        sample = torch.randn(3, 4, 8)
        if wrapped:
            config = Config(mode="conservative", force_optimize=True, enable_logging=False)  # type: ignore[arg-type]
            memscale.wrap(model, config, sample)
        model(sample).square().mean().backward()
        if wrapped:
            memscale.detach(model)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, planned = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))

    model = nn.Sequential(Writes(how))
    with contextlib.ExitStack() as undo:
        attach(Checkpoint("0", keep=("matmul",)), model[0], undo)
        with pytest.raises(MemScaleError, match=r"in 0 changes the output of a matrix product .* in place"):
            model(torch.randn(3, 4, 8))


class Escapes(nn.Module):
    """Gives away the output of a matrix product that it has used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, torch.tanh(y) * x


def test_a_kept_output_that_is_written_to_after_its_block_is_refused() -> None:
    block, x = Escapes(), torch.randn(3, 4, 8)
    with contextlib.ExitStack() as undo:
        attach(Checkpoint("b", keep=("matmul",)), block, undo)
        y, z = block(x)
        (y * z).sum().backward()
        y, z = block(x)
        y += x
        with pytest.raises(MemScaleError, match=r"^what comes after b changes"):
            (y * z).sum().backward()
