"""Moments of a step, settings of the process, and that training is the same with all of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from memscale import Config, Plan
from memscale._decide.allocator.settings import AllocatorSettings, parse_settings
from memscale._execute import reserving
from memscale._execute.executor import execute
from memscale._hardware.allocator_environment import SMALL_PAGES, may_switch
from memscale._plan import AllocatorUse, ReleasePoint, TileHead
from memscale._planning import make_plan
from memscale._planning.job import open_job
from memscale._planning.reserved.allocations import allocator_settings, settings_before_plans
from memscale._profile.inputs import Inputs
from memscale._torch import private
from tests.models import features, small, square_loss
from tests.techniques.tiling.models import HEADS, TILE_ROWS, Attached, builds, hugging_face, labels, tokens

FORWARD, BACKWARD = ReleasePoint("forward"), ReleasePoint("backward")
BEFORE_HEAD, AFTER_HEAD = ReleasePoint("forward", "head"), ReleasePoint("backward", "head")


@pytest.fixture
def undo() -> contextlib.ExitStack:
    return contextlib.ExitStack()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is really set, in order; the user has set nothing."""
    texts: list[str] = []
    set_settings = private.set_allocator_settings

    def seen(text: str) -> None:
        texts.append(text)
        set_settings(text)

    monkeypatch.setattr(private, "set_allocator_settings", seen)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return texts


# ---- moments


def test_moments_come_in_the_order_of_the_step(undo: contextlib.ExitStack) -> None:
    model, reached = small(), list[ReleasePoint]()
    reserving.watch(model, reserving.points_of(["head"]), reached.append, undo)
    loss = square_loss(model(features(0)))
    assert reached == [FORWARD, BEFORE_HEAD, ReleasePoint("after", "head"), ReleasePoint("after")]
    loss.backward()
    assert set(reached[4:]) == {BACKWARD, AFTER_HEAD}, "its output is the model's: one node has both"
    undo.close()
    square_loss(model(features(0))).backward()
    assert len(reached) == 6


def test_the_backward_of_a_part_comes_when_its_gradient_is_there(undo: contextlib.ExitStack) -> None:
    model, reached = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), list[str]()
    points = [ReleasePoint("backward", name) for name in ("", "0")]
    reserving.watch(model, points, lambda point: reached.append(point.module_fqn or "model"), undo)
    model[1].weight.register_hook(lambda gradient: reached.append("gradient of the last"))
    model[0].weight.register_hook(lambda gradient: reached.append("gradient of the first"))
    model(torch.ones(2, 4)).sum().backward()
    assert reached == ["model", "gradient of the last", "0", "gradient of the first"]
    undo.close()


def test_nothing_is_reached_without_a_graph(undo: contextlib.ExitStack) -> None:
    model, reached = small(), list[ReleasePoint]()
    reserving.watch(model, reserving.points_of(["head"]), reached.append, undo)
    with torch.no_grad():
        model(features(0))
    assert not reached
    undo.close()


def test_a_graph_that_outlives_the_plan_reaches_nothing(undo: contextlib.ExitStack) -> None:
    model, reached = small(), list[ReleasePoint]()
    reserving.watch(model, [BACKWARD], reached.append, undo)
    loss = square_loss(model(features(0)))
    undo.close()
    loss.backward()
    assert not reached


def test_a_tiled_head_stays_tiled(undo: contextlib.ExitStack) -> None:
    """Hooks on the way from its logits to the loss would make it compute them whole."""
    (kind, head), *_ = HEADS.items()
    model = hugging_face(kind)
    with Attached(model, TileHead(head, TILE_ROWS)), builds() as built:
        reached: list[ReleasePoint] = []
        points = reserving.points_of([head])
        reserving.watch(model, points, reached.append, undo)
        model(input_ids=tokens(), labels=labels()).loss.backward()
        undo.close()
        assert not built
    assert set(reached) == set(points) - {ReleasePoint("backward", head)}


def test_copies_are_left_in_peace(undo: contextlib.ExitStack) -> None:
    model = small()
    plan = planned(model)
    executor = execute(model, dataclasses.replace(plan, allocator=AllocatorUse("", (FORWARD, BACKWARD))))
    twin = copy.deepcopy(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in twin.modules())
    executor.detach()


# ---- settings


def test_settings_are_put_back(undo: contextlib.ExitStack, settings: list[str]) -> None:
    model = small()
    reserving.attach(AllocatorUse(SMALL_PAGES), model, undo, undo)
    assert settings == [SMALL_PAGES]
    undo.close()
    assert settings == [SMALL_PAGES, "expandable_segments:False,large_segment_size_mb:20"]


def test_two_models_share_them(settings: list[str]) -> None:
    models, stacks = [small(), small()], [contextlib.ExitStack(), contextlib.ExitStack()]
    for model, stack in zip(models, stacks, strict=True):
        reserving.attach(AllocatorUse(SMALL_PAGES), model, stack, stack)
    stacks[0].close()
    assert settings == [SMALL_PAGES]
    stacks[1].close()
    assert len(settings) == 2


def test_a_plan_made_under_the_settings_of_another_keeps_them(settings: list[str]) -> None:
    """Its numbers are for those, also after the other model is detached."""
    model, other = small(), small()
    executor = execute(other, dataclasses.replace(planned(other), allocator=AllocatorUse(SMALL_PAGES)))
    beside = execute(model, planned(model))
    executor.detach()
    assert settings == [SMALL_PAGES]
    assert allocator_settings() == parse_settings(SMALL_PAGES)
    beside.detach()
    assert len(settings) == 2
    assert allocator_settings() == AllocatorSettings()


def test_they_are_put_back_when_the_model_is_gone(undo: contextlib.ExitStack, settings: list[str]) -> None:
    model = small()
    reserving.attach(AllocatorUse(SMALL_PAGES), model, undo, undo)
    del model
    assert len(settings) == 2
    undo.close()
    assert len(settings) == 2


def test_what_the_user_has_set_stays(
    undo: contextlib.ExitStack,
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert not may_switch()
    reserving.attach(AllocatorUse(SMALL_PAGES), small(), undo, undo)
    assert not settings
    assert "max_split_size_mb:64" in caplog.text
    undo.close()


# ---- a plan


def planned(model: nn.Module) -> Plan:
    config = Config(mode="conservative", force_optimize=True, enable_logging=False)
    return make_plan(open_job(model, config), Inputs.from_sample(features(0)))


def trained(model: nn.Module, device: str) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        loss = square_loss(model(features(seed).to(device)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(parameter.detach().cpu() for parameter in model.parameters())]


def test_training_is_the_same_and_memory_goes_back(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = small().to("simgpu"), small().to("simgpu")
    model.load_state_dict(plain.state_dict())
    num_released = 0
    empty_cache = torch.accelerator.empty_cache

    def counted() -> None:
        nonlocal num_released
        num_released += 1
        empty_cache()

    monkeypatch.setattr(torch.accelerator, "empty_cache", counted)
    plan = dataclasses.replace(planned(model), allocator=AllocatorUse(SMALL_PAGES, (BEFORE_HEAD, BACKWARD), 10**9))
    executor = execute(model, plan)
    shown = trained(model, "simgpu")
    assert num_released == 6
    executor.detach()
    assert settings[-1].startswith("expandable_segments:False")
    assert all(map(torch.equal, shown, trained(plain, "simgpu")))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_settings_stay_from_plan_to_plan(settings: list[str]) -> None:
    model = small()
    plan = planned(model)
    executor = execute(model, dataclasses.replace(plan, allocator=AllocatorUse(SMALL_PAGES)))
    executor.apply(dataclasses.replace(plan, allocator=AllocatorUse(SMALL_PAGES, (), 5)))
    assert len(settings) == 1, "it asks for the same"
    executor.apply(plan)
    assert len(settings) == 1, "see NOTE [segments stay as they are] in reserving.py"
    assert allocator_settings() == parse_settings(SMALL_PAGES), "what is planned next is played with those"
    assert settings_before_plans() == AllocatorSettings(), "and with weights that were placed before them"
    executor.detach()
    assert len(settings) == 2
    assert allocator_settings() == AllocatorSettings()
    assert settings_before_plans() is None


def test_it_is_said_and_saved() -> None:
    use = AllocatorUse(SMALL_PAGES, (BACKWARD, ReleasePoint("after", "head")), 1_500_000_000, 20_000_000)
    plan = dataclasses.replace(
        planned(small()), allocator=use, predicted_allocated_bytes=10**9, predicted_reserved_bytes=10**9
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert "unused memory goes back before the backward pass, after the forward of head" in plan.explain()
    assert "20.0 MB of weights and optimizer state are moved together once" in plan.explain()
    assert "otherwise 1.500 GB would be reserved" in plan.explain()


@pytest.mark.parametrize("spills", [True, False])
def test_where_the_driver_would_spill_the_allocator_takes_no_more_than_the_card_has(
    spills: bool, cap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated device has no such limit of its own; CUDA's function takes these arguments."""
    fractions: list[tuple[float, torch.device]] = []
    module, device = torch.get_device_module("simgpu"), torch.device("simgpu", 0)
    limit = lambda fraction, device: fractions.append((fraction, device))  # noqa: E731
    monkeypatch.setattr(module, "set_per_process_memory_fraction", limit, raising=False)
    monkeypatch.setattr(reserving, "spills_silently", lambda: spills)
    cap(64 << 20)
    with contextlib.ExitStack() as undo:
        reserving.refuse_to_spill(device, undo)
        assert fractions == ([(1.0, device)] if spills else [])
    assert fractions == [(1.0, device)] * (2 * spills)


def test_linux_by_itself_does_not_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserving.sys, "platform", "linux")
    names = reserving.platform.uname()
    monkeypatch.setattr(reserving.platform, "uname", lambda: names._replace(release="6.1.0-generic"))
    assert not reserving.spills_silently()
    monkeypatch.setattr(reserving.platform, "uname", lambda: names._replace(release="5.15-Microsoft-WSL2"))
    assert reserving.spills_silently()
    monkeypatch.setattr(reserving.sys, "platform", "win32")
    assert reserving.spills_silently()
