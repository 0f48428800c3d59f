"""Is a module position-wise? Its operators on fake tensors say so, or that nobody can be sure.

It runs as long as the sequence is and as short as its tiles may be: the operators and their numbers must be the same (a
forward that divides by the length, or branches on it, gives itself away). It may leave no trace: no write to its input
or buffers, no attribute that is new, for a stretch would leave its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale._errors import quoted
from memscale._torch import private
from memscale.techniques.tiling.common import dropout_call, dropped

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: 1, aten.addmm.default: 2, aten.bmm.default: 1, aten.linear.default: 1}
"""The place of the weight among the arguments."""
_LAST_DIM = {
    aten.mean.dim: 1,
    aten.sum.dim_IntList: 1,
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten.split.Tensor: 2,
    aten.slice.Tensor: 1,
    aten.cat.default: 1,
}
"""Operators along a dimension, and where it stands; along the last one they mix no positions."""
_SAME_SHAPE = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SHORTEST = 16
"""A stretch is at least one part in so many of the sequence."""


class _Unsure(Exception):
    """The module may mix positions; the message says why."""


def why_not_position_wise(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, mode: Any, *, wider: int
) -> str | None:
    """None if the module maps each position by itself, and is `wider` times wider inside; else what speaks against."""
    if any(_has_hooks(part) for part in module.modules() if part is not module):
        return "modules inside it have hooks, which would fire once a stretch"
    before = _attributes(module)
    try:
        whole, *stretches = [
            _watched(module, (*shape[:-2], length, shape[-1]), dtype, device, mode) for length in _lengths(shape[-2])
        ]
    except _Unsure as unsure:
        return str(unsure)
    except Exception as error:  # whatever a stranger's forward may raise
        return f"it does not run by itself ({quoted(error)})"
    if not _are_same(before, _attributes(module)):
        return "its forward changes its attributes"
    if any(stretch.done != whole.done for stretch in stretches):
        return "what it computes depends on the length of the sequence"
    if whole.num_products < 2:
        return "it has fewer than two products"
    if whole.widest < wider * shape[-1]:
        return f"it is only {whole.widest} wide inside, for {shape[-1]} outside"
    return None


def _lengths(length: int) -> list[int]:
    return sorted({length, -(-length // 2), -(-length // SHORTEST)}, reverse=True)


def _watched(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, mode: Any) -> _Watch:
    with mode, torch.no_grad():
        hidden = torch.empty(shape, dtype=dtype, device=device)
        watch = _Watch(hidden)
        with watch, _Dropouts(shape[-1]):
            module(hidden)
    return watch


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module).get(name) for name in _HOOKS)


def _attributes(module: nn.Module) -> list[Any]:
    """What every module inside holds, by identity; containers of it by their contents."""
    return [_held(vars(part)) for part in module.modules()]


def _held(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _held(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_held(each) for each in value]
    return value


def _are_same(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_are_same(before[key], after[key]) for key in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_are_same, before, after))
    is_number = isinstance(before, int | float | str) and type(before) is type(after)
    return before is after or (is_number and bool(before == after))


class _Dropouts(TorchFunctionMode):
    """Dropout that a tiled MLP can repeat passes for the identity; see `tiling/mlp/__init__.py`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dropout = dropout_call(func, args, kwargs or {})
        if dropout is None:
            return func(*args, **(kwargs or {}))
        if dropout[0].shape[-1] > self.width:
            raise _Unsure("dropout acts on its wide inside: the noise would be as large as what tiling saves")
        return dropped(func, dropout[0])


class _Watch(TorchDispatchMode):
    """Follows what depends on the input; raises at the first operator that may mix positions."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widest = self.num_products = 0
        self.done: list[tuple[Any, ...]] = []
        """Every operator, and its arguments that are no tensors."""
        self._activations = {id(hidden): hidden}  # by identity, kept alive so that no id is used twice
        self._made: dict[int, torch.Tensor] = {}
        """What was made in here, by storage, and may therefore be written to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = [tensor for tensor in tensors if id(tensor) in self._activations]
        self._note(func, args, kwargs)
        if inputs:
            self._check(func, args, inputs, [t for t in tensors if id(t) not in self._activations])
        result = func(*args, **kwargs)
        theirs = {_storage_of(tensor) for tensor in tensors}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage_of(leaf) not in theirs:
                self._made[_storage_of(leaf)] = leaf
        if inputs:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._activations[id(leaf)] = leaf
                    self.widest = max(self.widest, leaf.shape[-1] if leaf.dim() else 0)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func.namespace == "prim":
            return
        leaves = tree_leaves((args, kwargs))
        if any(getattr(leaf, "constant", None) is not None for leaf in leaves):
            raise _Unsure(f"{func} takes a number that was made a tensor, and may depend on the length")
        numbers = [] if func in _VIEWS else [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.done.append((func, *numbers))
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
            for leaf in tree_leaves(written):
                if isinstance(leaf, torch.Tensor) and _storage_of(leaf) not in self._made:
                    raise _Unsure(f"{func} writes to its input or its own state")

    def _check(self, func: Any, args: Any, inputs: list[Any], others: list[Any]) -> None:
        if func.namespace == "prim":
            return  # asks for metadata
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Unsure(f"{func} draws random numbers")
        if func in _PRODUCTS:
            self.num_products += 1
            if id(args[_PRODUCTS[func]]) in self._activations:
                raise _Unsure(f"{func} multiplies activations with one another")
        elif func in _VIEWS:
            if not _keeps_last_dim(args):
                raise _Unsure(f"{func} changes the last dimension")
        elif func in _LAST_DIM:
            _check_dim(func, args[_LAST_DIM[func]] if len(args) > _LAST_DIM[func] else 0, inputs[0].dim())
        elif func is aten.native_layer_norm.default or func is aten._fused_rms_norm.default:
            if len(args[1]) != 1:
                raise _Unsure(f"{func} is over more than the last dimension")
        elif torch.Tag.pointwise in func.tags or func in _SAME_SHAPE:
            _check_broadcast(func, inputs, others)
        else:
            raise _Unsure(f"{func} may mix positions")


def _storage_of(tensor: torch.Tensor) -> int:
    return private.storage_key(tensor.untyped_storage())


def _keeps_last_dim(args: Any) -> bool:
    shape = args[1]
    return bool(shape) and shape[-1] in (args[0].shape[-1], -1) and _rows_of(shape, args[0])


def _rows_of(shape: Any, tensor: torch.Tensor) -> bool:
    """Whether this shape keeps the rows of the tensor; with -1 at the end, the other dimensions must account for all of
    them."""
    if shape[-1] != -1:
        return True
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return bool(rows * tensor.shape[-1] == tensor.numel())


def _check_dim(func: Any, dim: Any, num_dims: int) -> None:
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if [d % num_dims for d in dims] != [num_dims - 1]:
        raise _Unsure(f"{func} is along dimension {dim}, not the last")


def _check_broadcast(func: Any, inputs: list[Any], others: list[Any]) -> None:
    """Activations line up row by row; anything else is the same for all rows."""
    leading = {tuple(tensor.shape[:-1]) for tensor in inputs}
    if len(leading) > 1:
        raise _Unsure(f"{func} broadcasts activations of different rows")
    for other in others:
        if other.numel() not in (1, other.shape[-1] if other.dim() else 1):
            raise _Unsure(f"{func} takes a tensor of shape {tuple(other.shape)} that may depend on the position")
