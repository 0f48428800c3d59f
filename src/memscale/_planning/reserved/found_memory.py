"""The accelerator's caching allocator as it is now, in the middle of a training step.

    found = find_memory(model, inputs, "cuda")      # None where no gradients lie on the card
    reserved_of(log, settings, start=found)         # the step goes on from there

    find_placed(before, model, inputs, "cuda")      # which weights lie in segments that do not grow
    find_workspaces(model, inputs, "cuda", 8_519_680)   # segments that workspaces keep, where no step is under way

A loop that adds up gradients shows it when its second batch begins. The gradients of the first lie in segments that the
plan before has made, in the sizes of that plan's tensors, and stay there until the optimizer has stepped; so do the
workspaces of matrix products, for good. What the next plan holds beside them depends on what is free around them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memscale._decide.allocator.blocks import BlockState, SegmentState
from memscale._decide.allocator.settings import AllocatorSettings
from memscale._planning.reserved.allocation_log import Origin
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.released_gradients import held_gradient

_STATES: dict[str, Any] = {"active_allocated": "allocated", "active_awaiting_free": "awaiting events"}
"""States by PyTorch's words; all others are free."""


_AGES = {"parameter": 0, "buffer": 0, "input": 1, "gradient": 2}
"""What comes first, by the kinds of origins."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundMemory:
    """What an allocator holds, and where in it the tensors of a training step lie."""

    segments: tuple[SegmentState, ...]
    """Oldest first."""
    addresses: Mapping[Origin, int]
    """Where parameters, buffers, inputs and gradients lie."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedBefore:
    """Tensors were placed while an allocator was set otherwise. See NOTE [two starts] in allocations.py."""

    settings: AllocatorSettings
    since: frozenset[Origin]
    """What came after them, into segments that grow. What is at home now has left its place among the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundWorkspaces:
    """Segments that do not grow, in which workspaces of matrix products lie and nothing of the step.

    NOTE [workspaces stay]: a workspace comes with the first product of its thread and never goes. Where the model was
    trained or evaluated before it is planned for, the workspace lies in a segment that this has made, which stays with
    it, however large it is.
    """

    segments: tuple[SegmentState, ...]
    """Those with nothing but workspaces in them."""

    def form(self) -> list[tuple[int, list[int]]]:
        """The size of each segment, and those of its blocks: all that counts of them."""
        return [(one.size_bytes, [block.size_bytes for block in one.blocks]) for one in self.segments]


def find_workspaces(model: nn.Module, inputs: Inputs, device_type: str, workspace_bytes: int) -> FoundWorkspaces | None:
    """What the device's allocator keeps for workspaces; None where that is nothing, or it does not tell."""
    here = torch.accelerator.current_accelerator(check_available=True)
    is_here = here is not None and here.type == device_type
    segments = _segments_on(device_type) if workspace_bytes and is_here else None
    known = [address for _, address in _all_addresses(model, inputs, device_type)]
    return workspaces_in(segments or [], known, workspace_bytes)


def workspaces_in(
    segments: Iterable[SegmentState], known: Iterable[int], workspace_bytes: int
) -> FoundWorkspaces | None:
    """Those of these segments that hold workspaces of the default stream, and no tensor at a known address."""
    addresses, found = sorted(known), []
    for segment in segments:
        is_apart = bisect.bisect_left(addresses, segment.address) == bisect.bisect_left(addresses, _end(segment))
        if is_apart and not segment.is_expandable and segment.stream == 0:
            blocks = tuple(_only_workspaces(segment.blocks, workspace_bytes))
            if any(block.state == "allocated" for block in blocks):
                found.append(dataclasses.replace(segment, blocks=blocks))
    return FoundWorkspaces(tuple(found)) if found else None


def _only_workspaces(blocks: Iterable[BlockState], workspace_bytes: int) -> Iterator[BlockState]:
    """The blocks of a segment when all that is no workspace has been freed."""
    free_bytes = 0
    for block in blocks:
        if block.state == "allocated" and block.requested_bytes == workspace_bytes:
            if free_bytes:
                yield BlockState(free_bytes, 0, "free")
            yield block
            free_bytes = 0
        else:
            free_bytes += block.size_bytes
    if free_bytes:
        yield BlockState(free_bytes, 0, "free")


def _end(segment: SegmentState) -> int:
    return segment.address + segment.size_bytes


def find_placed(before: AllocatorSettings, model: nn.Module, inputs: Inputs, device_type: str) -> PlacedBefore | None:
    """What was placed under the settings that were in force before a plan let segments grow; None where the allocator
    does not tell, or no weight lies on the device."""
    addresses = dict(_all_addresses(model, inputs, device_type))
    is_there = any(kind == "parameter" for kind, _ in addresses)
    segments = _segments_on(device_type) if is_there else None
    if segments is None:
        return None
    spans = [(one.address, _end(one)) for one in segments if one.is_expandable]
    there = (origin for origin, address in addresses.items() if any(start <= address < end for start, end in spans))
    return PlacedBefore(before, frozenset(there))


def find_memory(model: nn.Module, inputs: Inputs, device_type: str) -> FoundMemory | None:
    """What the device's allocator holds; None where it does not tell, or no gradients are there."""
    gradients = [held_gradient(parameter) if parameter.is_leaf else None for parameter in model.parameters()]
    addresses = dict(_addresses("gradient", gradients, device_type))
    segments = _segments_on(device_type) if addresses else None
    if segments is None:
        return None
    addresses.update(_all_addresses(model, inputs, device_type))
    return FoundMemory(tuple(oldest_first(segments, addresses)), addresses)


def oldest_first(segments: list[SegmentState], addresses: Mapping[Origin, int]) -> list[SegmentState]:
    """Segments that are given by address, in the order in which they were made, as far as that can be known.

    NOTE [ages that nobody tells]: of free blocks of one size PyTorch takes that in the oldest segment, and a snapshot
    does not say which is older. A driver hands out addresses in one direction for the most part; which one is seen by
    what came one after the other: weights, and gradients from the last to the first.
    """
    came = sorted(
        addresses, key=lambda origin: (_AGES[origin[0]], -origin[1] if origin[0] == "gradient" else origin[1])
    )
    starts = [segment.address for segment in segments]
    places = dict.fromkeys(bisect.bisect_right(starts, addresses[origin]) for origin in came)
    rises = sum(1 if later > earlier else -1 for earlier, later in itertools.combinations(places, 2))
    return segments if rises >= 0 else segments[::-1]


def came_first(model: nn.Module, inputs: Inputs, device_type: str) -> bool:
    """Whether the batch was on the device before the model: it lies before the weights in a segment that they share."""
    segments = _segments_on(device_type)
    if segments is None:
        return False
    starts = [segment.address for segment in segments]
    of_weights = [address for _, address in _addresses("parameter", model.parameters(), device_type)]
    for _, address in _addresses("input", inputs.tensors(), device_type):
        shared = bisect.bisect_right(starts, address)
        beside = [weight for weight in of_weights if bisect.bisect_right(starts, weight) == shared]
        if beside:
            return address < min(beside)
    return False


def _segments_on(device_type: str) -> list[SegmentState] | None:
    """The device's segments, by address; None where the allocator does not tell."""
    snapshot = getattr(torch.get_device_module(device_type), "memory_snapshot", None)
    if snapshot is None:
        return None
    found = segments_in(snapshot(), torch.accelerator.current_device_index())
    return sorted(found, key=lambda segment: segment.address)


def segments_in(snapshot: Iterable[Mapping[str, Any]], device_index: int) -> Iterable[SegmentState]:
    """The segments of one device, of what `torch.cuda.memory_snapshot()` returns; not those of graphs and pools."""
    for segment in snapshot:
        if segment["device"] == device_index and tuple(segment["segment_pool_id"]) == (0, 0):
            blocks = tuple(
                BlockState(block["size"], block["requested_size"], _STATES.get(block["state"], "free"))
                for block in segment["blocks"]
            )
            is_small = segment["segment_type"] == "small"
            place = segment["address"], segment["total_size"], segment["stream"]
            yield SegmentState(*place, is_small, blocks, segment["is_expandable"])


def _all_addresses(model: nn.Module, inputs: Inputs, device_type: str) -> Iterator[tuple[Origin, int]]:
    """Where parameters, buffers and inputs lie, which are there before a step."""
    yield from _addresses("parameter", model.parameters(), device_type)
    yield from _addresses("buffer", model.buffers(), device_type)
    yield from _addresses("input", inputs.tensors(), device_type)


def _addresses(kind: str, tensors: Iterable[torch.Tensor | None], device_type: str) -> Iterable[tuple[Origin, int]]:
    for position, tensor in zip(itertools.count(), tensors, strict=False):
        if tensor is None or tensor.device.type != device_type or tensor.layout is not torch.strided:
            continue
        if type(tensor) in (torch.Tensor, nn.Parameter) and not private.is_fake(tensor):
            yield (kind, position), tensor.untyped_storage().data_ptr()
