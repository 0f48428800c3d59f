"""One plan after another on a model that trains: waiting state goes on waiting, and room is asked for beforehand."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale._config import AsyncOffloadConfig
from memscale._errors import StoreFullError
from memscale._execute.executor import Executor, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import (
    Action,
    Checkpoint,
    Conditions,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    Reason,
    StreamParameters,
)
from memscale.techniques.offload.optimizer.buckets import Waiting
from memscale.techniques.offload.store import tiers
from tests._torch.test_overrides import snapshot
from tests.parity import plan_of, seed
from tests.techniques.offload.runs import (
    DEVICE,
    MODES,
    Gpt,
    backward,
    let_autograd_finish,
    loss_of,
    pair,
    same,
    tokens,
    weights,
)

BUCKET_BYTES = 8192
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
CHECKPOINTED = tuple(Checkpoint(fqn) for fqn in BLOCKS)
STREAMED = tuple(StreamParameters(fqn) for fqn in BLOCKS)


def state_away(why: str = "asked for") -> OffloadOptimizer:
    return OffloadOptimizer(BUCKET_BYTES, reason=Reason(why))


def executor_for(model: nn.Module, **settings: Any) -> Executor:
    executor = Executor(model, ExecutionSettings(device=DEVICE, **settings))
    executor.adopt()
    return executor


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def trained_plainly(model: nn.Module, num_steps: int) -> dict[str, torch.Tensor]:
    steps(model, make_optimizer(model), 0, num_steps)
    return weights(model)


@MODES
@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
def test_plans_follow_one_another_and_training_is_the_same(
    asynchronous: bool, has_disk: bool, tmp_path: pathlib.Path, no_races: Any, no_leaks: Any
):
    plain, model = pair(Gpt)
    plans: list[tuple[Action, ...]] = [
        (*CHECKPOINTED, state_away()),
        (*CHECKPOINTED[:1], state_away("a larger batch")),
        (*STREAMED[:2], *CHECKPOINTED[2:], state_away()),
        (*STREAMED, OffloadActivations("blocks.1"), state_away()),
        STREAMED,
        (*STREAMED[1:], state_away()),
        (state_away(),),
        (),
    ]
    expected = trained_plainly(plain, 2 * len(plans))
    del plain
    executor = executor_for(model, asynchronous=asynchronous, offload_dir=str(tmp_path) if has_disk else None)
    optimizer = None
    for number, actions in enumerate(plans):
        executor.apply(plan_of(actions))
        optimizer = optimizer or make_optimizer(model)
        steps(model, optimizer, 2 * number, 2 * number + 2)
    executor.detach()
    assert same(weights(model), expected)
    assert not any(isinstance(entry, Waiting) for entry in optimizer.state.values())
    assert all(t.device == p.device for p, s in optimizer.state.items() for t in s.values() if t.dim())
    del optimizer


def travelling(actions: Iterable[Action], *, overlaps: bool, window_bytes: int = 1 << 16) -> Plan:
    """A plan that says how its tensors travel."""
    conditions = Conditions(
        async_offload=overlaps,
        prefetch_depth=1,
        prefetch_bytes=1 << 16,
        window_bytes=window_bytes,
        min_tensor_bytes=1024,
    )
    return dataclasses.replace(plan_of(actions), conditions=conditions)


@pytest.mark.parametrize("first", [True, False], ids=["overlapped first", "blocking first"])
def test_plans_that_travel_otherwise_follow_one_another_and_training_is_the_same(
    first: bool, no_races: Any, no_leaks: Any
):
    """The executor goes by what each plan says, whatever it was made with."""
    plain, model = pair(Gpt)
    both = (*STREAMED[:2], OffloadActivations("blocks.2"), state_away())
    plans = [
        travelling(both, overlaps=first),
        travelling(both, overlaps=not first),
        travelling(STREAMED, overlaps=first, window_bytes=1 << 12),
        travelling((*CHECKPOINTED, state_away()), overlaps=True),
        travelling((*CHECKPOINTED, state_away()), overlaps=False),
    ]
    expected = trained_plainly(plain, 2 * len(plans))
    del plain
    executor = executor_for(model, asynchronous=not first)
    optimizer = None
    for number, plan in enumerate(plans):
        executor.apply(plan)
        assert plan.conditions is not None
        assert executor.settings.asynchronous is plan.conditions.async_offload
        assert executor.settings.async_config.window_bytes == plan.conditions.window_bytes
        optimizer = optimizer or make_optimizer(model)
        steps(model, optimizer, 2 * number, 2 * number + 2)
    executor.detach()
    assert same(weights(model), expected)
    del optimizer


def test_state_that_waits_in_pinned_memory_goes_on_waiting_when_its_transfers_begin_to_block(no_leaks: Any):
    model = Gpt(6, 64)
    executor = executor_for(model)
    executor.apply(travelling([*CHECKPOINTED, state_away()], overlaps=True))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 2)
    adoption, tier = executor.stats().transfers["optimizer"], executor._offloading.parked
    assert tier is not None
    assert tier.transfers is not None
    assert tier.transfers.asynchronous
    executor.apply(travelling([*CHECKPOINTED[1:], state_away("a larger batch")], overlaps=False))
    assert executor.stats().transfers["optimizer"] is adoption
    assert not tier.transfers.asynchronous
    steps(model, optimizer, 2, 3)
    executor.detach()


def test_the_state_never_comes_back_to_the_device_between_two_plans(no_leaks: Any):
    model = Gpt(6, 64)
    executor = executor_for(model)
    executor.apply(plan_of([*CHECKPOINTED, state_away()]))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 2)
    adoption = executor.stats().transfers["optimizer"]
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    optimizer.zero_grad()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    executor.apply(plan_of([*CHECKPOINTED[1:], state_away("a larger batch")]))
    assert torch.accelerator.max_memory_allocated() - before < 0.1 * state_bytes
    steps(model, optimizer, 2, 3)
    assert executor.stats().transfers["optimizer"] is adoption
    assert adoption.num_steps == 3
    executor.detach()
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.device == DEVICE)
    assert held == 0, "the model was wrapped on the CPU and is back there"


def device_bytes() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


@MODES
@pytest.mark.parametrize("away", [(), (state_away(),)], ids=["state beside", "state away"])
def test_what_two_plans_stream_stays_at_home_between_them(
    away: tuple[Action, ...], asynchronous: bool, no_races: Any, no_leaks: Any
):
    """Blocks that only the second streams leave before those come that only the first has streamed."""
    plain, model = pair(lambda: Gpt(6, 64))
    expected = trained_plainly(plain, 6)
    del plain
    blocks = [StreamParameters(f"blocks.{index}") for index in range(6)]
    executor = executor_for(model, asynchronous=asynchronous)
    optimizer = make_optimizer(model)
    resting, peaks = [], []
    for number, streamed in enumerate((blocks[:4], blocks[2:], blocks[1:5])):
        torch.accelerator.reset_peak_memory_stats()
        executor.apply(plan_of([*streamed, *away]))
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated())
        steps(model, optimizer, 2 * number, 2 * number + 2)
        optimizer.zero_grad()
        resting.append(device_bytes())
    largest = max(p.nbytes for p in model.parameters())
    for first, second, peak in zip(resting[:-1], resting[1:], peaks[1:], strict=True):
        # State of one parameter at a time is beside the bucket that it leaves in.
        assert peak <= max(first, second) + (5 if away else 2) * largest
    before = device_bytes()
    homes = {p.data_ptr() for p in model.blocks[2].parameters()}
    executor.apply(plan_of([*blocks[2:5], *away]))
    assert homes == {p.data_ptr() for p in model.blocks[2].parameters()}, "they were not even copied"
    assert device_bytes() > before
    executor.detach()
    assert same(weights(model), expected)
    assert {p.device.type for p in model.parameters()} == {"cpu"}, "where the model was wrapped"
    assert all(t.device == p.device for p, s in optimizer.state.items() for t in s.values() if t.dim())


@MODES
def test_a_next_plan_that_cannot_be_attached_leaves_no_parameter_at_home(asynchronous: bool, no_leaks: Any):
    plain, model = pair(Gpt)
    expected = trained_plainly(plain, 3)
    del plain
    model.to(DEVICE)
    executor = executor_for(model, asynchronous=asynchronous)
    executor.apply(plan_of(STREAMED[:2]))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 2)
    with pytest.raises(memscale.PlanError):
        executor.apply(plan_of([*STREAMED[1:], StreamParameters("blocks.1.up")]))
    assert {p.device.type for p in model.parameters()} == {DEVICE.type}
    steps(model, optimizer, 2, 3)
    executor.detach()
    assert same(weights(model), expected)


def test_a_suspended_plan_leaves_the_state_where_it_waits(no_leaks: Any):
    model = Gpt().to(DEVICE)
    executor = executor_for(model)
    executor.apply(plan_of([state_away()]))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 1)
    executor.suspend()
    assert any(isinstance(entry, Waiting) for entry in optimizer.state.values())
    executor.apply(plan_of(CHECKPOINTED))
    assert not any(isinstance(entry, Waiting) for entry in optimizer.state.values())
    executor.detach()


# --------------------------------------------------------------------------------------------------------------- room


def test_a_plan_whose_tensors_have_nowhere_to_wait_is_refused_beforehand(no_leaks: Any):
    model = Gpt().to(DEVICE)
    before = snapshot(model)
    executor = Executor(model, ExecutionSettings(device=DEVICE, host_budget_bytes=100_000))
    plan = dataclasses.replace(plan_of([*CHECKPOINTED, state_away()]), movable_bytes=200_000)
    with pytest.raises(StoreFullError, match=r"200.0 kB are to wait.*100.0 kB"):
        executor.apply(plan)
    assert snapshot(model) == before
    executor.apply(dataclasses.replace(plan, movable_bytes=90_000))
    executor.detach()


def test_what_waits_already_counts(no_leaks: Any):
    model = Gpt()
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    executor = Executor(model, ExecutionSettings(device=DEVICE, host_budget_bytes=2 * state_bytes))
    plan = dataclasses.replace(plan_of([*CHECKPOINTED, state_away()]), movable_bytes=int(1.5 * state_bytes))
    executor.apply(plan)
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 1)
    waiting = [entry for entry in optimizer.state.values() if isinstance(entry, Waiting)]
    assert waiting
    executor.apply(dataclasses.replace(plan, actions=(*CHECKPOINTED[1:], state_away())))
    still = [entry for entry in optimizer.state.values() if isinstance(entry, Waiting)]
    assert all(a is b for a, b in zip(still, waiting, strict=True))
    executor.detach()


def test_a_failed_attach_gives_the_tier_back(tmp_path: pathlib.Path, no_leaks: Any):
    model = Gpt()
    executor = Executor(model, ExecutionSettings(device=DEVICE, offload_dir=str(tmp_path), asynchronous=True))
    with pytest.raises(Exception, match=r"blocks\.9"):
        executor.attach([state_away(), OffloadActivations("blocks.9")])
    assert list(tmp_path.iterdir()) == []
    executor.attach([state_away()])
    executor.detach()


# ----------------------------------------------------------------------------------------------------------- warnings


def test_an_optimizer_that_died_was_seen_all_the_same():
    seed(1)
    model = Gpt()
    executor = executor_for(model)
    executor.apply(plan_of([state_away()]))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 1)
    gone = weakref.ref(optimizer)
    del optimizer
    let_autograd_finish()
    gc.collect()
    assert gone() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.detach()


def test_a_model_that_nobody_was_seen_to_step_is_told():
    model = Gpt()
    executor = executor_for(model)
    executor.apply(plan_of([state_away()]))
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="no optimizer of this Gpt was ever seen"):
        executor.detach()


# --------------------------------------------------------------------------------------------------------- the device


def test_a_device_with_one_copy_engine_gets_one_stream(simgpu_device: Any, monkeypatch: pytest.MonkeyPatch):
    assert tiers.num_copy_engines(DEVICE) == 2
    module = torch.get_device_module(DEVICE)
    properties = module.get_device_properties(DEVICE)
    properties.async_engine_count = 1
    monkeypatch.setattr(module, "get_device_properties", lambda device=None: properties)
    assert tiers.num_copy_engines(DEVICE) == 1


@pytest.mark.parametrize("asked_for", [False, True])
def test_memory_that_device_and_host_share_is_told_and_not_offloaded_to(
    asked_for: bool, simgpu_device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    module = torch.get_device_module(DEVICE)
    properties = module.get_device_properties(DEVICE)
    properties.is_integrated = True
    monkeypatch.setattr(module, "get_device_properties", lambda device=None: properties)
    model = Gpt().to(DEVICE)
    wish = {"enable_offloading": True} if asked_for else {}
    config = memscale.Config(force_optimize=True, enable_logging=False, **wish)
    telling = pytest.warns(UserWarning, match="shares its memory") if asked_for else contextlib.nullcontext()
    with caplog.at_level("INFO", logger="memscale"), telling:
        memscale.wrap(model, config, sample_input=tokens())
    assert asked_for or "shares its memory with the host" in caplog.text
    kinds = {type(action) for action in model._memscale_executor.plan.actions}
    assert not kinds & {OffloadActivations, OffloadOptimizer, StreamParameters}
    memscale.detach(model)


def test_a_device_without_streams_is_served_without_them(simgpu_device: Any, monkeypatch: pytest.MonkeyPatch):
    assert tiers.has_streams(DEVICE)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this device has no streams")

    model = Gpt()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "Stream", refuse)
        assert not tiers.has_streams(DEVICE)
        small = AsyncOffloadConfig(min_tensor_bytes=1024)
        executor = executor_for(model, asynchronous=True, async_config=small)
        executor.apply(plan_of([OffloadActivations("blocks.0"), StreamParameters("blocks.1"), state_away()]))
        steps(model, make_optimizer(model), 0, 2)
        assert executor.stats().transfers["activations"].num_sent > 0
        executor.detach()


def test_a_larger_batch_is_planned_for_the_device_though_all_parameters_are_at_home(no_leaks: Any):
    model = Gpt().to(DEVICE)
    config = memscale.Config(force_optimize=True, enable_logging=False)
    memscale.wrap(model, config, tokens(0, (1, 16)))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    executor = executor_of(model)
    assert executor is not None
    first = executor.plan
    assert first is not None
    model(tokens(0, (64, 16))).sum().backward()
    again = executor.plan
    assert again is not None
    assert again is not first
    assert any(isinstance(action, StreamParameters) for action in again.actions)
    memscale.detach(model)


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_state_in_host_memory_goes_to_disk_only_if_the_host_has_no_room(
    has_room: bool, tmp_path: pathlib.Path, no_races: Any, no_leaks: Any
):
    """Streamed layers live on the host, and so does their state as long as all that waits fits there."""
    plain, model = pair(Gpt)
    wanted = trained_plainly(plain, 3)
    streamed_bytes = sum(p.nbytes for fqn in BLOCKS for p in model.get_submodule(fqn).parameters())
    waiting_bytes = 2 * sum(p.nbytes for p in model.parameters())
    host_bytes = 2 * streamed_bytes + (waiting_bytes if has_room else waiting_bytes // 8)
    executor = executor_for(model, host_budget_bytes=host_bytes, offload_dir=str(tmp_path))
    executor.attach([*STREAMED, state_away()], waiting_bytes=waiting_bytes)
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 3)
    transfers = executor._offloading.users["optimizer"].transfers
    disk = transfers.store.leaves()[1]
    assert (disk.counters.held_bytes == 0) == has_room
    assert same(weights(model), wanted)
    executor.detach()
    del optimizer


@MODES
def test_state_that_is_there_already_leaves_before_the_first_step_of_the_plan(
    asynchronous: bool, no_races: Any, no_leaks: Any
):
    """Nobody told us of the optimizer, and the forward that begins has no room for its state."""
    plain, model = pair(Gpt)
    expected = trained_plainly(plain, 4)
    del plain
    executor = executor_for(model, asynchronous=asynchronous)
    executor.apply(plan_of(CHECKPOINTED))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, 2)
    moments = sum(2 * parameter.nbytes for parameter in model.parameters())
    before = torch.accelerator.memory_allocated()
    executor.apply(plan_of((*CHECKPOINTED, state_away())))
    torch.accelerator.synchronize()
    assert before - torch.accelerator.memory_allocated() > 0.8 * moments, "all but tensors of a few bytes"
    steps(model, optimizer, 2, 4)
    executor.detach()
    assert same(weights(model), expected)
