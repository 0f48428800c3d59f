"""Says when a PyTorch release changes what `_torch/private/graphs.py` relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale._torch import private


def test_nodes_are_numbered_as_they_are_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = weight * 2
    first = private.next_sequence_number()
    after = before * 2
    assert private.sequence_number(before.grad_fn) < first <= private.sequence_number(after.grad_fn)


def test_backward_passes_can_be_watched():
    seen = []

    def run(backward: Callable[[], Any]) -> Any:
        seen.append(private.graph_task_id())
        return backward()

    engine = torch.autograd.Variable._execution_engine
    restore = private.replace_engine(run)
    try:
        x = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad((x * 2).sum(), x)
        (x * 3).sum().backward()
    finally:
        restore()
    assert seen == [-1, -1]
    assert torch.equal(gradient, torch.full((2,), 2.0))
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert torch.autograd.Variable._execution_engine is engine
