"""A `torch.fx` graph of a whole training step, on request. Plans do not need it; people who look into a model do."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, loss_of


def trace_step(model: nn.Module, sample_input: Any, device_type: str = "cpu") -> fx.GraphModule:
    """Forward, loss and backward as one graph of ATen operators; its outputs are the loss and the gradients.

    The step runs on fake tensors through `make_fx`, so the model's own tensors are neither read nor copied.
    """
    rehearsal = FakeRehearsal(model, Inputs.from_sample(sample_input), device_type)
    parameters = {name: p for name, p in rehearsal.model.named_parameters() if p.requires_grad}

    def step(parameters: dict[str, torch.Tensor], inputs: tuple[Any, Any]) -> tuple[torch.Tensor, ...]:
        output = torch.func.functional_call(rehearsal.model, parameters, inputs[0], inputs[1])
        loss = loss_of(output)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return (loss, *(gradient for gradient in gradients if gradient is not None))

    with rehearsal.stage():
        return make_fx(step)(parameters, (rehearsal.inputs.args, rehearsal.inputs.kwargs))
