"""What a function of PyTorch does with lazy logits: runs tiled, stays lazy, or sees plain values.

Functions are told apart here, above autograd, so that values that must be built are built by ordinary operators: they
are counted by meters and saved by autograd like any other tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale import _torch_private
from memscale.techniques.tiling import loss
from memscale.techniques.tiling.common import names
from memscale.techniques.tiling.lazy import LazyLogits, plain

_TILED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: loss.cross_entropy,
    F.nll_loss: loss.nll_loss,
    torch.gather: loss.gather,
    torch.Tensor.gather: loss.gather,
}

_HOOKS = frozenset({"register_hook", "retain_grad", "requires_grad_", "detach_"})

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


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`LazyLogits.__torch_function__`."""
    tiled = _TILED.get(func)
    if tiled is not None and isinstance(_first(args, kwargs), LazyLogits):
        return tiled(*args, **kwargs)
    _note_hooks(func, args, kwargs)
    if not _is_for_lazy(func, args, kwargs):
        args, kwargs = tree_map_only(LazyLogits, plain, (args, kwargs))
    with _torch_private.without_torch_function():
        return func(*args, **kwargs)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input")


def _note_hooks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whoever asks for the gradient of logits must get it. See NOTE [two paths]."""
    name = getattr(func, "__name__", "")
    if name in _HOOKS:
        args[0].block.family.touch()
    elif func is torch.autograd.grad:
        for leaf in tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"]):
            if isinstance(leaf, LazyLogits):
                leaf.block.family.touch()


def _is_for_lazy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function takes the lazy tensor as it is: it asks no values, or they can wait, or it writes."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__", "backward") or name in _METADATA or name in _HOOKS:
        return True
    if func is torch.autograd.grad or _writes(name, kwargs):
        return True
    if name in _LAZY:
        return True
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in _WITH_SCALAR:
        return len(tensors) == 1
    return name in _SUMS and not kwargs and all(isinstance(tensor, LazyLogits) for tensor in tensors[:2])


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name in ("__setitem__",) or (name.startswith("__i") and name not in ("__invert__", "__iter__"))
    into_lazy = any(isinstance(leaf, LazyLogits) for leaf in tree_leaves(kwargs.get("out")))
    return is_in_place or (is_operator and name != "__index__" and name != "__int__") or into_lazy
