"""Says when a PyTorch release changes what `_torch/private/checkpoints.py` relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoint_internals
from torch.utils.checkpoint import checkpoint

from memscale._torch import private


def test_checkpoints_can_be_seen_through():
    inside, refused = private.SeenThrough(), []
    restore = private.see_through_checkpoints(inside, refused.append)
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(bool(inside))
        return x.sin()

    try:
        for inside.names in ([], ["a layer"]):
            x = torch.ones(2, requires_grad=True)
            checkpoint(function, x, use_reentrant=False).sum().backward()
            assert torch.equal(x.grad, torch.ones(2).cos())
        assert calls == [False, False, True]  # outside it is computed again
        checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=True)
        assert refused == ["use_reentrant=True"]
        with torch.no_grad():
            assert not inside
    finally:
        restore()
    assert "apply" not in vars(checkpoint_internals.CheckpointFunction)


def test_what_is_computed_outside_is_not_seen_by_checkpoints_around_it() -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 1:  # not when it is computed again: the checkpoint would miss what it has seen
            with private.outside_checkpoints():
                x.detach().requires_grad_().sin().cos().sum().backward()
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2
    assert torch.equal(x.grad, torch.ones(2).cos())


def test_hooks_of_others_on_saved_tensors_stay() -> None:
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), private.outside_checkpoints():
        torch.ones(2, requires_grad=True).sin()
    assert len(seen) == 1


def test_hooks_on_what_is_saved_are_seen() -> None:
    assert not private.saves_are_hooked()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.saves_are_hooked()
    assert not private.saves_are_hooked()


def test_the_hooks_on_what_is_saved_are_known() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert private.saved_tensors_hooks_in_use() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert private.saved_tensors_hooks_in_use() == (pack, pack)


def test_a_selective_checkpoint_numbers_only_what_it_may_keep() -> None:
    runs: list[int] = []
    multiplied = torch.ops.aten.mm.default

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> checkpoint_internals.CheckpointPolicy:
        kept = checkpoint_internals.CheckpointPolicy
        return kept.MUST_SAVE if func is multiplied else kept.PREFER_RECOMPUTE

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(runs))
        if runs[-1] == 1:
            x.detach().sin()  # one operator more than the forward had, which may not be kept
        return (x @ x).cos()

    x = torch.rand(3, 3, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    (plain @ plain).cos().sum().backward()
    checkpoint(
        function,
        x,
        use_reentrant=False,
        context_fn=lambda: private.selective_contexts(policy, lambda func: func is multiplied),
    ).sum().backward()
    assert runs == [0, 1]
    assert torch.equal(x.grad, plain.grad)


def test_what_the_user_puts_around_all_operators_is_named() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert private.strange_contexts() is None
    with torch.device("cpu"):
        assert private.strange_contexts() is None
    with Mode():
        assert "Mode" in str(private.strange_contexts())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert "saved for backward" in str(private.strange_contexts())
