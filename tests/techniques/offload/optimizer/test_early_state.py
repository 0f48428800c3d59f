"""Optimizer state that comes back under backward: the bits, what it takes, that it is given up again, and its waits."""

from __future__ import annotations

import contextlib
import copy
import io
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale import AsyncOffloadConfig
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OffloadOptimizer, QuantizeOptimizer, StreamParameters
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.transfer import stream_order
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.runs import DEVICE
from tests.techniques.offload.tiers import on_host, opened, same
from tests.techniques.offload.training import O, Training, adopted, no_hooks_left, plain

BUCKET_BYTES = 25_000
ALL = 1 << 20
EARLY = (FetchStateEarly("head", 2 * BUCKET_BYTES), FetchStateEarly("body", ALL))
PLANS: dict[str, tuple[Any, ...]] = {
    "state": (OffloadOptimizer(BUCKET_BYTES), *EARLY),
    "half of the state": (OffloadOptimizer(BUCKET_BYTES, 0.5), *EARLY),
    "guests": (StreamParameters("body"), StepOnDevice(BUCKET_BYTES), *EARLY),
    "guests and state": (StreamParameters("body"), StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES), *EARLY),
    "stretches": (StreamParameters("body"), StepOnDevice(5_000), OffloadOptimizer(5_000), *EARLY),
}


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def wrapped(net: nn.Module, *actions: Any, asynchronous: bool = True) -> Iterator[Executor]:
    settings = ExecutionSettings(asynchronous=asynchronous, device=DEVICE)
    executor = execute(net, plan_of(list(actions), device_type="simgpu"), settings)
    try:
        yield executor
    finally:
        executor.detach()
    torch.accelerator.synchronize()
    assert simgpu.take_reports() == []


def stats(executor: Executor) -> Any:
    return executor.stats().transfers["optimizer"]


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("name", "plan"), in_turns([n for n in OPTIMIZERS if n != "SGD"], list(PLANS)))
def test_the_bits_are_those_of_plain_training(name: str, plan: str):
    def make(net: nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference, training = Training("simgpu", make).run(), Training("simgpu", make)
    with wrapped(training.net, *PLANS[plan]) as executor:
        training.run()
        assert same(training.result(), reference.result())
        has_state = any(v.dim() for e in reference.optimizer.state.values() for v in e.values() if hasattr(v, "dim"))
        assert stats(executor).num_early > 0 or not has_state
    assert same(training.run().result(), reference.run().result())
    no_hooks_left(training.optimizer)


@pytest.mark.parametrize(
    ("mode", "plan"),
    in_turns(["closure", "accumulate", "clip", "schedule keep", "scaler unscale", "scaler overflow"], list(PLANS)),
)
def test_loops_of_every_kind(mode: str, plan: str):
    reference, training = Training("simgpu", plain(O.AdamW), mode).run(), Training("simgpu", plain(O.AdamW), mode)
    with wrapped(training.net, *PLANS[plan]) as executor:
        assert same(training.run().result(), reference.result())
        assert stats(executor).num_early > 0


def test_state_that_waits_in_8_bits_comes_early_too():
    quantized = QuantizeOptimizer(BUCKET_BYTES, min_elements=1024)
    results = []
    for early in ((), EARLY):
        training = Training("simgpu", plain(O.AdamW))
        with wrapped(training.net, OffloadOptimizer(BUCKET_BYTES), quantized, *early) as executor:
            results.append(training.run().result())
            assert (stats(executor).num_early > 0) == bool(early)
    assert same(*results)


def test_the_compiler_traces_no_hooks_of_it():
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    for one in (reference, training):
        one.net.head.compile(backend="eager")
    reference.run(3)
    with wrapped(training.net, *PLANS["state"]) as executor:
        assert same(training.run(3).result(), reference.result())
        assert stats(executor).num_early == 0


def test_blocking_transfers_ask_for_nothing_early():
    reference, training = Training("simgpu", plain(O.AdamW)).run(), Training("simgpu", plain(O.AdamW))
    with wrapped(training.net, *PLANS["guests and state"], asynchronous=False) as executor:
        assert same(training.run().result(), reference.result())
        assert stats(executor).num_early == 0


# ----------------------------------------------------------------------------- between backward and the step


def _save_and_load(training: Training) -> None:
    training.optimizer.load_state_dict(on_host(copy.deepcopy(training.optimizer.state_dict())))


def _save(training: Training) -> None:
    torch.save(training.optimizer.state_dict(), io.BytesIO())


def _look(training: Training) -> None:
    for entry in training.optimizer.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(2)


def _look_at_one(training: Training) -> None:
    entry = training.optimizer.state[training.net.body[0].weight]
    entry["exp_avg"].add_(1)


def _evaluate(training: Training) -> None:
    with torch.no_grad():
        training.net(torch.ones(2, 64, device="simgpu"))


def _forward_again(training: Training) -> None:
    training.net(torch.ones(2, 64, device="simgpu"))


def _skip(training: Training) -> None:
    training.optimizer.zero_grad()
    training.backward(torch.ones(16, 64, device="simgpu"))


def _on_another_stream(training: Training) -> None:
    """The step runs on it; what was fetched belongs to the stream of backward."""
    stream = torch.Stream(device="simgpu")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        training.update()
    torch.accelerator.current_stream().wait_stream(stream)
    torch.accelerator.synchronize()
    training.optimizer.zero_grad()
    training.backward(torch.ones(16, 64, device="simgpu"))


def _freeze(training: Training) -> None:
    """A part has no gradient: what was fetched of it is not stepped."""
    for parameter in training.net.body.parameters():
        parameter.grad = None


BETWEEN: dict[str, Callable[[Training], None]] = {
    "nothing": lambda training: None,
    "save": _save,
    "save and load": _save_and_load,
    "look": _look,
    "look at one": _look_at_one,
    "evaluate": _evaluate,
    "another forward": _forward_again,
    "a skipped step": _skip,
    "another stream": _on_another_stream,
    "a part without gradients": _freeze,
}


def _half_a_step(training: Training) -> None:
    training.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(training.num_steps)
    training.backward(torch.randn(16, 64, generator=generator, device="cpu").to("simgpu"))


@pytest.mark.parametrize(("between", "plan"), in_turns(list(BETWEEN), list(PLANS)))
def test_whatever_happens_between_backward_and_the_step(between: str, plan: str):
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS[plan]) as executor:
        for one in (reference, training):
            one.run(1)
            _half_a_step(one)
            if one is training:
                assert stats(executor).num_early > 0
            BETWEEN[between](one)
            one.update()
            one.run(2)
        assert same(training.result(), reference.result())
    assert same(training.run(2).result(), reference.run(2).result())


def test_the_plan_is_taken_off_between_backward_and_the_step():
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    for one in (reference, training):
        with contextlib.ExitStack() as undo:
            if one is training:
                executor = undo.enter_context(wrapped(one.net, OffloadOptimizer(BUCKET_BYTES), *EARLY))
            one.run(1)
            _half_a_step(one)
            if one is training:
                assert stats(executor).num_early > 0
        one.update()
    assert same(training.result(), reference.result())
    no_hooks_left(training.optimizer)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_backward_begins_without_the_state_that_the_one_before_has_asked_for(keeps_graph: bool):
    """Its activations are all there: with the state beside them, a step would take more than its plan promises."""
    training = Training("simgpu", plain(O.AdamW)).run(1)
    with wrapped(training.net, OffloadOptimizer(BUCKET_BYTES), *EARLY) as executor:
        training.run(1)
        adoption = executor.offload_users["optimizer"]
        held, fetch = [], adoption.fetch_early

        def note_and_fetch(num_bytes: int) -> None:
            held.append(sum(one.early.num_bytes for one in adoption._known.values()))
            fetch(num_bytes)

        adoption.fetch_early = note_and_fetch
        x = torch.ones(16, 64, device="simgpu")
        losses = [training.net(x).square().mean() for _ in range(2)]
        losses[0].backward(retain_graph=keeps_graph)
        first = list(held)
        losses[1].backward()
        assert len(first) == (0 if keeps_graph else 2)
        second = held[len(first) :]
        assert second[0] == 0
        assert second[1] > 0
        training.update()


@pytest.mark.parametrize("plan", PLANS)
def test_copies_of_the_model_are_plain(plan: str):
    training = Training("simgpu", plain(O.AdamW)).run(1)
    with wrapped(training.net, *PLANS[plan]):
        _half_a_step(training)
        copied = copy.deepcopy(training.net)
        torch.save(training.net, io.BytesIO())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in copied.modules())
        training.update()


@pytest.mark.parametrize("way", ["simgpu disk async", "simgpu tiered async"])
def test_state_on_disk_comes_early_and_that_of_parameters_on_the_host_waits_for_the_step(
    way: str, tmp_path: pathlib.Path
):
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    for one in (reference, training):
        one.net.body.cpu()
        one.net.body.register_forward_pre_hook(lambda module, args: args[0].cpu())
        one.net.body.register_forward_hook(lambda module, args, output: output.to("simgpu"))
    with opened(way, tmp_path) as transfers, adopted(training, transfers, BUCKET_BYTES) as adoption:
        adoption.expect_early(ALL)
        for one in (reference, training):
            one.run(2)
            _half_a_step(one)
            if one is training:
                adoption.fetch_early(ALL)
            one.update()
            one.run(1)
        assert adoption.stats.num_early == 1, "the head's; the body is on the host"
        assert same(training.result(), reference.result())


def test_another_plan_takes_over_between_backward_and_the_step():
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    offload = OffloadOptimizer(BUCKET_BYTES)
    with wrapped(training.net, offload, *EARLY) as executor:
        for one in (reference, training):
            one.run(1)
            _half_a_step(one)
            if one is training:
                held = state_bytes_here()
                executor.apply(plan_of([offload], device_type="simgpu"))
                assert state_bytes_here() < held, "what was fetched for the other plan is gone"
            one.update()
            one.run(2)
        assert same(training.result(), reference.result())


def test_parking_gives_up_what_was_fetched():
    reference = Training("simgpu", plain(O.AdamW)).run(3)
    _half_a_step(reference)
    reference.update()
    expected = reference.run(1).result()
    del reference
    before = state_bytes_here()
    training = Training("simgpu", plain(O.AdamW)).run(2)
    with wrapped(training.net, *PLANS["state"]) as executor:
        training.run(1)
        _half_a_step(training)
        assert stats(executor).num_early > 0
        memscale.park(training.net)
        assert state_bytes_here() == before
        memscale.resume(training.net)
        training.update()
        assert same(training.run(1).result(), expected)


# ------------------------------------------------------------------------------------------------ what it takes


class Stack(nn.Sequential):
    """Equal layers, of which each has a bucket."""

    def __init__(self, num_layers: int = 8, width: int = 128) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))


LAYER_BYTES = 128 * 128 * 4
STATE_BYTES = 2 * LAYER_BYTES
STREAMED_EARLY = tuple(FetchStateEarly(str(number), 2 * STATE_BYTES) for number in (5, 3))


def state_bytes_here() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def stack_plan(*early: FetchStateEarly, streams: bool = False) -> list[Any]:
    streamed = [StreamParameters(str(number)) for number in range(8)] if streams else []
    guests = [StepOnDevice(LAYER_BYTES)] if streams else []
    return [*streamed, *guests, OffloadOptimizer(LAYER_BYTES), *early]


def passed(net: nn.Module) -> None:
    net(torch.ones(2, 128, device="simgpu")).square().mean().backward()


@pytest.mark.parametrize("streams", [False, True])
def test_so_many_bytes_are_there_before_the_step(streams: bool):
    net = Stack().to("simgpu")
    early = [FetchStateEarly("4", 2 * STATE_BYTES), FetchStateEarly("1", STATE_BYTES + 1000)]
    optimizer = O.AdamW(net.parameters(), fused=None if streams else True)
    with wrapped(net, *stack_plan(*early, streams=streams)) as executor:
        for _ in range(2):
            passed(net)
            optimizer.step()
            optimizer.zero_grad()
        before = state_bytes_here()
        passed(net)
        gradients = 0 if streams else 8 * LAYER_BYTES
        visiting = state_bytes_here() - before - gradients - 3 * STATE_BYTES
        assert 0 <= visiting <= 2 * LAYER_BYTES, "three buckets, and none of the rest of what they might ask for"
        assert stats(executor).num_early == 2 * 3
        optimizer.zero_grad()
        with torch.no_grad():
            net(torch.ones(2, 128, device="simgpu"))
        assert state_bytes_here() - before <= 2 * LAYER_BYTES, "a forward gives them up"


def test_what_the_step_does_not_take_makes_room_for_what_it_steps():
    """The first half of the state came early, and the gradients of its parameters are gone."""
    net = Stack().to("simgpu")
    optimizer = O.AdamW(net.parameters(), fused=True)
    with wrapped(net, *stack_plan(FetchStateEarly("4", 4 * STATE_BYTES))) as executor:
        for _ in range(2):
            passed(net)
            optimizer.step()
            optimizer.zero_grad()
        passed(net)
        for layer in list(net)[:4]:
            layer.weight.grad = None
        before = state_bytes_here()
        torch.accelerator.reset_peak_memory_stats()
        optimizer.step()
        torch.accelerator.synchronize()
        assert stats(executor).num_early == 2 * 4
        assert torch.accelerator.max_memory_allocated() <= before


def _step_ms(*early: FetchStateEarly) -> tuple[float, int]:
    """The optimizer's step by the virtual clock, and the peak of the whole step; eight streamed layers."""
    net = Stack(8, 724).to("simgpu")
    optimizer, batch = O.AdamW(net.parameters()), torch.ones(2, 724, device="simgpu")
    streamed = [StreamParameters(str(number)) for number in range(8)]
    with wrapped(net, *streamed, StepOnDevice(WIDE_BYTES), OffloadOptimizer(WIDE_BYTES), *early):
        for _ in range(3):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            net(batch).square().mean().backward()
            torch.accelerator.synchronize()
            start_ms = simgpu.virtual_ms()
            optimizer.step()
            torch.accelerator.synchronize()
            elapsed_ms = simgpu.virtual_ms() - start_ms
            optimizer.zero_grad()
        return elapsed_ms, torch.accelerator.max_memory_allocated()


WIDE_BYTES = 724 * 724 * 4


def test_the_step_is_shorter_and_the_peak_rises_by_no_more_than_was_asked_for():
    """Of a guest four times its bytes come, and three leave: with half of the state there, as much leaves still."""
    early = [FetchStateEarly(str(number), 4 * WIDE_BYTES) for number in (5, 3)]
    (late_ms, late_peak), (early_ms, early_peak) = _step_ms(), _step_ms(*early)
    assert early_ms < 0.85 * late_ms
    assert 0 < early_peak - late_peak <= 8 * WIDE_BYTES


# --------------------------------------------------------------------------------------------------- mutations


def _watched_run(*, streams: bool) -> Any:
    """Steps back to back, without anything that would synchronise by accident."""
    net = Stack().to("simgpu")
    optimizer = O.AdamW(net.parameters(), lr=1e-2, fused=None if streams else True)
    executor = execute(net, plan_of(stack_plan(*STREAMED_EARLY, streams=streams), device_type="simgpu"), WATCHED)
    for _ in range(4):
        passed(net)
        optimizer.zero_grad()
        passed(net)  # the first one's arrivals are given up
        optimizer.step()
        optimizer.zero_grad()
    executor.detach()
    return on_host([list(net.parameters()), optimizer.state_dict()])


WATCHED = ExecutionSettings(asynchronous=True, async_config=AsyncOffloadConfig(), device=DEVICE)
WAITS = (
    "out after compute",
    "in after compute",
    "compute after arrival",
    "reuse after sent",
    "reuse after unread arrival",
)


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_is_needed(why: str, monkeypatch: pytest.MonkeyPatch):
    """Without any one of the waits, simgpu reports a race or the numbers are wrong."""
    original, caught = stream_order.order, []
    for streams in (False, True):
        expected = _watched_run(streams=streams)
        torch.accelerator.synchronize()
        assert simgpu.take_reports() == []
        with monkeypatch.context() as patch:
            patch.setattr(
                stream_order, "order", lambda who, event, name: None if name == why else original(who, event, name)
            )
            result = _watched_run(streams=streams)
        torch.accelerator.synchronize()
        caught.append(bool(simgpu.take_reports()) or not same(result, expected))
    assert any(caught), caught
