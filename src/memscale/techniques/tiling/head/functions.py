"""What a function of PyTorch does with lazy logits: runs tiled, stays lazy, or sees plain values.

Functions are told apart here, above autograd, so that values that must be built are built by ordinary operators: they
are counted by meters and saved by autograd like any other tensor.

NOTE [memory handed out]: whoever holds the logits' own memory can write to it, and the loss must see that. A function
that returns a view of the values that it was given is run once more on the lazy tensor, which keeps book of its views;
one that hands memory to others (`numpy`, `dlpack`) ends the tiling of these logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale._torch import private
from memscale._torch.interception import CallsUnderWay
from memscale.techniques.tiling.common import TilingError, names
from memscale.techniques.tiling.head import loss
from memscale.techniques.tiling.head.lazy import LazyLogits, plain

_TILED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: loss.cross_entropy,
    F.nll_loss: loss.nll_loss,
    torch.gather: loss.gather,
    torch.Tensor.gather: loss.gather,
}

_HOOKS = frozenset({"register_hook", "retain_grad", "requires_grad_", "detach_"})

_HANDS_OUT = names("numpy __array__ __dlpack__ data_ptr storage")

_SNAPSHOTS = names("clone cpu")

_METADATA = names(
    "size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point is_complex "
    "is_signed is_inference is_pinned is_shared is_conj is_neg is_same_size get_device untyped_storage __len__ "
    "__hash__ __dir__ _is_view has_names _is_zerotensor _has_symbolic_sizes_strides"
)

_LAZY = names(
    "view view_as reshape reshape_as _unsafe_view flatten unflatten squeeze unsqueeze transpose permute movedim "
    "moveaxis swapaxes swapdims t adjoint narrow select split split_with_sizes chunk tensor_split unbind expand "
    "expand_as __getitem__ __iter__ index_select contiguous float half bfloat16 double to type type_as clone detach "
    "alias cpu log_softmax tanh neg __neg__ negative"
)

_WITH_SCALAR = names("mul multiply __mul__ __rmul__ div divide true_divide __truediv__")

_SUMS = names("add __add__ __radd__")


DDP_LOOKS = CallsUnderWay()
"""DDP looks in this thread at the outputs of a forward."""


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`LazyLogits.__torch_function__`."""
    tiled = _TILED.get(func)
    if tiled is not None and isinstance(_first(args, kwargs), LazyLogits):
        return tiled(*args, **kwargs)
    _note_hooks(func, args, kwargs)
    if _is_for_lazy(func, args, kwargs):
        return _run_lazily(func, args, kwargs)
    return _run_on_values(func, args, kwargs)


def _run_lazily(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with private.without_torch_function():
        result = func(*args, **kwargs)
    if getattr(func, "__name__", "") in _SNAPSHOTS and isinstance(result, LazyLogits) and not args[0].requires_grad:
        result.value()  # someone keeps a copy, which must outlive the optimizer's step
    return result


def _run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See NOTE [memory handed out]."""
    build = _hand_out if getattr(func, "__name__", "") in _HANDS_OUT else plain
    values = tree_map_only(LazyLogits, build, (args, kwargs))
    leaves = zip(tree_leaves((args, kwargs)), tree_leaves(values), strict=True)
    built = [value for leaf, value in leaves if isinstance(leaf, LazyLogits)]
    with private.without_torch_function():
        result = func(*values[0], **values[1])
    if build is plain and _storages(result) & _storages(built):
        return _run_lazily(func, args, kwargs)
    return result


def _storages(tensors: Any) -> set[int]:
    return {
        private.storage_key(leaf.untyped_storage())
        for leaf in tree_leaves(tensors)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, LazyLogits) and leaf.layout is torch.strided
    }


def _hand_out(lazy: LazyLogits) -> torch.Tensor:
    lazy.block.family.touch()
    lazy.value(alias=True)
    built: torch.Tensor = plain(lazy)
    return built


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input")


def _note_hooks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whoever asks for the gradient of logits, or for their node, must get it. See NOTE [two paths]."""
    if getattr(func, "__name__", "") in _HOOKS or _asks_for_node(func):
        args[0].block.family.touch()
    elif func is torch.autograd.grad:
        for leaf in tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"]):
            if isinstance(leaf, LazyLogits):
                leaf.block.family.touch()


def _asks_for_node(func: Any) -> bool:
    """Whether someone takes the node, who may hook it; DDP only looks whether there is one."""
    if getattr(func, "__self__", None) is not torch.Tensor.grad_fn:
        return False
    return not DDP_LOOKS


def _is_for_lazy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function takes the lazy tensor as it is: it asks no values, or they can wait, or it writes."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return _is_set_on_lazy(func, args)
    if name in ("__get__", "__delete__", "backward") or name in _METADATA or name in _HOOKS:
        return True
    if func is torch.autograd.grad or _writes(name, kwargs):
        return True
    if name in _LAZY:
        return True
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in _WITH_SCALAR:
        return len(tensors) == 1
    return name in _SUMS and not kwargs and all(isinstance(tensor, LazyLogits) for tensor in tensors[:2])


def _is_set_on_lazy(func: Any, args: tuple[Any, ...]) -> bool:
    if not isinstance(args[0], LazyLogits):
        return False  # another tensor is given these logits
    if func.__self__ is torch.Tensor.data:
        raise TilingError(
            "the data of tiled logits cannot be replaced, only written to: use logits.data.copy_(values), "
            "or set enable_tiling=False"
        )
    return True


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name in ("__setitem__",) or (name.startswith("__i") and name not in ("__invert__", "__iter__"))
    is_operator = is_operator and name not in ("__index__", "__int__")
    into_lazy = any(isinstance(leaf, LazyLogits) for leaf in tree_leaves(kwargs.get("out")))
    return is_in_place or is_operator or into_lazy or bool(kwargs.get("inplace"))
