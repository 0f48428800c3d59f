"""Says when a PyTorch release changes what `_torch/private/graphs.py` relies on."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from memscale._torch import private


def test_nodes_are_numbered_as_they_are_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = weight * 2
    first = private.next_sequence_number()
    after = before * 2
    assert private.sequence_number(before.grad_fn) < first <= private.sequence_number(after.grad_fn)


class Asked(torch.Tensor):
    """A tensor that is told of every function."""

    asked: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_node_is_found_without_asking_the_class_of_its_tensor() -> None:
    tensor = torch.ones(2, requires_grad=True).as_subclass(Asked)
    Asked.asked.clear()
    node = private.node_of(tensor)
    assert Asked.asked == []
    assert tensor.grad_fn is node
    assert Asked.asked != []
    assert private.node_of(torch.ones(2)) is None


def test_backward_passes_can_be_watched():
    seen = []

    class Watching(private.AutogradEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(private.graph_task_id())
            return super().run_backward(*args, **kwargs)

    engine = torch.autograd.Variable._execution_engine
    restore = private.replace_engine(Watching())
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


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_nodes_of_operators_are_told_from_custom_ones() -> None:
    x = torch.ones(2, requires_grad=True)
    assert private.is_own_node((x * 2).grad_fn)
    assert not private.is_own_node(_Custom.apply(x).grad_fn)


def test_what_is_left_on_a_node_stays_there() -> None:
    y = torch.ones(2, requires_grad=True) * 2
    assert private.mark_of(y.grad_fn, "ours") is None
    private.mark_node(y.grad_fn, "ours", 7)
    assert private.mark_of(y.grad_fn, "ours") == 7


def test_a_node_can_be_run_before_those_that_were_made_later() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    early, late = x * 2, x * 3
    early.register_hook(lambda gradient: order.append("early"))
    late.register_hook(lambda gradient: order.append("late"))
    loss = (early + late).sum()
    loss.backward(retain_graph=True)
    private.run_first(early.grad_fn)
    loss.backward()
    assert order == ["late", "early", "early", "late"]


def test_a_backward_pass_says_whether_its_graph_is_kept_and_when_it_ends() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def look(gradient: torch.Tensor) -> None:
        seen.append(private.keeps_graph())
        private.at_end_of_backward(lambda: seen.append("end"))

    y.register_hook(look)
    x.register_hook(lambda gradient: seen.append("last"))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [True, "last", "end", False, "last", "end"]


def test_hooks_of_nodes_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    for hook in ("register_hook", "register_prehook"):
        node = (x * 2).grad_fn
        assert not private.is_hooked(node)
        handle = getattr(node, hook)(lambda *_: None)
        assert private.is_hooked(node)
        handle.remove()
        assert not private.is_hooked(node)
