"""Offloaded activations: the same training, bit for bit, in less memory, and nothing left when something fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simgpu
from memscale._config import AsyncOffloadConfig
from memscale._errors import MemScaleError, PlanError, StoreFullError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadActivations, StreamParameters
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import FakeRehearsal, loss_of
from memscale.techniques.checkpointing import checkpointed_forward as checkpointing
from memscale.techniques.offload.activations import offloader as activations
from memscale.techniques.offload.activations.offloader import Offloader
from memscale.techniques.offload.store.disk import DiskStore
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.store.stores import Store
from memscale.techniques.offload.transfer import stream_order
from memscale.techniques.offload.transfer.transfers import Transfers
from simgpu_pytest import LETS_GO_S
from tests.lanes import STEPS_OF_A_LEAK, in_turns
from tests.models import SUITE, Case
from tests.parity import seed
from tests.techniques.offload.runs import (
    DEVICE,
    Boom,
    Gpt,
    backward,
    explode,
    gradients,
    let_autograd_finish,
    on,
    same,
    tokens,
    train,
    without_caches,
)

CPU = torch.device("cpu")
ACCELERATOR = torch.accelerator
WAYS = ("simgpu host sync", "simgpu host async", "simgpu disk async", "cpu disk sync", "cpu disk async")
GPT = Case("gpt", Gpt, lambda n: {"ids": tokens(n)}, lambda logits: logits.square().mean())


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    """No test here may race, or leave device or pinned bytes behind."""
    yield
    let_autograd_finish()


def device_of(way: str) -> torch.device:
    return DEVICE if way.startswith("simgpu") else CPU


@contextlib.contextmanager
def opened(way: str, directory: pathlib.Path, window_bytes: int) -> Iterator[Transfers]:
    store: Store = HostStore(pinned="async" in way) if "host" in way else DiskStore(directory, verify=True)
    with contextlib.ExitStack() as undo:
        undo.callback(store.close)
        moving = Transfers(device_of(way), store, asynchronous="async" in way, window_bytes=window_bytes)
        undo.callback(moving.close)
        yield moving


@contextlib.contextmanager
def offloaded(
    model: nn.Module,
    way: str = "simgpu host async",
    directory: pathlib.Path = pathlib.Path(),
    *,
    modules: list[str] | None = None,
    checkpointed: bool = False,
    window_bytes: int = 1 << 14,
    **settings: Any,
) -> Iterator[Offloader]:
    """All blocks offloaded; at the end nothing may wait in the store."""
    settings = {"min_tensor_bytes": 256, "prefetch_bytes": 1 << 15, **settings}
    blocks = modules if modules is not None else list(find_blocks(model))
    with opened(way, directory, window_bytes) as moving, contextlib.ExitStack() as undo:
        if checkpointed:
            for module_fqn in blocks:
                checkpointing.attach(Checkpoint(module_fqn), model.get_submodule(module_fqn), undo)
        actions = [OffloadActivations(module_fqn) for module_fqn in blocks]
        yield activations.attach(actions, model, device_of(way), undo, transfers=moving, **settings)
        undo.close()
        gc.collect()
        moving.settle()
        moving.close()  # a thread holds its last job until it has ended
        assert _held_in_the_end(moving.store) == 0


def _held_in_the_end(store: Store) -> int:
    """Autograd's thread for a device lets go of a pass a moment after it has ended, a long one on a busy machine."""
    deadline_s = time.monotonic() + LETS_GO_S
    store.sweep()
    while store.counters.held_bytes and time.monotonic() < deadline_s:
        time.sleep(0.01)
        gc.collect()
        store.sweep()
    return store.counters.held_bytes


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize(("case", "way"), in_turns(SUITE, WAYS, whole=["gpt2"]))
def test_trains_the_same(case: Case, way: str, plain_runs: dict[Any, Any], tmp_path: pathlib.Path):
    device = device_of(way)
    seed(1)
    model = without_caches(case.build()).to(device)
    key = (case.name, device.type)
    if key not in plain_runs:
        plain_runs[key] = train(copy.deepcopy(model), case, device=device)
    with offloaded(model, way, tmp_path) as offloader:
        train(model, case, device=device).assert_same(plain_runs[key])
        assert offloader.stats.num_sent > 0
        assert offloader.stats.num_in_place < offloader.stats.num_saved, "something came back"


@pytest.mark.parametrize("way", WAYS)
def test_boundaries_of_checkpointed_layers_are_offloaded(way: str, tmp_path: pathlib.Path):
    device = device_of(way)
    seed(1)
    model = Gpt(6).to(device)
    case = Case("gpt", Gpt, lambda n: {"ids": tokens(n).to(device)}, lambda logits: logits.square().mean())
    theirs = train(copy.deepcopy(model), case, steps=2, device=device)
    with offloaded(model, way, tmp_path, checkpointed=True, window_bytes=0) as offloader:
        train(model, case, steps=2, device=device).assert_same(theirs)
        boundary_bytes = 2 * 16 * 32 * 4
        assert offloader.stats.num_sent == 4 * 6
        assert offloader.stats.sent_bytes == 4 * 6 * boundary_bytes


@pytest.mark.parametrize("seed_number", range(1, 9))
def test_the_order_in_which_copies_run_does_not_matter(seed_number: int):
    seed(1)
    model = Gpt().to(DEVICE)
    theirs = train(copy.deepcopy(model), GPT, steps=2)
    simgpu.set_schedule_seed(seed_number)
    with offloaded(model, window_bytes=1 << (8 + seed_number), prefetch_bytes=1 << (10 + seed_number)):
        train(model, GPT, steps=2).assert_same(theirs)


# --------------------------------------------------------------------------------------------------- what is saved how


class Layer(nn.Module):
    """One function as a layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 0.2)
        self.register_buffer("table", torch.arange(1024.0).reshape(32, 32) / 1000)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def views(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Query, key and value are views of one product; one more is transposed, one has gaps, one is flipped."""
    joint = torch.cat([x, x * 2, x * 3], -1)
    query, key, value = joint.split(32, -1)
    return (query * key).tanh() * value.t() + (joint[::2, ::3].square().mean() + joint[1:, 5:].t().sin().mean())


def saved_twice(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()
    return y * y.sin() + y.square() + y.view(-1).cos().view(32, 32)


def with_parameters(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return (x @ layer.weight.t()) * layer.table + x * layer.weight[:, :1]


def other_types(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    mask = x > 0
    spectrum = torch.complex(x, x * 2)
    return (torch.where(mask, x, x * 0.1).double().square().float() + (spectrum * spectrum).real).tanh()


def expanded(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return (x * x.mean(0, keepdim=True).expand(32, 32) + x.mean().expand(32, 32).contiguous() * x).tanh()


def part_of_a_large_storage(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    large = x.repeat(16, 1) * 1.5
    return large[64:96].tanh() + large[100:132, 3:].square().mean().sin() * x


def changed_and_saved_again(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """`y` is saved at two versions, each by an operator whose backward comes when it is at that version... or not."""
    y = x * 2
    z = y.detach().clone()
    w = z * x
    z.add_(1)
    return w + y.exp() + z.clone() * x


def reused_memory(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Storages die and are born at the same address."""
    total = x
    for factor in range(8):
        total = total + (x * factor).detach() * x
    return total.tanh()


def chunks_with_their_own_versions(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """As an LSTM cell on the CPU does it: each chunk is changed in place after the one before was saved."""
    gates = torch.cat([x, x * 2, x * 3], -1).unsafe_chunk(3, -1)
    one = gates[0].sigmoid_()
    _let_copies_end(x)
    two = gates[1].tanh_()
    _let_copies_end(x)
    return one * two * gates[2].sigmoid_()


def _let_copies_end(x: torch.Tensor) -> None:
    """Whole storages travel: the copy races with the change of the next chunk, in bytes that nobody uses."""
    if x.device.type != "cpu":
        torch.accelerator.synchronize()


CASES = (
    views,
    saved_twice,
    with_parameters,
    other_types,
    expanded,
    part_of_a_large_storage,
    reused_memory,
    chunks_with_their_own_versions,
)


def layer_and_input(function: Any, way: str) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Sequential(Layer(function), nn.Dropout(0.1)), nn.Sequential(Layer(function)))
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    return model.to(device_of(way)), x.to(device_of(way)).requires_grad_()


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    loss = model(x).square().mean()
    assert loss.isfinite()
    loss.backward()
    found = [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    return [one.cpu() if one is not None else torch.zeros(()) for one in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_gradients_are_the_same_for(function: Any, way: str, tmp_path: pathlib.Path):
    model, x = layer_and_input(function, way)
    theirs = step(copy.deepcopy(model), x)
    for window_bytes in (0, 1 << 13):
        with offloaded(model, way, tmp_path, modules=["0", "1"], window_bytes=window_bytes):
            for _ in range(2):
                assert all(map(torch.equal, step(model, x), theirs))


def test_a_changed_tensor_is_refused_as_plain_pytorch_does():
    for function in (changed_and_saved_again,):
        model, x = layer_and_input(function, "simgpu")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x).sum().backward()
        with offloaded(model, modules=["0", "1"]):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(x).sum().backward()
            x.grad = None
    simgpu.take_reports()  # the copy raced with the change; it was never used


def test_the_gates_of_an_lstm_cell(tmp_path: pathlib.Path):
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x)[0])

    model = Cell()
    x = torch.randn(32, 32, requires_grad=True)
    theirs = step(model, x)
    with offloaded(model, "cpu disk sync", tmp_path, modules=["cell"], window_bytes=0):
        assert all(map(torch.equal, step(model, x), theirs))


class Sigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.result = (x * self.weight).sigmoid()
        return self.result.clone()


@pytest.mark.parametrize("min_tensor_bytes", [256, 1 << 20], ids=["travels", "stays"])
@pytest.mark.parametrize("what", ["parameter", "activation"])
def test_what_stays_is_refused_too_when_it_was_changed(what: str, min_tensor_bytes: int):
    model = nn.Sequential(Sigmoid(), nn.Linear(32, 32)).to(DEVICE)
    assert "modified by an inplace operation" in _refusal(model, what)
    with offloaded(model, modules=["0", "1"], min_tensor_bytes=min_tensor_bytes):
        assert "modified by an inplace operation" in _refusal(model, what)


def _refusal(model: nn.Module, what: str) -> str:
    loss = model(torch.ones(32, 32, device=DEVICE, requires_grad=True)).sum()
    torch.accelerator.synchronize()
    with torch.no_grad():
        (model[1].weight if what == "parameter" else model[0].result).mul_(2)
    del model[0].result
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_that_is_dropped_with_its_graph_races_with_nothing():
    """Nobody detaches it: its copies are still on their way when their sources die."""
    config = AsyncOffloadConfig(min_tensor_bytes=256)
    for _ in range(2):
        model = nn.Sequential(Sigmoid(), nn.Linear(32, 32))
        executor = Executor(model, ExecutionSettings(device=DEVICE, asynchronous=True, async_config=config))
        executor.attach([OffloadActivations("0"), OffloadActivations("1")])
        loss = model(torch.ones(32, 32, device=DEVICE)).sum()
        del loss, executor, model
        gc.collect()
    ACCELERATOR.synchronize()
    gc.collect()


def test_a_graph_of_small_tensors_that_is_thrown_away_leaves_nothing():
    """An operator saves its own output: whoever keeps that as it is keeps the operator, too."""
    model = nn.Sequential(Sigmoid(), nn.Linear(32, 32)).to(DEVICE)
    with offloaded(model, modules=["0", "1"], min_tensor_bytes=1 << 20):
        before = ACCELERATOR.memory_allocated()
        model(torch.ones(32, 32, device=DEVICE))
        del model[0].result
        gc.collect()
        assert ACCELERATOR.memory_allocated() == before


def test_what_shares_memory_travels_once_and_parameters_stay():
    model, x = layer_and_input(saved_twice, "simgpu")
    with offloaded(model, modules=["1"]) as offloader:
        step(model, x)
        saved, sent = offloader.stats.num_saved, offloader.stats.num_sent
        assert (saved, sent) == (6, 2)
    model, x = layer_and_input(with_parameters, "simgpu")
    with offloaded(model, modules=["1"]) as offloader:
        step(model, x)
        assert offloader.stats.sent_bytes == 32 * 32 * 4, "the input, and neither weight nor table"


def test_small_tensors_and_evaluation_send_nothing():
    model, x = layer_and_input(saved_twice, "simgpu")
    with offloaded(model, modules=["0", "1"], min_tensor_bytes=32 * 32 * 4 + 1) as offloader:
        step(model, x)
        assert offloader.stats.num_sent == 0
    with offloaded(model, modules=["0", "1"]) as offloader:
        with torch.no_grad():
            model(x)
        assert offloader.stats.num_sent == 0


# ------------------------------------------------------------------------------------------------------ unusual passes


@pytest.mark.parametrize("way", WAYS)
def test_retain_graph(way: str, tmp_path: pathlib.Path):
    model, x = layer_and_input(views, way)
    with offloaded(model, way, tmp_path, modules=["0", "1"], window_bytes=0):
        torch.manual_seed(0)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, first)
        x.grad = None
        del loss
        model.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_and_one_of_them_is_thrown_away(first: int, way: str, tmp_path: pathlib.Path):
    model, x = layer_and_input(views, way)
    theirs = step(copy.deepcopy(model), x)
    with offloaded(model, way, tmp_path, modules=["0", "1"], window_bytes=0):
        losses = []
        for _ in range(2):
            torch.manual_seed(0)
            losses.append(model(x).square().mean())
        losses[first].backward()
        assert torch.equal(x.grad.cpu(), theirs[1])
        losses.clear()
        x.grad = None
        model.zero_grad()


def test_a_sum_of_two_forwards():
    model, x = layer_and_input(views, "simgpu")
    plain = copy.deepcopy(model)

    def both(net: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        (net(x).sum() * net(x * 2).sum()).backward()
        gradient, x.grad = x.grad, None
        net.zero_grad()
        return gradient

    with offloaded(model, modules=["0", "1"], window_bytes=0):
        assert torch.equal(both(model), both(plain))


def test_a_second_derivative():
    model, x = layer_and_input(saved_twice, "simgpu")
    plain = copy.deepcopy(model)

    def penalty(net: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    with offloaded(model, modules=["0", "1"], window_bytes=0):
        assert torch.equal(penalty(model), penalty(plain))


def test_backward_after_detach_is_refused():
    model, x = layer_and_input(saved_twice, "simgpu")
    with offloaded(model, modules=["0", "1"]):
        loss = model(x).sum()
        kept = [loss]
        del loss
        with contextlib.ExitStack() as undo:
            undo.callback(kept.clear)
    with opened("simgpu host sync", pathlib.Path(), 0) as moving, contextlib.ExitStack() as undo:
        activations.attach([OffloadActivations("0")], model, DEVICE, undo, transfers=moving, min_tensor_bytes=1)
        loss = model(x).sum()
        undo.close()
        with pytest.raises(RuntimeError, match="detached"):
            loss.backward()


def test_a_plan_for_another_model_is_refused():
    undo, actions = contextlib.ExitStack(), [OffloadActivations("x")]
    with opened("simgpu host sync", pathlib.Path(), 0) as moving, pytest.raises(PlanError, match="does not have"):
        activations.attach(actions, Gpt(), DEVICE, undo, transfers=moving)
    undo.close()


# ------------------------------------------------------------------------------------------------------------ effect


def settle() -> int:
    let_autograd_finish()
    gc.collect()
    ACCELERATOR.synchronize()
    return ACCELERATOR.memory_allocated()


def peak_of(model: nn.Module) -> int:
    before = settle()
    ACCELERATOR.reset_peak_memory_stats()
    model(tokens(0, (8, 64))).square().mean().backward()
    model.zero_grad()
    return ACCELERATOR.max_memory_allocated() - before


@pytest.mark.parametrize("way", ["simgpu host sync", "simgpu host async", "simgpu disk async"])
def test_the_peak_falls_by_what_waits_elsewhere(way: str, tmp_path: pathlib.Path):
    torch.manual_seed(0)
    model = Gpt(8).to(DEVICE)
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    plain, window, ahead = peak_of(model), 1 << 17, 1 << 18
    with offloaded(model, way, tmp_path, window_bytes=window, prefetch_bytes=ahead) as offloader:
        peak_of(model)
        before, idle = offloader.stats.sent_bytes, settle()
        offload = peak_of(model)
        sent = offloader.stats.sent_bytes - before
        assert settle() == idle, "nothing is held between steps"
    layer_bytes = sent // 8
    assert layer_bytes > 800_000
    assert offload < plain - sent + 2 * layer_bytes + window + ahead + gradient_bytes


@pytest.mark.parametrize(
    ("name", "beside"),
    in_turns(
        ["mlp", "resnet", "bert", "gpt2", "t5", "albert"],
        [f"{kind}, {way}" for way in ("sync", "async") for kind in ("alone", "checkpointed", "streamed")],
        whole=["gpt2"],
    ),
)
def test_a_rehearsal_on_fake_tensors_predicts_the_peak_to_the_byte(name: str, beside: str):
    kind, way = beside.split(", ")
    asynchronous = way == "async"
    entry = next(one for one in SUITE if one.name == name)
    torch.manual_seed(1)
    model = without_caches(entry.build()).to(DEVICE).train()
    batch = on(DEVICE, entry.batch(0))
    other = {"alone": [], "checkpointed": [Checkpoint], "streamed": [StreamParameters]}[kind]
    actions = [action(fqn) for action in (*other, OffloadActivations) for fqn in find_blocks(model)]

    def attach(target: nn.Module) -> Executor:
        executor = Executor(target, settings)
        executor.attach(actions)
        return executor

    settings = ExecutionSettings(device=DEVICE, asynchronous=asynchronous)
    settings = ExecutionSettings(
        device=DEVICE,
        asynchronous=asynchronous,
        async_config=type(settings.async_config)(min_tensor_bytes=1024),
    )
    predicted = level = 0
    for segment in FakeRehearsal(model, Inputs((), batch), "simgpu").run(attach).segments:
        predicted = max(predicted, level + segment.peak_bytes)
        level += segment.net_bytes
    executor = attach(model)
    before = settle()
    ACCELERATOR.reset_peak_memory_stats()
    loss_of(model(**batch)).backward()
    assert ACCELERATOR.max_memory_allocated() - before == predicted
    executor.detach()


# --------------------------------------------------------------------------------------------------------- mutations

WAITS = (
    "out after compute",
    "in after compute",
    "compute after arrival",
    "reuse after sent",
)
"""The transfers' other waits follow from these, as activations use them; `test_transfers` has them all."""


BLOCK_BYTES = 49_152
"""What a block of `Gpt` saves and sends for a batch of `GPT`."""


@pytest.mark.parametrize("far_apart", [False, True])
@pytest.mark.parametrize("why", [None, *WAITS])
def test_every_wait_is_needed(why: str | None, far_apart: bool, monkeypatch: pytest.MonkeyPatch):
    """All blocks without a window, or every other one with windows as large as what a block saves.

    The second lets go of used sources, too, which waits for copies: some orders in which copies run hide others.
    """
    real = stream_order.order

    def order(waiter: Any, event: torch.Event, reason: str) -> None:
        if reason != why:
            real(waiter, event, reason)

    torch.manual_seed(0)
    model = Gpt(6 if far_apart else 4, dropout=0.0).to(DEVICE)
    theirs = train(copy.deepcopy(model), GPT, steps=3)
    wide = {"modules": [*find_blocks(model)][::2], "window_bytes": BLOCK_BYTES, "prefetch_bytes": BLOCK_BYTES}
    monkeypatch.setattr(stream_order, "order", order)
    monkeypatch.setattr(activations, "KEPT_WINDOW_BYTES", 0)
    is_same, num_races = True, 0
    for schedule in range(3 if far_apart else 1):
        simgpu.set_schedule_seed(schedule)
        again = copy.deepcopy(model)
        with offloaded(again, **(wide if far_apart else {"window_bytes": 0})):
            run = train(again, GPT, steps=3)
        ACCELERATOR.synchronize()
        num_races += len(simgpu.take_reports())
        is_same &= run.losses == theirs.losses and all(map(same, run.gradients, theirs.gradients))
    assert (is_same and num_races == 0) == (why is None), f"{why}: same {is_same}, {num_races} races"


@pytest.mark.parametrize("lets_go", [True, False])
def test_used_sources_are_let_go_of_in_backward(lets_go: bool, monkeypatch: pytest.MonkeyPatch):
    """What was sent last is in the window when backward begins, and is used first. Wide windows let go of it then."""
    monkeypatch.setattr(activations, "KEPT_WINDOW_BYTES", BLOCK_BYTES - lets_go)
    torch.manual_seed(0)
    model = Gpt(6, dropout=0.0).to(DEVICE)
    blocks, held = [*find_blocks(model)][::2], []
    with offloaded(model, modules=blocks, window_bytes=BLOCK_BYTES, prefetch_bytes=BLOCK_BYTES) as offloader:
        note = lambda *_: held.append(offloader.transfers.in_flight_bytes)  # noqa: E731
        handles = [model.get_submodule(fqn).register_full_backward_hook(note) for fqn in blocks]
        loss = model(tokens(0)).square().mean()
        ACCELERATOR.synchronize()  # copies that the simulated device has still to make hold what they copy
        sent = offloader.transfers.in_flight_bytes
        loss.backward()
        for handle in handles:
            handle.remove()
    model.zero_grad()
    assert 0 < sent <= BLOCK_BYTES
    # The last block's backward uses it, and the one before it has waited for an arrival.
    assert held == ([sent, 0, 0] if lets_go else [sent, sent, sent])


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing(where: str, way: str, tmp_path: pathlib.Path):
    torch.manual_seed(0)
    model = Gpt(4).to(DEVICE)
    plain = copy.deepcopy(model)
    with offloaded(model, way, tmp_path):
        before = settle()
        if where == "forward":
            handle = model.blocks[2].up.register_forward_hook(explode)
        else:
            handle = model.blocks[1].up.register_full_backward_hook(explode)
        with pytest.raises(Boom):
            backward(model)
        handle.remove()
        model.zero_grad()
        assert settle() == before
        assert torch.equal(backward(model), backward(plain))
        assert same(gradients(model), gradients(plain))
        model.zero_grad()


@pytest.mark.parametrize("fault", ["fail_allocation", "fail_pinned_allocation", "fail_copy"])
def test_the_nth_failure_is_an_error_and_leaves_nothing(fault: str):
    torch.manual_seed(0)
    model = Gpt(2).to(DEVICE)
    theirs = backward(copy.deepcopy(model))
    outcomes = set()
    for nth in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144):
        before = settle()
        with getattr(simgpu, fault)(nth):
            try:
                with offloaded(model):
                    backward(model)
                outcomes.add("fine")
            except (torch.OutOfMemoryError, RuntimeError, MemScaleError) as error:
                outcomes.add(type(error).__name__)
        model.zero_grad()
        assert settle() == before
        assert simgpu.pinned_stats().requested_bytes == 0
    assert len(outcomes) > 1
    assert torch.equal(backward(model), theirs)
    model.zero_grad()
    simgpu.take_reports()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: pathlib.Path):
    torch.manual_seed(0)
    model = Gpt(3).to(DEVICE)
    before = settle()
    store = DiskStore(tmp_path, budget_bytes=40_960)
    moving = Transfers(DEVICE, store, window_bytes=0)
    with contextlib.ExitStack() as undo:
        actions = [OffloadActivations(module_fqn) for module_fqn in find_blocks(model)]
        activations.attach(actions, model, DEVICE, undo, transfers=moving, min_tensor_bytes=256)
        with pytest.raises(StoreFullError, match="budget"):
            backward(model)
    moving.close()
    store.close()
    assert settle() == before
    assert list(tmp_path.iterdir()) == []
    backward(model)
    model.zero_grad()


def _wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):  # a minute: only a test that fails waits to the end
        if is_so():
            return
        time.sleep(0.01)


@STEPS_OF_A_LEAK
@pytest.mark.parametrize("way", ["simgpu host async", "cpu disk async"])
def test_many_steps_use_no_more_than_ten(way: str, num_steps: int, tmp_path: pathlib.Path):
    torch.manual_seed(0)
    device = device_of(way)
    model = Gpt(2).to(device)
    with offloaded(model, way, tmp_path) as offloader:
        used, counters = [], offloader.transfers.store.counters

        def is_empty() -> bool:
            offloader.transfers.settle()
            return counters.held_bytes == 0

        for number in range(num_steps):
            logits = model(tokens(number).to(device))
            F.cross_entropy(logits.reshape(-1, 64), tokens(number).to(device).reshape(-1)).backward()
            model.zero_grad()
            if number % 10 == 9:
                del logits
                live_bytes = settle()
                _wait_until(is_empty)  # a thread lets go of its last ticket a little later, which is then swept up
                pinned_bytes = simgpu.pinned_stats().requested_bytes
                used.append((live_bytes, pinned_bytes, counters.held_bytes, counters.allocated_bytes))
        assert len(set(used)) == 1, used


class _Noisy(nn.Module):
    """Saves noise for backward before it is drawn, as a part and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(16, 16), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.linear(self.act(x)), training=self.training)


class _NoisyModule(_Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(x))


@pytest.mark.parametrize("block", [_Noisy, _NoisyModule])
@pytest.mark.parametrize("way", ["simgpu host sync", "simgpu host async", "cpu disk sync"])
def test_noise_that_is_drawn_after_it_was_saved_is_right(way: str, block: type[nn.Module], tmp_path: pathlib.Path):
    seed(1)
    twin = nn.Sequential(*(block() for _ in range(3))).to(device_of(way))
    model = copy.deepcopy(twin)
    found = []
    with opened(way, tmp_path, 0) as moving, contextlib.ExitStack() as undo:
        actions = [OffloadActivations(str(number)) for number in range(3)]
        activations.attach(actions, model, device_of(way), undo, transfers=moving, min_tensor_bytes=0)
        for each in (model, twin):
            torch.manual_seed(3)
            each(torch.ones(4, 16, device=device_of(way)) - 2).square().mean().backward()
            found.append(gradients(each))
    assert same(*found)
