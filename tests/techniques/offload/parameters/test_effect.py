"""Streaming moves memory, to the byte; its waits are all needed; and when something fails, nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale._errors import MemScaleError, StoreFullError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, loss_of
from memscale.techniques.offload.parameters import parameter_homes, streaming
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.transfer import stream_order
from tests.lanes import STEPS_OF_A_LEAK, in_turns
from tests.models import SUITE, Case
from tests.techniques.offload.runs import (
    DEVICE,
    MODES,
    Boom,
    Gpt,
    Run,
    backward,
    explode,
    gradients,
    let_autograd_finish,
    on,
    pair,
    same,
    streamed,
    streamed_actions,
    tokens,
    train,
    weights,
    without_caches,
)

ACCELERATOR = torch.accelerator
GPT = Case("gpt", Gpt, lambda n: {"ids": tokens(n)}, lambda logits: logits.square().mean())


@pytest.fixture(autouse=True)
def _clean(no_leaks) -> Iterator[None]:
    """No test here may leave device or pinned bytes behind."""
    yield
    let_autograd_finish()


def settle() -> int:
    let_autograd_finish()
    gc.collect()
    ACCELERATOR.synchronize()
    return ACCELERATOR.memory_allocated()


def peak_of_step(model: nn.Module, **settings: Any) -> int:
    """Device bytes at the highest point of forward and backward, everything counted."""
    with streamed(model, **settings):
        backward(model)
        model.zero_grad()
        settle()
        ACCELERATOR.reset_peak_memory_stats()
        backward(model, 1)
        peak = ACCELERATOR.max_memory_allocated()
    model.zero_grad()
    return peak


# ------------------------------------------------------------------------------------------------------------ effect


@pytest.mark.parametrize(("asynchronous", "num_layers_held"), [(False, 2.5), (True, 4.0)], ids=["sync", "async"])
def test_the_peak_does_not_grow_with_the_number_of_layers(asynchronous: bool, num_layers_held: float):
    width = 128
    layer_bytes = sum(p.nbytes for p in Gpt(1, width).blocks.parameters())
    boundary_bytes = 2 * 16 * width * 4
    settings = {"asynchronous": asynchronous, "gradient_window_bytes": 1 << 18}
    four, eight = (peak_of_step(Gpt(n, width), **settings) for n in (4, 8))
    assert 4 * boundary_bytes <= eight - four < layer_bytes
    assert eight < num_layers_held * layer_bytes, "the whole model would be 8 layers and their gradients"


def test_only_what_is_resident_is_on_the_device():
    _, model = pair(Gpt)
    before = settle()
    resident = 512 * len(list(model.buffers())) + sum(
        -(-p.nbytes // 512) * 512 for p in (model.embed.weight, model.norm.weight, model.norm.bias)
    )
    with streamed(model):
        assert settle() - before == resident
        backward(model)
        gradient_bytes = sum(-(-p.nbytes // 512) * 512 for p in model.parameters() if p.device == DEVICE)
        assert settle() - before == resident + gradient_bytes
        assert all(p.grad.device.type == "cpu" and not p.grad.is_pinned() for p in model.blocks.parameters())


@MODES
def test_a_model_larger_than_the_device_trains_on_it(asynchronous: bool, cap: Any):
    def build() -> nn.Module:
        return Gpt(16, 64, dropout=0.0)

    plain, model = pair(build)
    plain.cpu()
    total = sum(p.nbytes for p in model.parameters())
    cap(total // 2)
    with streamed(model, asynchronous, gradient_window_bytes=1 << 17):
        ours = train(model, GPT, steps=2)
    cap(1 << 40)
    train(plain.to(DEVICE), GPT, steps=2).assert_same(ours)


@pytest.mark.parametrize(
    ("entry", "way"), in_turns([one for one in SUITE if one.is_static], ("sync", "async"), whole=["gpt2"])
)
def test_a_rehearsal_on_fake_tensors_predicts_the_peak_to_the_byte(entry: Case, way: str):
    torch.manual_seed(1)
    model = without_caches(entry.build()).to(DEVICE).train()
    batch = on(DEVICE, entry.batch(0))
    settings = ExecutionSettings(device=DEVICE, asynchronous=way == "async")
    actions = streamed_actions(model)

    def attach(target: nn.Module) -> Executor:
        executor = Executor(target, settings)
        executor.attach(actions)
        return executor

    predicted = _highest(FakeRehearsal(model, Inputs((), batch), "simgpu").run(attach))
    executor = attach(model)
    before = settle()
    ACCELERATOR.reset_peak_memory_stats()
    loss_of(model(**batch)).backward()
    assert ACCELERATOR.max_memory_allocated() - before == predicted
    executor.detach()


def _highest(trace: Any) -> int:
    level = highest = 0
    for segment in trace.segments:
        highest = max(highest, level + segment.peak_bytes)
        level += segment.net_bytes
    return highest


def test_layers_are_fetched_ahead_and_the_last_one_once():
    _, model = pair(lambda: Gpt(6))
    with streamed(model, prefetch_depth=1) as stream:
        backward(model)
        before = stream.stats.transfers.bytes_fetched
        visits, hits = stream.stats.num_visits, stream.stats.num_hits
        backward(model, 1)
        assert stream.stats.num_visits - visits == 12
        assert stream.stats.num_hits - hits == 11, "all but the first"
        moved = stream.stats.transfers.bytes_fetched - before
    layers = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    assert moved == 2 * sum(layers) - layers[-1]


def test_a_frozen_layer_is_not_fetched_for_backward():
    model = Gpt(4)
    for parameter in (*model.embed.parameters(), *model.blocks[:2].parameters()):
        parameter.requires_grad_(False)
    with streamed(model, prefetch_depth=2) as stream:
        backward(model)
        before = stream.stats.transfers.bytes_fetched
        backward(model, 1)
        moved = stream.stats.transfers.bytes_fetched - before
    layers = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    assert moved == sum(layers) + layers[2]


def test_homes_waste_little_pinned_memory():
    """Of GPT-2 XL, scaled down by ten: each parameter in a block of its own would take half as much again."""
    width = 160
    shapes = [(width,), (3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (4 * width,)] * 24
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    module = nn.Module()
    for index, parameter in enumerate(parameters):
        module.register_parameter(f"p{index}", parameter)
    store = HostStore(pinned=True, segment_bytes=1 << 30, splits=False)
    home = parameter_homes.Homes(DEVICE, store)
    home.move_in(module, {id(p) for p in parameters})
    used = sum(p.nbytes for p in parameters)
    assert simgpu.pinned_stats().rounded_bytes == store.counters.allocated_bytes
    assert used <= store.counters.allocated_bytes <= 1.1 * used
    home.restore()
    store.close()
    del home


def test_the_host_budget_is_kept():
    _, model = pair(lambda: Gpt(4))
    needed = sum(p.nbytes for p in model.blocks.parameters())
    with pytest.raises(StoreFullError, match="budget"), streamed(model, host_budget_bytes=needed // 2):
        pass
    assert all(p.device.type == "cpu" and not p.is_pinned() for p in model.parameters())
    with streamed(model, host_budget_bytes=2 * needed) as stream:
        backward(model)
        assert stream.stats.pinned.peak_allocated_bytes <= 2 * needed


# --------------------------------------------------------------------------------------------------------- mutations

WAITS = (
    "in after compute",
    "compute after arrival",
    "out after compute",
    "reuse after sent",
    "host after weights",
    "host after gradient",
)


class EarlyExit(Gpt):
    """In evaluation it may stop after its first layer: the second is fetched for nothing."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x) if self.training else self.blocks[0](x)


def _build() -> nn.Module:
    torch.manual_seed(0)
    return EarlyExit(4, dropout=0.0)


def _run_with_tight_bounds() -> tuple[Run, int]:
    """A training whose every wait matters: memory is reused at once, and weights are written to at once."""
    model = _build()
    with streamed(model, gradient_window_bytes=1 << 12):
        run = train(model, GPT, steps=2, accumulation=1)
        with torch.no_grad():
            model.eval()(tokens())
            for parameter in model.blocks.parameters():
                parameter.data.mul_(1.5)
    ACCELERATOR.synchronize()
    return run, len(simgpu.take_reports())


@pytest.mark.parametrize("why", [None, *WAITS])
def test_every_wait_is_needed(why: str | None, monkeypatch: pytest.MonkeyPatch):
    theirs = train(_build().to(DEVICE), GPT, steps=2, accumulation=1)
    real = stream_order.order

    def order(waiter: Any, event: torch.Event, reason: str) -> None:
        if reason != why:
            real(waiter, event, reason)

    monkeypatch.setattr(stream_order, "order", order)
    run, num_races = _run_with_tight_bounds()
    is_same = run.losses == theirs.losses and all(map(same, run.gradients, theirs.gradients))
    assert (is_same and num_races == 0) == (why is None), f"{why}: same {is_same}, {num_races} races"


# ------------------------------------------------------------------------------------------------------------ faults


@MODES
def test_an_exception_in_forward_leaves_nothing(asynchronous: bool):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        backward(model)
        backward(plain)
        before = settle()
        handle = model.blocks[1].up.register_forward_hook(explode)
        for context in (contextlib.nullcontext(), torch.no_grad()):
            with context, pytest.raises(Boom):
                model(tokens())
            assert settle() == before
        handle.remove()
        assert torch.equal(backward(model, 1), backward(plain, 1))
        assert same(gradients(model), gradients(plain))
        assert all(type(p) is nn.Parameter for p in model.parameters())


@MODES
def test_an_exception_in_backward_leaves_nothing(asynchronous: bool):
    plain, model = pair(lambda: Gpt(4))
    with streamed(model, asynchronous, gradient_window_bytes=1 << 20):
        before = settle()
        x = model.embed(tokens())
        for index, block in enumerate(model.blocks):
            x = block(x)
            if index == 1:
                x.register_hook(explode)
        with pytest.raises(Boom):
            x.sum().backward()
        model.zero_grad()
        del x
        assert settle() == before
        with torch.no_grad():
            for either in (model, plain):
                for parameter in either.parameters():
                    parameter.data.mul_(1.01)
        assert torch.equal(backward(model), backward(plain))
        assert same(gradients(model), gradients(plain))


@MODES
def test_running_out_of_device_memory_leaves_nothing(asynchronous: bool, cap: Any):
    plain, model = pair(Gpt)
    with streamed(model, asynchronous):
        before = settle()
        torch.manual_seed(0)
        loss = loss_of(model(tokens()))
        cap(settle() + 20_000)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        cap(1 << 40)
        del loss
        model.zero_grad()
        assert settle() == before
        assert torch.equal(backward(model), backward(plain))
        assert same(gradients(model), gradients(plain))


@MODES
@pytest.mark.parametrize("fault", ["fail_allocation", "fail_pinned_allocation", "fail_copy"])
def test_the_nth_failure_is_an_error_and_leaves_nothing(fault: str, asynchronous: bool):
    torch.manual_seed(0)
    model = Gpt(2)
    original, identities = weights(model), [id(p) for p in model.parameters()]
    outcomes = set()
    for nth in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233):
        before = settle()
        with getattr(simgpu, fault)(nth) as injected:
            try:
                with streamed(model, asynchronous):
                    backward(model)
                outcomes.add("fine")
            except (torch.OutOfMemoryError, RuntimeError, MemScaleError) as error:
                outcomes.add(type(error).__name__)
        model.zero_grad()
        del injected
        assert settle() == before
        assert simgpu.pinned_stats().requested_bytes == 0
        assert same(weights(model), original)
        assert [id(p) for p in model.parameters()] == identities
        assert all(p.device.type == "cpu" and not p.is_pinned() for p in model.parameters())
        assert all("forward" not in vars(m) and "_apply" not in vars(m) for m in model.modules())
    assert len(outcomes) > 1 or (fault == "fail_pinned_allocation" and not asynchronous)
    simgpu.take_reports()


def test_what_does_not_fit_back_stays_home_and_is_told(cap: Any):
    model = Gpt(3).to(DEVICE)
    original = weights(model)
    undo = contextlib.ExitStack()
    streaming.attach(streamed_actions(model), model, DEVICE, undo)
    cap(settle() + 4096)
    with pytest.raises(MemScaleError, match="do not fit back"):
        undo.close()
    cap(1 << 40)
    assert same(weights(model), original)
    model.to(DEVICE)
    backward(model)


# -------------------------------------------------------------------------------------------------------------- soak


@STEPS_OF_A_LEAK
@MODES
def test_many_steps_use_no_more_than_ten(asynchronous: bool, num_steps: int, no_races: Any):
    torch.manual_seed(0)
    model = Gpt(2)
    with streamed(model, asynchronous, gradient_window_bytes=1 << 14) as stream:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        used = []
        for step in range(num_steps):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                used.append((settle(), simgpu.pinned_stats().requested_bytes, stream.stats.pinned.held_bytes))
        assert len(set(used)) == 1, used
