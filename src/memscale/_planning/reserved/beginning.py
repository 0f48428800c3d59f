"""How memory comes to be as the first step finds it: it decides which holes are left between what stays."""

from __future__ import annotations

import dataclasses

from torch import nn

from memscale._decide.allocator import SMALL_BYTES
from memscale._hardware import Hardware
from memscale._planning.reserved.allocation_log import Arrival
from memscale._planning.reserved.found_memory import came_first
from memscale._profile.inputs import Inputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The order in which model and batch come to the device."""

    inputs_first: bool = False
    """The batch is on the device before the model."""
    from_host: bool = False
    """The model is on the host when a plan is attached: parameters that are streamed never come to the device whole."""
    arrivals: tuple[Arrival, ...] = ("before",)
    """When the batch comes, as far as that is known. See NOTE [arriving batches]."""


MODEL_FIRST = Beginning()


def beginning_of(model: nn.Module, inputs: Inputs, hardware: Hardware) -> Beginning:
    """The order as it is seen; to a card that is elsewhere, the model comes first."""
    device_type, arrivals = hardware.device_type, _arrivals(inputs, hardware)
    from_host = all(tensor.device.type != device_type for tensor in model.parameters())
    if hardware.present and hardware.has_caching_allocator and not from_host:
        return Beginning(inputs_first=came_first(model, inputs, device_type), arrivals=arrivals)
    inputs_first = from_host and _are_on(inputs, device_type)
    return Beginning(inputs_first=inputs_first, from_host=hardware.present and from_host, arrivals=arrivals)


def _arrivals(inputs: Inputs, hardware: Hardware) -> tuple[Arrival, ...]:
    """When batches may come. Nothing depends on it where they are small: those lie among other small tensors."""
    if all(tensor.numel() * tensor.element_size() <= SMALL_BYTES for tensor in inputs.tensors()):
        return ("before",)
    is_before = not hardware.present or _are_on(inputs, hardware.device_type)
    return ("before" if is_before else "once", "each step")


def _are_on(inputs: Inputs, device_type: str) -> bool:
    return any(tensor.device.type == device_type for tensor in inputs.tensors())
