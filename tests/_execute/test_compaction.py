"""What stays on a device is moved together: less is reserved, and nobody sees anything else of it."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale._decide.allocator import CachingAllocator
from memscale._decide.allocator.settings import parse_settings
from memscale._errors import OffloadError
from memscale._execute import compaction
from memscale._execute.compaction import move_together, weights_of
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._hardware.allocator_environment import SMALL_PAGES
from memscale._plan import Action, AllocatorUse, Checkpoint, OffloadOptimizer, StepInBuckets, StreamParameters
from memscale._torch import private
from memscale._units import MIB
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests.parity import plan_of
from tests.techniques.offload.runs import DEVICE, Gpt, backward, gradients, pair, same, weights

BUCKET_BYTES = 8192
USE = AllocatorUse(SMALL_PAGES, compacted_bytes=1)
STREAMED = (StreamParameters("blocks.0"), StreamParameters("blocks.2"))
PLANS: dict[str, Sequence[Action]] = {
    "checkpoints": (Checkpoint("blocks.1"),),
    "buckets": (Checkpoint("blocks.1"), StepInBuckets(BUCKET_BYTES)),
    "share": (OffloadOptimizer(BUCKET_BYTES, resident_share=0.5),),
    "away": (OffloadOptimizer(BUCKET_BYTES),),
    "streamed": (*STREAMED, StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES)),
}
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were moved together, each time."""
    found: list[int] = []
    really = compaction.move_together

    def counted(*args: Any) -> int:
        found.append(really(*args))
        return found[-1]

    monkeypatch.setattr(compaction, "move_together", counted)
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int] = range(4)) -> list[torch.Tensor]:
    """Two batches a step; the losses."""
    losses = []
    for step in steps:
        losses += [backward(model, 2 * step), backward(model, 2 * step + 1)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def applied(model: nn.Module, actions: Sequence[Action], use: AllocatorUse = USE, **settings: Any) -> Executor:
    executor = Executor(model, ExecutionSettings(device=DEVICE, **settings))
    executor.adopt()
    executor.apply(dataclasses.replace(plan_of(actions), allocator=use))
    return executor


# ---- same training


@pytest.fixture(scope="module")
def expected() -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    plain = pair(Gpt)[0]
    return trained(plain, adamw(plain)), weights(plain), torch.get_rng_state()


@pytest.mark.parametrize(
    ("name", "asynchronous"), [*((name, False) for name in PLANS), ("share", True), ("streamed", True)]
)
def test_training_is_the_same(
    name: str, asynchronous: bool, expected: Any, moved: list[int], simgpu_device: Any
) -> None:
    model = pair(Gpt)[1]
    executor = applied(model, PLANS[name], asynchronous=asynchronous)
    optimizer = adamw(model)
    on_device = sum(
        {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters() if p.device == DEVICE}.values()
    )
    losses = trained(model, optimizer)
    assert all(map(torch.equal, losses, expected[0]))
    assert same(weights(model), expected[1])
    assert torch.equal(torch.get_rng_state(), expected[2])
    assert moved[0] >= on_device > 0
    assert len(moved) == 2, "with the state, once that is there"
    share = {"checkpoints": 2.0, "buckets": 2.0, "share": 1.0}.get(name, 0.0)
    assert moved[1] > moved[0] + 0.9 * share * on_device, "of the others what is too small to wait elsewhere"
    executor.detach()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_storages_stay_and_get_other_memory(simgpu_device: Any) -> None:
    """So all tensors over them follow, as tied weights do."""
    model = pair(Gpt)[0]
    before = weights(model)
    keys = [private.storage_key(p.untyped_storage()) for p in model.parameters()]
    assert move_together(model, weights_of(model)) > 0
    assert [private.storage_key(p.untyped_storage()) for p in model.parameters()] == keys
    assert model.head.weight is model.embed.weight
    assert same(weights(model), before)


def test_a_graph_that_lives_goes_on(simgpu_device: Any) -> None:
    """What it has saved stays where it is, with whatever is saved of it."""
    model, other = pair(Gpt)[0], pair(Gpt)[0]
    ids = torch.arange(8, device=DEVICE).reshape(1, 8)
    losses = []
    for one, moves in ((model, True), (other, False)):
        torch.manual_seed(0)
        losses.append(one(ids).square().mean())
        assert not moves or move_together(one, weights_of(one)) > 0
        losses[-1].backward()
    assert torch.equal(losses[0].cpu(), losses[1].cpu())
    ours, theirs = gradients(model), gradients(other)
    assert same(ours, theirs)
    del losses


# ---- less is reserved


@pytest.fixture
def caching(simgpu_device: Any) -> Iterator[None]:
    """Reserved bytes are those of PyTorch's allocator with segments that grow."""
    torch.accelerator.empty_cache()
    simgpu.set_allocator(CachingAllocator(parse_settings(SMALL_PAGES)))
    yield
    simgpu.set_allocator(None)


def scattered(num: int) -> nn.Module:
    """Weights with gaps between them, whose pages are used in part."""
    model = nn.ParameterList()
    gaps = []
    for value in range(num):
        model.append(nn.Parameter(torch.full((9 * MIB // 4,), float(value), device=DEVICE)))
        gaps.append(torch.empty(12 * MIB, dtype=torch.uint8, device=DEVICE))
    return model


def test_less_is_reserved(caching: None) -> None:
    model = scattered(8)
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    assert before >= 1.2 * 72 * MIB, "what is unused cannot go back"
    assert move_together(model, weights_of(model)) == 72 * MIB
    assert torch.accelerator.memory_reserved() == 72 * MIB
    assert torch.accelerator.memory_allocated() == 72 * MIB
    assert all(bool((p == value).all()) for value, p in enumerate(model))


def test_what_lies_together_is_left_there(caching: None) -> None:
    """Plans that take turns do not move it each time."""
    model = scattered(3)
    assert move_together(model, weights_of(model)) == 27 * MIB
    assert move_together(model, weights_of(model)) == 0
    model.append(nn.Parameter(torch.zeros(MIB, device=DEVICE)))
    assert move_together(model, weights_of(model)) == 31 * MIB


# ---- what is not moved


def test_memory_that_others_hold_stays_and_is_named(simgpu_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)).to(DEVICE)
    kept = model[0].state_dict()
    place = model[0].weight.data_ptr()
    assert move_together(model, weights_of(model)) == model[1].weight.nbytes
    assert model[0].weight.data_ptr() == place == kept["weight"].data_ptr()
    assert "16.4 kB of weights and optimizer state stay where they are" in caplog.text


def test_a_host_without_room_leaves_all_where_it_is(
    simgpu_device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(64, 64).to(DEVICE)
    place = model.weight.data_ptr()
    monkeypatch.setattr(compaction, "host_memory", lambda: (10**9, 100))
    assert move_together(model, weights_of(model)) == 0
    assert model.weight.data_ptr() == place
    assert "host memory has no room" in caplog.text


def test_a_model_on_the_host_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(64, 64)
    assert move_together(model, weights_of(model)) == 0
    assert not caplog.records


def test_nothing_is_moved_before_there_is_state(moved: list[int], simgpu_device: Any) -> None:
    """As where a loss scale makes the loop leave out its first steps."""
    model = pair(Gpt)[1]
    executor = applied(model, PLANS["checkpoints"])
    optimizer = adamw(model)
    for step in range(2):
        backward(model, step)
        optimizer.zero_grad()
        optimizer.step()
    assert len(moved) == 1
    trained(model, optimizer, range(3))
    assert len(moved) == 2
    executor.detach()


# ---- errors


def test_an_error_on_the_way_to_the_host_brings_all_back(simgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair(Gpt)[0]
    before, left = weights(model), [5]
    init = compaction._Waiting.__init__

    def failing(self: Any, *args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        init(self, *args)

    monkeypatch.setattr(compaction._Waiting, "__init__", failing)
    with pytest.raises(MemoryError):
        move_together(model, weights_of(model))
    assert same(weights(model), before)
    assert all(p.device == DEVICE for p in model.parameters())
    backward(model)


def test_what_finds_no_room_is_on_the_host_and_nothing_is_lost(
    simgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair(Gpt)[0]
    before, left = weights(model), [5]
    bring_back = compaction._Waiting.bring_back

    def failing(self: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise torch.OutOfMemoryError("taken by somebody else")
        bring_back(self)

    monkeypatch.setattr(compaction._Waiting, "bring_back", failing)
    with pytest.raises(OffloadError, match=r"do not fit back on simgpu:0.* stay on the host.*\.to\(\)"):
        move_together(model, weights_of(model))
    assert {p.device.type for p in model.parameters()} == {"cpu", "simgpu"}
    assert same(weights(model), before)
    model.to(DEVICE)
    backward(model)


def test_a_model_that_is_gone_is_forgotten(simgpu_device: Any) -> None:
    model = pair(Gpt)[0]
    num_known = len(compaction._PLACED)
    move_together(model, weights_of(model))
    assert len(compaction._PLACED) == num_known + 1
    del model
    gc.collect()
    assert len(compaction._PLACED) == num_known
