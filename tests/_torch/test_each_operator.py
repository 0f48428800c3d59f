"""Every operator goes through the function, and what that returns is used."""

from __future__ import annotations

import pytest
import torch

from memscale._torch.each_operator import EachOperator

pytestmark = pytest.mark.unit


def test_a_function_stands_in_the_place_of_each_operator() -> None:
    seen = []

    def handle(op, args, kwargs):
        seen.append(op)
        return torch.full((2,), 7.0) if op is torch.ops.aten.mul.Tensor else op(*args, **kwargs)

    x = torch.ones(2)
    with EachOperator(handle):
        assert torch.equal(x + 1, torch.full((2,), 2.0))
        assert torch.equal(x * 3, torch.full((2,), 7.0))
    assert torch.equal(x * 3, torch.full((2,), 3.0))
    assert torch.ops.aten.add.Tensor in seen
