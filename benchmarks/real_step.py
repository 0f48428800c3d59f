"""A training step of a real model, recorded as a rehearsal records it: what rehearsals are held against.

Only for models that belong to the caller: the step is run on the model itself, and not everything that a forward may
change is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import Rehearsal, host_rng_kept
from memscale._profile.segments import SegmentRecorder
from memscale._torch.live_bytes import rounding_of


class RealRehearsal(Rehearsal):
    """On the model itself, with real data, where fake tensors do not suffice."""

    source = "empirical"
    is_fake = False

    def __init__(self, model: nn.Module, inputs: Inputs, device: torch.device, warmup_steps: int) -> None:
        inputs = inputs.map_tensors(lambda tensor: _real_like(tensor, device))
        super().__init__(model, inputs, device.type, rounding_of(device.type))
        self.warmup_steps = warmup_steps

    def pass_through(self, recorder: SegmentRecorder) -> list[torch.Tensor]:
        for _ in range(self.warmup_steps):
            super().pass_through(recorder)
            for parameter in self.model.parameters():
                parameter.grad = None
        recorder.open()
        return super().pass_through(recorder)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        with host_rng_kept(), _device_rng_kept(self.device_type), _module_state_kept(self.model):
            if not self.model.training:
                self.model.train()
            with super().stage():
                yield


def _real_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "meta":
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


@contextlib.contextmanager
def _device_rng_kept(device_type: str) -> Iterator[None]:
    if device_type == "cpu":
        yield
        return
    module = torch.get_device_module(device_type)
    state = module.get_rng_state()
    try:
        yield
    finally:
        module.set_rng_state(state)


@contextlib.contextmanager
def _module_state_kept(model: nn.Module) -> Iterator[None]:
    """Buffers are stand-ins during the step; gradients, flags and attributes are put back after it."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    stand_ins: dict[int, torch.Tensor] = {}
    for module, before in attributes:
        buffers = {n: b if b is None else stand_ins.setdefault(id(b), b.clone()) for n, b in module._buffers.items()}
        object.__setattr__(module, "_buffers", type(before["_buffers"])(buffers))
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
