"""Which models are of plain code, and why others are not. Nothing runs here: it is read off their code."""

from __future__ import annotations

import types
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memscale._planning.recovery.plain_code import PlainModel
from memscale._planning.recovery.watched_run import NotComparable

KEPT: list[int] = []
append = KEPT.append


class Model(nn.Module):
    """What a function does in the middle of a forward."""

    def __init__(self, change: Callable[..., torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.first, self.change = nn.Linear(4, 4), change
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.first(x)).square().mean()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.blocks = (1, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    @property
    def total(self) -> int:
        return sum(size for size in self.sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for block in self.blocks:
            outputs.append(F.dropout(block(x), 0.1, self.training))
        if self.total > 2:
            x = torch.stack([output * 2 for output in outputs]).sum(0)
        return x.square().mean()


def test_models_of_plain_code_are_taken() -> None:
    for model in (
        Blocks(),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()),
        nn.TransformerEncoderLayer(8, 2, 16),
        Model(lambda self, x: x * self.settings.scale, settings=types.SimpleNamespace(scale=2.0)),
        Model(lambda self, x: F.gelu(x) * (0.5 if torch.version.xpu is None else 1)),
        Model(lambda self, x: x * x.new_empty(4).bernoulli_(0.5)),
    ):
        PlainModel(model)


def stores(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.count = 1
    return x


def stores_an_element(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x


def catches(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * 2
    except RuntimeError:
        return x


def has_a_list(self: nn.Module, x: torch.Tensor, kept: list[int] = []) -> torch.Tensor:  # noqa: B006
    return x * len(kept)


def uses_a_global(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * len(KEPT)


def counts_around() -> Any:
    count = 0

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x

    return change


class Answering:
    def __getattr__(self, name: str) -> int:
        return 1


class Called(nn.Module):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


REFUSED = {
    "attribute stored": (lambda: Model(stores), "store_attr"),
    "element stored": (lambda: Model(stores_an_element), "store_subscr"),
    "try": (lambda: Model(catches), "has a try or a with"),
    "default that may change": (lambda: Model(has_a_list), "which may change"),
    "global list": (lambda: Model(uses_a_global), "which may change"),
    "variable around": (lambda: Model(counts_around()), "store_deref"),
    "iterator": (lambda: Model(lambda self, x: x * next(self.it), it=iter((1, 2))), "uses next"),
    "list": (lambda: Model(lambda self, x: x * self.sizes[0], sizes=[1, 2]), "which may change"),
    "tensor beside": (lambda: Model(lambda self, x: x + KEPT_TENSOR), "not registered"),
    "in place and unseen": (lambda: Model(lambda self, x: x.resize_(1)), "'resize_'"),
    "told to need a gradient": (lambda: Model(lambda self, x: x.requires_grad_()), "'requires_grad_'"),
    "out": (lambda: Model(lambda self, x: torch.add(x, 1, out=x)), "'out'"),
    "names that are made up": (lambda: Model(lambda self, x: getattr(self, str(x.shape))(x)), "getattr"),
    "settings that answer": (lambda: Model(lambda self, x: x * self.s.a, s=Answering()), "__getattr__"),
    "module that is called otherwise": (lambda: Model(lambda self, x: self.part(x), part=Called()), "__call__"),
    "module in PyTorch's": (lambda: Model(lambda self, x: x * len(torch.os.environ)), "torch.os.environ"),
    "function of a module in PyTorch's": (
        lambda: Model(lambda self, x: x * torch.sys.getrecursionlimit()),
        "torch.sys.getrecursionlimit",
    ),
    "function of the interpreter": (lambda: Model(lambda self, x: x * perf_counter()), "uses perf_counter"),
    "method of a list": (lambda: Model(lambda self, x: append(x) or x), "uses append"),
    "PyTorch's module as a value": (lambda: Model(lambda self, x: (torch.nn, x)[1]), "no function of PyTorch"),
    "operator of others": (lambda: Model(lambda self, x: torch.ops.others.add(x)), "torch.ops.others.add"),
    "print": (lambda: Model(lambda self, x: print(x) or x), "uses print"),
}
KEPT_TENSOR = torch.ones(4)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_anything_else_is_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(NotComparable, match=r"only models of plain code are run again") as refusal:
        PlainModel(make())
    assert reason in str(refusal.value)


def test_hooks_of_others_and_forwards_of_one_layer_are_refused() -> None:
    hooked, replaced, parameter = Blocks(), Blocks(), Blocks()
    hooked.blocks[0].register_forward_hook(lambda *_: None)
    replaced.blocks[0].forward = lambda x: x
    torch.autograd.graph.register_multi_grad_hook((parameter.blocks[0].weight,), lambda gradients: None)
    for model, reason in ((hooked, "hook of others"), (replaced, "forward of its own"), (parameter, "hook of others")):
        with pytest.raises(NotComparable, match=reason):
            PlainModel(model)


def test_code_that_was_not_found_beforehand_is_refused() -> None:
    verified = PlainModel(Blocks())
    verified.refuse_others({Blocks.forward.__code__: globals()})
    with pytest.raises(NotComparable, match="stores ran, which was not found"):
        verified.refuse_others({stores.__code__: globals()})
