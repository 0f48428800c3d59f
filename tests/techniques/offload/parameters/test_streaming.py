"""Streamed parameters: the same training, bit for bit, and nothing odd for anyone who looks at the model."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import simgpu
from memscale._errors import PlanError
from memscale._plan import StreamParameters
from memscale.techniques.offload.parameters import streaming
from tests.lanes import in_turns
from tests.models import SUITE, Case
from tests.parity import equal
from tests.techniques.offload.runs import (
    DEVICE,
    MODES,
    WIDTH,
    Block,
    Boom,
    Gpt,
    Run,
    backward,
    explode,
    gradients,
    let_autograd_finish,
    loss_of,
    pair,
    same,
    streamed,
    streamed_actions,
    tokens,
    train,
    weights,
    without_caches,
)


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    """No test here may race, or leave device or pinned bytes behind."""
    yield
    let_autograd_finish()


def assert_same_gradients(build: Any, asynchronous: bool, loss: Any = None, num_backwards: int = 2) -> None:
    plain, model = pair(build)
    with streamed(model, asynchronous):
        for step in range(num_backwards):
            assert torch.equal(backward(model, step, loss), backward(plain, step, loss))
        assert same(gradients(model), gradients(plain))
    assert same(gradients(model), gradients(plain))


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize(("case", "way"), in_turns(SUITE, ("sync", "async"), whole=["gpt2"]))
def test_trains_the_same(case: Case, way: str, plain_runs: dict[str, Run]):
    plain, model = pair(lambda: without_caches(case.build()))
    if case.name not in plain_runs:
        plain_runs[case.name] = train(plain, case)
    del plain
    with streamed(model, way == "async") as streamer:
        train(model, case).assert_same(plain_runs[case.name])
        assert streamer.stats.num_visits > 0
        assert all(p.device.type == "cpu" for p in streamer.parameters())
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_order_in_which_copies_run_does_not_matter(seed: int):
    plain, model = pair(Gpt)
    case = Case("gpt", Gpt, lambda n: {"ids": tokens(n)}, lambda logits: logits.square().mean())
    theirs = train(plain, case, steps=2)
    simgpu.set_schedule_seed(seed)
    with streamed(model, prefetch_depth=1 + seed % 2, gradient_window_bytes=1 << (10 + seed)):
        train(model, case, steps=2).assert_same(theirs)


@MODES
def test_in_bfloat16_autocast(asynchronous: bool):
    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("simgpu", dtype=torch.bfloat16):
            return loss_of(model)

    assert_same_gradients(Gpt, asynchronous, loss)


# ---------------------------------------------------------------------------------------------- shared, frozen, unused


def tied_in_block() -> nn.Module:
    model = Gpt()
    for block in model.blocks:
        block.norm2.weight = block.norm1.weight
    return model


def tied_across_blocks() -> nn.Module:
    model = Gpt()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def one_dropout_for_all() -> nn.Module:
    model = Gpt()
    for block in model.blocks:
        block.dropout = model.blocks[0].dropout
    return model


def tied_with_resident() -> nn.Module:
    model = Gpt()
    model.blocks[1].norm1.weight = model.norm.weight
    return model


def partly_frozen() -> nn.Module:
    model = Gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" not in name and "blocks.1" not in name)
    return model


def lower_frozen() -> nn.Module:
    model = Gpt(4)
    for parameter in (*model.embed.parameters(), *model.blocks[:2].parameters()):
        parameter.requires_grad_(False)
    return model


class CalledTwice(Gpt):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(super().run(x))


class Skipping(Gpt):
    def __init__(self) -> None:
        super().__init__(4)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[3](self.blocks[0](x)) + self.blocks[2](x)


class Backwards(Gpt):
    """Runs its layers in another order than they are registered in."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Conditional(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate[0]


class Captured(Gpt):
    """Its blocks read a tensor with a gradient that they were not given."""

    def __init__(self) -> None:
        super().__init__(0)
        self.gain = nn.Parameter(torch.ones(1))
        self.cell: list[Any] = [None]
        self.blocks.extend(Conditional() for _ in range(2))
        for block in self.blocks:
            block.gate = self.cell

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.cell[0] = self.gain * 2
        return super().run(x)


class SelfCheckpointed(Gpt):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Transposed(Block):
    """Weights that are not contiguous, and gradients with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH).t() * 0.1)
        self.both = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2] * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.both


class WithTransposed(Gpt):
    def __init__(self) -> None:
        super().__init__(1)
        self.blocks.append(Transposed())


@MODES
@pytest.mark.parametrize(
    "build",
    [
        tied_in_block,
        tied_across_blocks,
        one_dropout_for_all,
        tied_with_resident,
        partly_frozen,
        lower_frozen,
        CalledTwice,
        Skipping,
        Backwards,
        Captured,
        SelfCheckpointed,
        WithTransposed,
    ],
)
def test_gradients_are_the_same_for(build: Any, asynchronous: bool):
    assert_same_gradients(build, asynchronous, num_backwards=3)


@MODES
def test_parameters_that_share_memory_only_share_it_at_home_and_afterwards(asynchronous: bool):
    def build() -> nn.Module:
        model = Gpt(2)
        joint = torch.randn(2 * WIDTH, WIDTH) * 0.1
        model.blocks[0].mix.weight = nn.Parameter(joint[:WIDTH])
        model.blocks[1].mix.weight = nn.Parameter(joint[WIDTH // 2 : WIDTH // 2 + WIDTH])
        return model

    torch.manual_seed(0)
    model = build()
    first, second = model.blocks[0].mix.weight, model.blocks[1].mix.weight
    with streamed(model, asynchronous):
        backward(model)
        with torch.no_grad():
            first[WIDTH // 2 :].fill_(3.0)
        assert torch.equal(second[: WIDTH // 2], torch.full((WIDTH // 2, WIDTH), 3.0))
    with torch.no_grad():
        first.fill_(4.0)
    assert torch.equal(second[: WIDTH // 2], torch.full((WIDTH // 2, WIDTH), 4.0))


@MODES
def test_requires_grad_can_be_toggled_between_steps(asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        for step in range(3):
            for either in (plain, model):
                either.zero_grad()
                either.blocks[0].up.requires_grad_(step == 1)
                backward(either, step)
            assert same(gradients(model), gradients(plain))


# --------------------------------------------------------------------------------------------- unusual ways to call it


@MODES
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(context: Any, asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        for step in range(2):
            assert torch.equal(backward(model, step), backward(plain, step))
            with context():
                assert torch.equal(model.eval()(tokens(9)), plain.eval()(tokens(9)))
            for either in (model, plain):
                either.train()
                with torch.no_grad():
                    for parameter in either.parameters():
                        parameter.mul_(1.01)
        assert same(gradients(model), gradients(plain))


def test_weights_may_be_written_to_right_after_an_evaluation():
    """The host waits for the copies out of the homes: simgpu reports who writes too early."""
    plain, model = pair(lambda: Gpt(4))
    with streamed(model), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model.eval()(tokens()), plain.eval()(tokens()))
            for either in (model, plain):
                for parameter in either.parameters():
                    parameter.data.mul_(1.1)


@MODES
def test_retain_graph(asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        for either in (model, plain):
            torch.manual_seed(0)
            loss = loss_of(either)
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
        assert same(gradients(model), gradients(plain))


@MODES
def test_two_forwards_before_one_backward(asynchronous: bool):
    def loss(model: nn.Module) -> torch.Tensor:
        return loss_of(model, 1) * loss_of(model, 2)

    assert_same_gradients(Gpt, asynchronous, loss)


@MODES
def test_autograd_grad_leaves_grad_alone(asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        found = []
        for either in (model, plain):
            torch.manual_seed(0)
            found.append(torch.autograd.grad(loss_of(either), list(either.parameters())))
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True))
        assert all(p.grad is None for p in model.parameters())


@MODES
def test_hooks_on_parameters(asynchronous: bool):
    plain, model = pair(Gpt)
    seen: list[torch.Tensor] = []
    with streamed(model, asynchronous):
        for either in (model, plain):
            either.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)
            either.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().cpu()))
            backward(either)
        assert len(seen) == 2
        assert torch.equal(*seen)
        assert same(gradients(model), gradients(plain))


@MODES
def test_optimizer_in_backward(asynchronous: bool):
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        for either in (model, plain):
            for parameter in either.parameters():
                parameter.register_post_accumulate_grad_hook(step)
            for number in range(3):
                backward(either, number)
        assert same(weights(model), weights(plain))


@MODES
def test_anomaly_detection(asynchronous: bool):
    def loss(model: nn.Module) -> torch.Tensor:
        return loss_of(model)

    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert_same_gradients(Gpt, asynchronous, loss, num_backwards=1)


@MODES
def test_a_default_device(asynchronous: bool):
    with torch.device(DEVICE):
        plain, model = Gpt(), Gpt().cpu()
        model.load_state_dict(plain.state_dict())
        with streamed(model, asynchronous):
            assert torch.equal(backward(model), backward(plain))
            assert same(gradients(model), gradients(plain))


@MODES
def test_a_gradient_penalty_on_inputs(asynchronous: bool):
    """The second derivative passes through the weights, not through their gradients."""

    def penalty(model: Gpt) -> torch.Tensor:
        x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
        (slope,) = torch.autograd.grad(model.run(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    assert_same_gradients(lambda: Gpt(2, dropout=0.0), asynchronous, penalty)


@MODES
def test_differentiating_gradients_of_parameters_is_refused(asynchronous: bool):
    _, model = pair(lambda: Gpt(2))
    with streamed(model, asynchronous):
        with pytest.raises(NotImplementedError, match=r"blocks\.1's parameters cannot be differentiated again"):
            loss_of(model).backward(create_graph=True)
        model.zero_grad()


@MODES
def test_a_weight_changed_between_forward_and_backward_is_refused(asynchronous: bool):
    _, model = pair(lambda: Gpt(2))
    with streamed(model, asynchronous):
        loss = loss_of(model)
        with torch.no_grad():
            model.blocks[0].up.bias.add_(1)
        with pytest.raises(RuntimeError, match="was changed"):
            loss.backward()
        del loss
        model.zero_grad()


# ---------------------------------------------------------------------------------------------- optimizers and scaling

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int = 2) -> None:
    for step in range(first, first + count):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


@MODES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_before_while_and_after_streaming(name: str, asynchronous: bool):
    """Wrapped in the middle of a run: the optimizer's state goes home with its parameters, and comes back with them."""
    plain, model = pair(Gpt)
    model.to(DEVICE)
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    steps(plain, theirs, 0, 6)
    steps(model, ours, 0)
    identities = [id(p) for p in model.parameters()]
    on_device = torch.accelerator.memory_allocated()
    with streamed(model, asynchronous):
        assert torch.accelerator.memory_allocated() < on_device - sum(p.nbytes for p in model.blocks.parameters())
        assert all(v.device.type == "cpu" for p in model.blocks.parameters() for v in ours.state[p].values() if _big(v))
        steps(model, ours, 2)
    assert all(p.device == DEVICE for p in model.parameters())
    assert [id(p) for p in model.parameters()] == identities
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        for key, value in theirs.state[other].items():
            if isinstance(value, torch.Tensor):
                assert ours.state[mine][key].device == value.device, key
    steps(model, ours, 4)
    assert same(weights(model), weights(plain))


def _big(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


@MODES
@pytest.mark.parametrize("name", ["SGD", "AdamW fused"])
@pytest.mark.parametrize("seed", [0, 3])
def test_grad_scaler(name: str, asynchronous: bool, seed: int):
    plain, model = pair(Gpt)
    simgpu.set_schedule_seed(seed)
    with streamed(model, asynchronous):
        scales = []
        for either in (model, plain):
            scaler = torch.amp.GradScaler("simgpu", init_scale=2.0**10, growth_interval=2)
            optimizer = OPTIMIZERS[name](either.parameters())
            for step in range(5):
                torch.manual_seed(step)
                loss = loss_of(either, step) * (float("inf") if step == 2 else 1.0)
                scaler.scale(loss).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales[0] == scales[1]
        assert same(weights(model), weights(plain))


# --------------------------------------------------------------------------------------------- what others see and do


@MODES
def test_parameters_state_dict_and_names_are_as_ever(asynchronous: bool):
    _, model = pair(Gpt)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    with streamed(model, asynchronous):
        assert {name: id(p) for name, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
        assert list(model.state_dict()) == keys
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all(torch.equal(p.cpu(), before[name][1]) for name, p in model.named_parameters())
        home = model.blocks[0].up.weight
        assert home.is_pinned() == asynchronous
        assert home.untyped_storage().nbytes() == home.nbytes
    assert {name: id(p) for name, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert all(p.device.type == "cpu" and not p.is_pinned() for p in model.parameters())
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert all("forward" not in vars(m) and "_apply" not in vars(m) for m in model.modules())


@MODES
def test_moving_a_streamed_model_moves_what_is_resident(asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        backward(model)
        allocated = torch.accelerator.memory_allocated()
        model.to(DEVICE)
        assert torch.accelerator.memory_allocated() == allocated
        assert all(p.device.type == p.grad.device.type == "cpu" for p in model.blocks.parameters())
        backward(model, 1)
        for step in range(2):
            backward(plain, step)
        assert same(gradients(model), gradients(plain))


@MODES
@pytest.mark.parametrize("moves", [["cpu"], ["cpu", DEVICE], [DEVICE]])
def test_a_model_that_was_moved_while_it_was_streamed_is_left_where_it_was_moved_to(moves, asynchronous: bool):
    model = pair(Gpt)[1].to(DEVICE)
    with streamed(model, asynchronous):
        backward(model)
        for place in moves:
            model.to(place)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {torch.device(moves[-1]).type}
    assert {parameter.grad.device.type for parameter in model.parameters()} == {torch.device(moves[-1]).type}
    assert not any(parameter.is_pinned() for parameter in model.parameters())


@MODES
def test_changing_the_dtype_of_a_streamed_model(asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        for either in (model, plain):
            either.to(torch.bfloat16)
        assert torch.equal(backward(model), backward(plain))
        assert same(gradients(model), gradients(plain))
        assert model.blocks[0].up.weight.is_pinned() == asynchronous
        assert model.blocks[0].up.weight.dtype is torch.bfloat16


@MODES
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool, asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        for either in (model, plain):
            backward(either)
            either.zero_grad()
            state = {name: (value * 0.9).detach() for name, value in either.state_dict().items()}
            either.load_state_dict(state, assign=assign)
            backward(either)
        assert same(gradients(model), gradients(plain))


@MODES
def test_weights_written_past_the_version_counter(asynchronous: bool):
    """Old optimizers write through `.data`; also after a forward whose graph was kept but never used."""
    plain, model = pair(Gpt)
    kept = []
    with streamed(model, asynchronous):
        for either in (model, plain):
            torch.manual_seed(0)
            kept.append(loss_of(either))
            for parameter in either.parameters():
                parameter.data.mul_(1.1)
            backward(either)
        assert same(gradients(model), gradients(plain))
        kept.clear()


@MODES
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(_saved(model), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_plain(duplicate: Any, asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        twin = duplicate(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not any({"forward", "_apply", "__getstate__"} & set(vars(module)) for module in twin.modules())
        assert not any(p.is_pinned() for p in twin.parameters() if p.device.type == "cpu")
        twin.to(DEVICE)
        assert torch.equal(backward(twin), backward(plain))
        assert same(gradients(twin), gradients(plain))


def _saved(model: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


@MODES
def test_somebody_elses_override_is_kept(asynchronous: bool):
    _, model = pair(Gpt)
    inner = model.blocks[0].forward
    model.blocks[0].forward = mine = lambda x: inner(x) * 0
    with streamed(model, asynchronous), torch.no_grad():
        assert not model.blocks[0](torch.ones(1, 4, WIDTH, device=DEVICE)).any()
    assert model.blocks[0].forward is mine


def test_a_model_dies_with_its_last_reference_and_nothing_global_stays():
    from torch.amp.grad_scaler import _MultiDeviceReplicator
    from torch.optim import optimizer as optimizer_internals

    before = _MultiDeviceReplicator.get
    model = Gpt()
    undo = contextlib.ExitStack()
    streaming.attach(streamed_actions(model), model, DEVICE, undo, streaming.Streaming(asynchronous=True))
    assert _MultiDeviceReplicator.get is not before
    backward(model)
    alive = weakref.ref(model)
    del model, undo
    gc.collect()
    assert alive() is None
    assert _MultiDeviceReplicator.get is before
    assert not optimizer_internals._global_optimizer_pre_hooks


def test_plans_that_make_no_sense_are_refused_without_a_trace():
    model = Gpt()
    before = [(dict(vars(module)), set(module._parameters)) for module in model.modules()]
    for names, device, message in [
        (["blocks.7"], DEVICE, "does not have"),
        (["blocks.0", "blocks.0.up"], DEVICE, "share a module"),
        (["blocks.0"], torch.device("cpu"), "computes on the CPU"),
    ]:
        with contextlib.ExitStack() as undo, pytest.raises(PlanError, match=message):
            streaming.attach([StreamParameters(name) for name in names], model, device, undo)
    assert [(dict(vars(module)), set(module._parameters)) for module in model.modules()] == before


@pytest.mark.parametrize("accumulates", [False, True])
def test_an_error_in_backward_leaves_gradients_whole(accumulates: bool) -> None:
    """Which have come home depends on threads; each is that of plain PyTorch after the error, or that of before."""
    plain, model = pair(lambda: Gpt(4))
    with streamed(model):
        for each in (plain, model):
            if accumulates:
                backward(each)
        before = gradients(plain)
        for each in (plain, model):
            handle = each.blocks[0].register_forward_hook(lambda part, args, out: out.register_hook(explode) and None)
            with pytest.raises(Boom):
                backward(each, 1)
            handle.remove()
        let_autograd_finish()
        after = gradients(plain)
        assert not equal(after["blocks.2.mix.weight"], before["blocks.2.mix.weight"])
        for name, gradient in gradients(model).items():
            assert equal(gradient, after[name]) or equal(gradient, before[name]), name
