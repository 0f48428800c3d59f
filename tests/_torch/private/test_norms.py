"""Says when a PyTorch release changes what `_torch/private/norms.py` relies on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale._torch import private
from memscale._torch.interception import intercept

pytestmark = pytest.mark.unit


def test_programs_and_clipping_find_the_norm_in_these_places() -> None:
    seen: list[int] = []

    def note(pass_on, tensors, *args):
        seen.append(len(tensors))
        return pass_on(tensors, *args)

    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    undo = [intercept(owner, name, note) for owner, name in private.norm_functions()]
    try:
        nn.utils.clip_grad_norm_([parameter], 1.0)
        nn.utils.get_total_norm([parameter.grad, parameter.grad])
    finally:
        for each in undo:
            each()
    assert seen == [1, 2]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_groups_and_kernels_are_those_of_pytorch(foreach: bool | None) -> None:
    tensors = [torch.randn(31, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16)]
    groups = private.norm_groups(tensors, foreach)
    assert sorted(position for positions, _ in groups for position in positions) == [0, 1, 2, 3]
    assert all(together is (foreach is not False) for _, together in groups)
    norms = [
        norm
        for positions, together in groups
        for norm in private.norms_of([tensors[position] for position in positions], 2.0, together=together)
    ]
    total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    assert torch.equal(total, nn.utils.get_total_norm(tensors, foreach=foreach))
