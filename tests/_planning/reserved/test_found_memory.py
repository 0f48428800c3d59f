"""Steps that go on in memory as it was found: what an earlier plan has placed stays where it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from memscale import Config, Hardware
from memscale._decide.allocator import CachingAllocator
from memscale._decide.allocator.settings import AllocatorSettings
from memscale._hardware.allocator_environment import SMALL_PAGES
from memscale._plan import AllocatorUse
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.reserved import found_memory
from memscale._planning.reserved.allocation_log import AllocationLog, Resumed
from memscale._planning.reserved.allocations import Reserved, reserved_of
from memscale._planning.reserved.found_memory import (
    FoundMemory,
    came_first,
    find_memory,
    find_placed,
    oldest_first,
    segments_in,
    workspaces_in,
)
from memscale._profile.inputs import Inputs
from memscale._units import MIB

WEIGHT, GRADIENT, WORK = range(3)
WORKSPACE_BYTES = 11 * MIB


def by_hand() -> AllocationLog:
    """A weight of 12 MiB; each step of two batches leaves a gradient of 12 MiB between them, and needs 30 MiB twice."""
    log = AllocationLog()
    log.allocate(WEIGHT, 12 * MIB)
    log.origins = {0: ("parameter", 0)}
    log.begin_step()
    log.multiply("forward")
    log.multiply("backward")
    log.allocate(WORK, 30 * MIB)
    log.allocate(GRADIENT, 12 * MIB)
    log.free(WORK)
    log.resume([(("gradient", 0), GRADIENT, 12 * MIB)])
    log.allocate(WORK, 30 * MIB)
    log.free(WORK)
    log.free(GRADIENT)
    return log


def after_another_plan(*, has_gradient: bool = True, others_bytes: int = 0) -> FoundMemory:
    """The weight has a segment of its own; the gradient lies in one of 40 MiB that a larger tensor had made, with the
    workspaces."""
    memory = CachingAllocator()
    weight = memory.allocate(12 * MIB)
    memory.free(memory.allocate(40 * MIB))
    gradient = memory.allocate(12 * MIB)
    for _ in range(2):
        memory.allocate(WORKSPACE_BYTES)
    if others_bytes:
        memory.allocate(others_bytes)
    addresses = {("parameter", 0): weight.address}
    if has_gradient:
        addresses["gradient", 0] = gradient.address
    return FoundMemory(memory.segments(), addresses)


def played(found: FoundMemory | None, use: AllocatorUse | None = None) -> Reserved:
    return reserved_of(by_hand(), AllocatorSettings(), workspace_bytes=WORKSPACE_BYTES, start=found, use=use)


HELD_BESIDE_BYTES = (12 + 40 + 30) * MIB
"""The 40 MiB stay for the gradient and the workspaces, and have no room for 30 more."""


def test_what_an_earlier_plan_has_placed_is_held_beside() -> None:
    alone, beside = played(None), played(after_another_plan())
    assert alone.requested_peak_bytes == beside.requested_peak_bytes == (12 + 30 + 12) * MIB + 2 * WORKSPACE_BYTES
    assert alone.reserved_peak_bytes == (12 + 30 + 12) * MIB + 2 * 12 * MIB
    assert beside.reserved_peak_bytes == HELD_BESIDE_BYTES


def test_segments_that_grow_are_held_beside_as_well() -> None:
    use = AllocatorUse(SMALL_PAGES)
    alone, beside = played(None, use), played(after_another_plan(), use)
    assert beside.reserved_peak_bytes == (12 + 40 + 36) * MIB > alone.reserved_peak_bytes


def test_what_nobody_knows_goes_with_the_earlier_plan() -> None:
    assert played(after_another_plan(others_bytes=50 * MIB)) == played(after_another_plan())


def test_small_blocks_that_nobody_knows_go_as_well() -> None:
    """Such as the loss of the batch before, which goes when that of the next one is there."""
    found = after_another_plan(others_bytes=512)
    assert found != after_another_plan()
    assert played(found) == played(after_another_plan())


def test_a_gradient_that_was_elsewhere_is_placed_anew() -> None:
    found = played(after_another_plan(has_gradient=False))
    assert found.requested_peak_bytes == played(None).requested_peak_bytes


def test_a_recorded_step_says_where_its_next_batch_begins() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))).train()
    config = Config(enable_logging=False, async_offload=False)
    job = Job(model, config, Hardware.from_name("RTX 3090"), "sgd", holds_gradients=True)
    log = Planner(job, Inputs((torch.zeros(8, 64),), {})).steps((), config)
    assert sorted(log.origins.values()) == [("input", 0), *(("parameter", position) for position in range(6))]
    for events in log.steps:
        (resumed,) = (event for event in events if isinstance(event, Resumed))
        shapes = [(origin, num_bytes) for origin, _, num_bytes in resumed.gradients]
        assert shapes == [(("gradient", n), p.nbytes) for n, p in enumerate(model.parameters())]


def test_without_gradients_no_step_has_begun() -> None:
    model = nn.Linear(4, 4)
    assert find_memory(model, Inputs((torch.zeros(2, 4),), {}), "cpu") is None
    model(torch.zeros(2, 4)).sum().backward()
    assert find_memory(model, Inputs((torch.zeros(2, 4),), {}), "cpu") is None, "the host does not tell"


def segment(**changes: Any) -> dict[str, Any]:
    """As in what `torch.cuda.memory_snapshot()` returns."""
    sizes = (512, "active_allocated", 12), (512, "active_awaiting_free", 500), (2 * MIB - 1024, "inactive", 0)
    blocks = [{"size": size, "state": state, "requested_size": requested} for size, state, requested in sizes]
    place = {"device": 0, "address": 4096, "total_size": 2 * MIB, "stream": 7, "segment_pool_id": (0, 0)}
    return place | {"segment_type": "small", "is_expandable": False, "blocks": blocks} | changes


def test_segments_as_pytorch_tells_them() -> None:
    memory = CachingAllocator()
    told = [segment(), segment(device=1), segment(segment_pool_id=(0, 1)), segment(address=8 * MIB, is_expandable=True)]
    found = list(segments_in(told, 0))
    assert [(one.address, one.is_expandable) for one in found] == [(4096, False), (8 * MIB, True)]
    assert set(memory.adopt(found)) == {4096, 4096 + 512, 8 * MIB, 8 * MIB + 512}
    assert (memory.allocated_bytes, memory.requested_bytes, memory.reserved_bytes) == (1024, 24, 4 * MIB)
    assert [one.stream for one in memory.segments()] == [7, 7]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_later_steps_are_played_whole(num_steps: int) -> None:
    found = reserved_of(by_hand(), num_steps=num_steps, workspace_bytes=WORKSPACE_BYTES, start=after_another_plan())
    assert found.reserved_peak_bytes == HELD_BESIDE_BYTES, "the room of the gradient is found again"


# ---- workspaces of what ran before the plan


def after_a_plain_step() -> CachingAllocator:
    """Two workspaces lie in a segment of 60 MiB that a larger tensor had made."""
    memory = CachingAllocator()
    memory.free(memory.allocate(60 * MIB))
    memory.allocate(WORKSPACE_BYTES)
    between = memory.allocate(7 * MIB)
    memory.allocate(WORKSPACE_BYTES)
    memory.free(between)
    return memory


def test_segments_that_workspaces_keep_are_held_beside() -> None:
    """Of what the workspaces keep, the step uses the 31 MiB behind them."""
    alone, found = played(None), workspaces_in(after_a_plain_step().segments(), [], WORKSPACE_BYTES)
    assert found is not None
    assert found.form() == [(60 * MIB, [11 * MIB, 7 * MIB, 11 * MIB, 31 * MIB])]
    beside = reserved_of(by_hand(), AllocatorSettings(), workspace_bytes=WORKSPACE_BYTES, start=found)
    assert alone.reserved_peak_bytes == (12 + 12 + 12 + 30 + 12) * MIB
    assert beside.reserved_peak_bytes == (12 + 60 + 12) * MIB
    assert beside.allocated_peak_bytes == (12 + 11 + 11 + 31 + 12) * MIB, "there are no other workspaces"


def test_workspaces_beside_weights_in_segments_that_grow_or_of_other_streams_are_not_apart() -> None:
    (segment,) = after_a_plain_step().segments()
    assert workspaces_in([segment], [segment.address + 60 * MIB], WORKSPACE_BYTES) is not None
    assert workspaces_in([segment], [segment.address + 11 * MIB], WORKSPACE_BYTES) is None
    assert workspaces_in([dataclasses.replace(segment, is_expandable=True)], [], WORKSPACE_BYTES) is None
    assert workspaces_in([dataclasses.replace(segment, stream=7)], [], WORKSPACE_BYTES) is None
    assert workspaces_in([segment], [], 2 * WORKSPACE_BYTES) is None, "nothing has their size"


# ---- what lies where, on a card that tells


class Teller:
    """A card with two segments, the one at the higher address made first, and a batch in front of the model."""

    def __init__(self, model: nn.Module, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
        weights, (batch,) = list(model.parameters()), inputs.tensors()
        at = {batch: 0x900000, weights[0]: 0x900200, weights[1]: 0x900400, weights[2]: 0x200000, weights[3]: 0x200200}
        self.at = {id(tensor): address for tensor, address in at.items()}
        self.is_expandable = {0x900000: False, 0x200000: True}
        monkeypatch.setattr(torch, "get_device_module", lambda device_type: self)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(found_memory, "_addresses", self._addresses)

    def _addresses(self, kind: str, tensors: Any, device_type: str) -> Any:
        return [((kind, position), self.at[id(tensor)]) for position, tensor in enumerate(tensors)]

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [segment(address=place, is_expandable=kind) for place, kind in self.is_expandable.items()]


@pytest.fixture
def teller(monkeypatch: pytest.MonkeyPatch) -> tuple[Teller, nn.Module, Inputs]:
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Inputs((torch.zeros(2, 4),), {})
    return Teller(model, inputs, monkeypatch), model, inputs


def test_which_weights_were_placed_before(teller: tuple[Teller, nn.Module, Inputs]) -> None:
    card, model, inputs = teller
    found = find_placed(AllocatorSettings(), model, inputs, "card")
    assert found is not None
    assert found.since == {("parameter", 2), ("parameter", 3)}
    card.is_expandable = dict.fromkeys(card.is_expandable, False)
    found = find_placed(AllocatorSettings(), model, inputs, "card")
    assert found is not None
    assert not found.since


def test_a_batch_in_front_of_the_model_was_there_first(teller: tuple[Teller, nn.Module, Inputs]) -> None:
    card, model, inputs = teller
    assert came_first(model, inputs, "card")
    batch = next(iter(inputs.tensors()))
    card.at[id(batch)] = 0x900600
    assert not came_first(model, inputs, "card"), "behind the weights of its segment"
    card.is_expandable[0xB00000] = False
    card.at[id(batch)] = 0xB00000
    assert not came_first(model, inputs, "card"), "in a segment without weights"


def test_nothing_is_known_where_the_allocator_does_not_tell() -> None:
    model, inputs = nn.Linear(4, 4), Inputs((torch.zeros(2, 4),), {})
    assert find_placed(AllocatorSettings(), model, inputs, "cpu") is None
    assert not came_first(model, inputs, "cpu")


@pytest.mark.parametrize("direction", [1, -1])
def test_segments_are_adopted_by_age(direction: int) -> None:
    """Weights came in their order, gradients from the last to the first; what lies between them goes with them."""
    places = {("parameter", 0): 1, ("parameter", 1): 2, ("gradient", 1): 4, ("gradient", 0): 5}
    starts = sorted(direction * number * 2 * MIB for number in range(1, 6))
    addresses = {origin: direction * number * 2 * MIB + 512 for origin, number in places.items()}
    segments = list(segments_in([segment(address=start) for start in starts], 0))
    found = [one.address // (direction * 2 * MIB) for one in oldest_first(segments, addresses)]
    assert found == [1, 2, 3, 4, 5]
