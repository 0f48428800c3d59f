"""What PyTorch tests its own modules and optimizers with, as models: it ships in the wheel.

`module_db` has every `torch.nn` module with inputs of many kinds; two of each are the blocks of a model here.
`optim_db` has every optimizer with its options; each trains a small model.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.twins import Subject

MODULES, OPTIMIZERS = "torch.nn", "torch.optim"
MOST_CASES = 3
"""Inputs of one module that are tried: some have hundreds, one for every combination of their options."""


def names(suite: str) -> list[str]:
    """Cases of a suite: a name and the number of its inputs or options."""
    return list(_modules()) if suite == MODULES else list(_optimizers())


def build(suite: str, name: str) -> Subject:
    return _module_subject(name) if suite == MODULES else _optimizer_subject(name)


@functools.cache
def _modules() -> dict[str, Any]:
    """Inputs of each module, for training; those of other dtypes and devices are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    found = {}
    for info in module_db:
        if torch.float32 not in info.dtypes:
            continue
        torch.manual_seed(0)
        cases = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        usable = [(number, case) for number, case in enumerate(cases) if case.forward_input is not None]
        apart = -(-len(usable) // MOST_CASES) or 1
        for number, case in usable[::apart]:
            found[f"{info.module_cls.__name__}#{number}"] = (info.module_cls, case)
    return found


class Block(nn.Module):
    """A module that is no leaf: leaves are not taken for blocks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Pair(nn.Module):
    """Two of a module, side by side. Both see inputs that are trained, so that each has a backward."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(first), Block(second)])
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return [block(*self._scaled(args), **self._scaled(kwargs)) for block in self.blocks]

    def _scaled(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor) and tree.is_floating_point():
            return tree * self.scale
        if isinstance(tree, dict):
            return {key: self._scaled(value) for key, value in tree.items()}
        return type(tree)(self._scaled(value) for value in tree) if type(tree) in (list, tuple) else tree


def _module_subject(name: str) -> Subject:
    module_class, case = _modules()[name]
    made, given = case.constructor_input, case.forward_input
    first = module_class(*made.args, **copy.deepcopy(made.kwargs))
    inputs = {"args": given.args, "kwargs": given.kwargs}
    model = Pair(first, copy.deepcopy(first)).float()
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        model(*given.args, **given.kwargs)  # a lazy one has parameters after its first batch
    return Subject(model, inputs, lambda model, kept: model(*kept["args"], **kept["kwargs"]))


class Tower(nn.Module):
    """Blocks of matrices and vectors, an embedding and a head."""

    def __init__(self, *, only_matrices: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16, sparse=sparse)
        bias = not only_matrices
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 32, bias=bias),
                nn.GELU(),
                nn.LayerNorm(32, elementwise_affine=bias),
                nn.Linear(32, 16, bias=bias),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(16, 20, bias=bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


@functools.cache
def _optimizers() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_optimizers import optim_db
    found = {}
    for info in optim_db:
        for number, case in enumerate(info.optim_inputs_func("cpu", dtype=torch.float32)):
            kind: Any = info.optim_cls
            found[f"{kind.__name__}#{number}"] = (kind, case.kwargs)
    return found


def _optimizer_subject(name: str) -> Subject:
    kind, options = _optimizers()[name]
    sparse = kind is torch.optim.SparseAdam
    model = Tower(only_matrices=kind is torch.optim.Muon, sparse=sparse)
    if sparse:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is model.table.weight)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return kind(trained, **copy.deepcopy(options))

    ids = torch.arange(12).reshape(2, 6)
    return Subject(model, {"ids": ids}, lambda model, kept: model(**kept), make, closure=kind is torch.optim.LBFGS)
