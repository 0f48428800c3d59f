"""Says when a PyTorch release changes what `_torch/private/dispatch.py` relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._torch import private


def test_flop_formulas() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    formula = private.flop_formula(torch.ops.aten.mm.default)
    assert formula is not None
    assert formula(a, b, out_val=a @ b) == 2 * 2 * 3 * 5
    assert private.flop_formula(torch.ops.aten.relu.default) is None


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_outermost_mode_lets_others_come_and_go() -> None:
    ours, first, second = _Counts(), _Counts(), _Counts()
    with first:
        assert private.can_take_outermost_mode()
        private.insert_outermost_mode(ours)
        torch.ones(1)
    assert (ours.count, first.count) == (1, 1)
    with second:
        torch.ones(1)
        assert private.remove_mode(ours)
        assert not private.remove_mode(ours)
        torch.ones(1)
    torch.ones(1)
    assert (ours.count, first.count, second.count) == (2, 1, 2)


def test_fake_tensor_modes_have_a_fixed_place() -> None:
    with private.fake_tensor_mode():
        assert not private.can_take_outermost_mode()
