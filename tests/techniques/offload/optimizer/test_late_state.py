"""Optimizer state that leaves under the next forward: the bits, what it takes, when it goes, and its waits."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memscale
import simgpu
from memscale import AsyncOffloadConfig
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadOptimizer, StreamParameters
from memscale.techniques.offload.optimizer.buckets import last_turns
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.late_departures import LateDepartures
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.transfer import in_flight, stream_order
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.techniques.offload.optimizer.test_early_state import (
    BUCKET_BYTES,
    LAYER_BYTES,
    STATE_BYTES,
    Stack,
    passed,
    state_bytes_here,
    stats,
    wrapped,
)
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.runs import DEVICE
from tests.techniques.offload.tiers import on_host, same
from tests.techniques.offload.training import O, Training, no_hooks_left, plain

ALL = 1 << 20
LATE = (SendStateLate("body", 2 * BUCKET_BYTES), SendStateLate("head", ALL))
EARLY = (FetchStateEarly("head", 2 * BUCKET_BYTES), FetchStateEarly("body", ALL))
PLANS: dict[str, tuple[Any, ...]] = {
    "state": (OffloadOptimizer(BUCKET_BYTES), *LATE),
    "early and late": (OffloadOptimizer(BUCKET_BYTES), *EARLY, *LATE),
    "half of the state": (OffloadOptimizer(BUCKET_BYTES, 0.5), *LATE),
    "beside guests": (
        *(StreamParameters("body"), StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES)),
        *(*EARLY, *LATE),
    ),
    "stretches": (StreamParameters("body"), StepOnDevice(5_000), OffloadOptimizer(5_000), *LATE),
    "computed again": (Checkpoint("body"), OffloadOptimizer(BUCKET_BYTES), *LATE),
}


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("name", "plan"), in_turns([n for n in OPTIMIZERS if n != "SGD"], list(PLANS)))
def test_the_bits_are_those_of_plain_training(name: str, plan: str):
    def make(net: torch.nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference, training = Training("simgpu", make).run(), Training("simgpu", make)
    with wrapped(training.net, *PLANS[plan]) as executor:
        training.run()
        assert same(training.result(), reference.result())
        assert (stats(executor).num_late > 0) == (stats(executor).waiting_bytes > 0), "Adafactor's is too small to wait"
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
        assert stats(executor).num_late > 0


def test_blocking_transfers_leave_nothing_for_later():
    reference, training = Training("simgpu", plain(O.AdamW)).run(), Training("simgpu", plain(O.AdamW))
    with wrapped(training.net, *PLANS["early and late"], asynchronous=False) as executor:
        assert same(training.run().result(), reference.result())
        assert stats(executor).num_late == 0


def test_the_compiler_traces_no_hooks_of_it():
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    for one in (reference, training):
        one.net.head.compile(backend="eager")
    reference.run(3)
    with wrapped(training.net, *PLANS["state"]) as executor:
        assert same(training.run(3).result(), reference.result())
        assert stats(executor).num_late == 0


# -------------------------------------------------------------------------- between the step and the next forward


def _save_and_load(training: Training) -> None:
    training.optimizer.load_state_dict(on_host(copy.deepcopy(training.optimizer.state_dict())))


def _save(training: Training) -> None:
    torch.save(training.optimizer.state_dict(), io.BytesIO())


def _look(training: Training) -> None:
    for entry in training.optimizer.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(2)


def _evaluate(training: Training) -> None:
    with torch.no_grad():
        training.net(torch.ones(2, 64, device="simgpu"))


def _step_again(training: Training) -> None:
    for parameter in training.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.update()


def _on_another_stream(training: Training) -> None:
    """The next forward lets go of what this one's stream has allocated."""
    stream = torch.Stream(device="simgpu")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        _step_again(training)
        training.net(torch.ones(2, 64, device="simgpu"))
    torch.accelerator.current_stream().wait_stream(stream)
    torch.accelerator.synchronize()


def _move(training: Training) -> None:
    training.net.head.to("cpu").to("simgpu")


BETWEEN: dict[str, Callable[[Training], None]] = {
    "nothing": lambda training: None,
    "save": _save,
    "save and load": _save_and_load,
    "look": _look,
    "evaluate": _evaluate,
    "another step": _step_again,
    "another stream": _on_another_stream,
    "a layer is moved": _move,
}


@pytest.mark.parametrize(("between", "plan"), in_turns(list(BETWEEN), list(PLANS)))
def test_whatever_happens_between_the_step_and_the_next_forward(between: str, plan: str):
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS[plan]) as executor:
        for one in (reference, training):
            one.run(2)
            if one is training:
                assert late_of(executor).num_bytes > 0
            BETWEEN[between](one)
            one.run(2)
        assert same(training.result(), reference.result())
    assert same(training.run(2).result(), reference.run(2).result())


def late_of(executor: Executor) -> LateDepartures:
    adoption = executor._offloading.users["optimizer"]
    assert isinstance(adoption.late, LateDepartures)
    return adoption.late


def test_the_plan_is_taken_off_while_state_still_leaves():
    reference, training = (Training("simgpu", plain(O.AdamW)).run(3) for _ in range(2))
    with contextlib.ExitStack() as undo:
        executor = undo.enter_context(wrapped(training.net, *PLANS["early and late"]))
        training.run(2)
        assert late_of(executor).num_bytes > 0
    assert same(training.run(1).result(), reference.run(3).result())
    no_hooks_left(training.optimizer)


def test_another_plan_takes_over_while_state_still_leaves():
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    offload = OffloadOptimizer(BUCKET_BYTES)
    with wrapped(training.net, offload, *LATE) as executor:
        training.run(2)
        held = state_bytes_here()
        assert late_of(executor).num_bytes > 0
        executor.apply(plan_of([offload], device_type="simgpu"))
        assert state_bytes_here() < held
        assert late_of(executor).room_bytes == 0
        assert same(training.run(2).result(), reference.run(4).result())


def test_parking_lets_go_of_it():
    expected = Training("simgpu", plain(O.AdamW)).run(5).result()
    before = state_bytes_here()
    training = Training("simgpu", plain(O.AdamW)).run(2)
    with wrapped(training.net, *PLANS["state"]) as executor:
        training.run(2)
        assert late_of(executor).num_bytes > 0
        memscale.park(training.net)
        assert state_bytes_here() == before
        memscale.resume(training.net)
        assert same(training.run(1).result(), expected)


@pytest.mark.parametrize("plan", PLANS)
def test_copies_of_the_model_are_plain(plan: str):
    training = Training("simgpu", plain(O.AdamW)).run(1)
    with wrapped(training.net, *PLANS[plan]):
        training.run(2)
        copied = copy.deepcopy(training.net)
        torch.save(training.net, io.BytesIO())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in copied.modules())


def test_a_forward_that_fails_lets_go_of_it():
    training = Training("simgpu", plain(O.AdamW)).run(2)
    with wrapped(training.net, *PLANS["state"]) as executor:
        training.run(2)
        assert late_of(executor).num_bytes > 0
        with pytest.raises(RuntimeError):
            training.net(torch.ones(2, 3, device="simgpu"))
        assert late_of(executor).num_bytes == 0


def test_what_cannot_be_let_go_of_is_held_still(monkeypatch: pytest.MonkeyPatch):
    training = Training("simgpu", plain(O.AdamW)).run(2)
    expected = Training("simgpu", plain(O.AdamW)).run(5).result()
    with wrapped(training.net, *PLANS["state"]) as executor:
        training.run(2)
        release, num_calls = in_flight.Sent.release, 0

        def refuse_once(sent: in_flight.Sent) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise RuntimeError("the driver is gone")
            release(sent)

        monkeypatch.setattr(in_flight.Sent, "release", refuse_once)
        before = state_bytes_here()
        with pytest.raises(RuntimeError, match="the driver is gone"):
            training.net(torch.ones(2, 64, device="simgpu"))
        assert num_calls > 1, "a forward that ends lets go of all"
        assert late_of(executor).num_bytes == 0
        assert state_bytes_here() < before
        assert same(training.run(1).result(), expected)


# ------------------------------------------------------------------------------------------------ what it takes


def test_the_last_turns_are_late_as_far_as_there_is_room():
    assert last_turns([5, 5, 0, 3, 0], 8) == {1, 3}
    assert last_turns([5, 5, 0, 3, 0], 7) == {3}
    assert last_turns([5, 5], 4) == last_turns([], 4) == last_turns([0, 0], 9) == frozenset()


def test_so_many_bytes_are_there_until_each_layer_lets_go_of_its_own():
    net, seen = Stack().to("simgpu"), []
    late = [SendStateLate("1", 2 * STATE_BYTES + 1000), SendStateLate("4", STATE_BYTES)]
    optimizer = O.AdamW(net.parameters(), fused=True)
    with wrapped(net, OffloadOptimizer(LAYER_BYTES), *late) as executor:
        for place in (0, 1, 3, 4):
            net[place].register_forward_hook(lambda *_: seen.append(late_of(executor).num_bytes))
        passed(net)
        optimizer.step()
        optimizer.zero_grad()
        bare = state_bytes_here()
        assert late_of(executor).num_bytes == 0, "how large state is shows when it has been made"
        passed(net)
        optimizer.step()
        optimizer.zero_grad()
        assert state_bytes_here() - bare == 3 * STATE_BYTES, "three buckets, and none of the rest of what might be late"
        seen.clear()
        passed(net)
        optimizer.zero_grad()
        assert seen == [3 * STATE_BYTES, STATE_BYTES, STATE_BYTES, 0]
        assert state_bytes_here() == bare
        assert stats(executor).num_late == 3


HALF_BYTES = 512 * 512 * 4
"""The parameters of one of the layers, and half of its state."""


def _whole_step_ms(*actions: Any) -> tuple[float, int]:
    """A step by the virtual clock, one of several in a row, and its peak; the state of eight layers travels."""
    net, num_steps = Stack(8, 512).to("simgpu"), 2
    optimizer, batch = O.AdamW(net.parameters(), fused=True), torch.ones(2048, 512, device="simgpu")

    def train() -> None:
        for _ in range(num_steps):
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()

    with wrapped(net, OffloadOptimizer(HALF_BYTES), *actions):
        train()
        torch.accelerator.reset_peak_memory_stats()
        start_ms = simgpu.virtual_ms()
        train()
        return (simgpu.virtual_ms() - start_ms) / num_steps, torch.accelerator.max_memory_allocated()


def test_the_whole_step_is_shorter_and_the_peak_rises_by_no_more_than_was_late():
    """As much comes as leaves: with half of the state early and half late, both directions have half as much to do."""
    beside = [
        *(FetchStateEarly(str(number), 4 * HALF_BYTES) for number in (6, 4)),
        *(SendStateLate(str(number), 4 * HALF_BYTES) for number in (5, 7)),
    ]
    (plain_ms, plain_peak), (both_ms, both_peak) = _whole_step_ms(), _whole_step_ms(*beside)
    link_ms = 2 * 8 * HALF_BYTES / 24e9 * 1e3
    assert plain_ms - both_ms > 0.2 * link_ms
    assert both_peak - plain_peak <= 8 * HALF_BYTES


# --------------------------------------------------------------------------------------------------- mutations

WATCHED = ExecutionSettings(asynchronous=True, async_config=AsyncOffloadConfig(), device=DEVICE)
WAITS = (
    "out after compute",
    "in after compute",
    "compute after arrival",
    "reuse after sent",
)


def _watched_run() -> Any:
    """Steps back to back, without anything that would synchronise by accident. All state is early and late."""
    net = Stack().to("simgpu")
    optimizer = O.AdamW(net.parameters(), lr=1e-2, fused=True)
    late = [SendStateLate(str(number), 4 * STATE_BYTES) for number in (0, 1)]
    early = [FetchStateEarly(str(number), 4 * STATE_BYTES) for number in (7, 6)]
    plan = plan_of([OffloadOptimizer(LAYER_BYTES), *early, *late], device_type="simgpu")
    executor = execute(net, plan, WATCHED)
    for _ in range(4):
        passed(net)
        optimizer.step()
        optimizer.zero_grad()
    executor.detach()
    return on_host([list(net.parameters()), optimizer.state_dict()])


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_is_needed(why: str, monkeypatch: pytest.MonkeyPatch):
    """Without any one of the waits, simgpu reports a race or the numbers are wrong."""
    original = stream_order.order
    expected = _watched_run()
    torch.accelerator.synchronize()
    assert simgpu.take_reports() == []
    with monkeypatch.context() as patch:
        patch.setattr(
            stream_order, "order", lambda who, event, name: None if name == why else original(who, event, name)
        )
        result = _watched_run()
    torch.accelerator.synchronize()
    assert simgpu.take_reports() or not same(result, expected)
