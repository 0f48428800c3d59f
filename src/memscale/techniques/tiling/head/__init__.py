"""A language-model head whose output is lazy: see `lazy.py` for the tensor and `loss.py` for what it saves.

Three shapes of head are known:

- an `nn.Linear` (with or without bias, tied, frozen, its weight parametrized);
- a module that adds up several of them, such as a linear with a low-rank adapter: every inner linear of the head's
  width returns lazy logits, and their sum is lazy too;
- a weight that the model's own forward multiplies with (`F.linear(hidden, weight)`, `hidden @ weight.T`).

A batch of no more rows than a tile takes the plain path, bit for bit.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale._errors import PlanError
from memscale._plan import TileHead
from memscale._torch import private
from memscale._torch.interception import intercept
from memscale._torch.optimizer_steps import CountedSteps, watch_steps
from memscale._torch.overrides import ForwardOverride, find_module, undo_with
from memscale._torch.plain_path import is_plain_path
from memscale.techniques.tiling.common import at_least_one
from memscale.techniques.tiling.head.functions import DDP_LOOKS
from memscale.techniques.tiling.head.lazy import LazyLogits, lazy_linear

_LINEAR = inspect.unwrap(F.linear)
"""What modes are told of, whoever stands in front of it: a rehearsal does."""
_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm})


def attach_head(action: TileHead, model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Tile this head until undone."""
    at_least_one(action.module_fqn, "rows", action.rows)
    module = find_module(model, action.module_fqn)
    undo_with(module, intercept(*private.ddp_looks_at_outputs(), DDP_LOOKS.note), undo)
    if action.weight_fqn is not None:
        _attach_product(action, model, module, undo)
        return
    linears = head_linears(module)
    if not linears:
        raise PlanError(
            f"{action.module_fqn!r} ({type(module).__name__}) is no linear head and has none inside: "
            "it cannot be tiled; take the action out of the plan"
        )
    steps = _count_steps([p for linear in linears for p in linear.parameters()], module, undo)
    for linear in linears:
        if "forward" in vars(linear):
            raise PlanError(
                f"the forward of the head {action.module_fqn!r} was replaced by someone else, and tiling would "
                "bypass it; take the action out of the plan"
            )
        LazyHead(linear, action.rows, steps).attach(undo)


def _attach_product(action: TileHead, model: nn.Module, module: nn.Module, undo: contextlib.ExitStack) -> None:
    assert action.weight_fqn is not None
    try:
        weight = model.get_parameter(action.weight_fqn)
    except AttributeError as error:
        raise PlanError(f"the plan names the weight {action.weight_fqn!r}, which this model does not have") from error
    steps = _count_steps([weight], module, undo)
    _ProductHead(module, weight, action.rows, steps).attach(undo)


def head_linears(module: nn.Module) -> list[nn.Linear]:
    """The linear that a head is, or those inside it that are as wide as its output; none if it is something else."""
    inside = [m for m in module.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
    width = max((linear.out_features for linear in inside), default=0)
    return [linear for linear in inside if linear.out_features == width]


def _count_steps(parameters: Iterable[nn.Parameter], head: nn.Module, undo: contextlib.ExitStack) -> CountedSteps:
    """Count the steps of optimizers that own the head's weights: some write behind autograd's back.

    See NOTE [stale logits] in `lazy.py`.
    """
    steps = CountedSteps(parameters)
    undo_with(head, watch_steps(steps), undo)
    return steps


class _NoStepSince:
    """Whether no step has been taken since."""

    def __init__(self, steps: CountedSteps) -> None:
        self._steps, self._count = steps, steps.count

    def __call__(self) -> bool:
        return self._steps.count == self._count


class LazyHead(ForwardOverride):
    """The forward of a tiled linear head."""

    def __init__(self, module: nn.Linear, tile_rows: int, steps: CountedSteps) -> None:
        super().__init__(module)
        self.tile_rows = tile_rows
        self.steps = steps

    def call(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not can_be_lazy(hidden, module.weight, self.tile_rows):
            return self.inner()(*args, **kwargs)
        bias: Any = module.bias
        return lazy_linear(hidden, module.weight, bias, tile_rows=self.tile_rows, is_current=_NoStepSince(self.steps))  # type: ignore[arg-type]


def can_be_lazy(hidden: Any, weight: Any, tile_rows: int) -> bool:
    """Whether this call is a plain product of more rows than a tile has."""
    if not isinstance(hidden, torch.Tensor) or isinstance(hidden, LazyLogits) or hidden.dim() < 1:
        return False
    if is_plain_path() or hidden.layout is not torch.strided:
        return False
    if hidden.shape[-1] != weight.shape[-1] or hidden.device != weight.device or weight.shape[0] < 2:
        return False
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return False  # the plain path says what is wrong
    return hidden.numel() > tile_rows * hidden.shape[-1]


class _ProductHead(ForwardOverride):
    """The forward of a module that multiplies with the head's weight itself."""

    def __init__(self, module: nn.Module, weight: nn.Parameter, tile_rows: int, steps: CountedSteps) -> None:
        super().__init__(module)
        self.products = _LazyProducts(weight, tile_rows, steps)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with self.products:
            return self.inner()(*args, **kwargs)


class _LazyProducts(TorchFunctionMode):
    """Products with one weight come out lazy while this mode is active."""

    def __init__(self, weight: nn.Parameter, tile_rows: int, steps: CountedSteps) -> None:
        super().__init__()
        self._weight = weakref.ref(weight)
        self.tile_rows = tile_rows
        self.steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = self._weight()
        hidden, bias = (None, None) if weight is None else product_with(weight, func, args, kwargs)
        if weight is None or hidden is None or not can_be_lazy(hidden, weight, self.tile_rows):
            return func(*args, **kwargs)
        return lazy_linear(hidden, weight, bias, tile_rows=self.tile_rows, is_current=_NoStepSince(self.steps))


def product_with(weight: torch.Tensor, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """(hidden, bias) if this call is `linear(hidden, weight, bias)` in any writing; else (None, None)."""
    if func is _LINEAR and len(args) >= 2 and args[1] is weight:
        return args[0], args[2] if len(args) > 2 else kwargs.get("bias")
    if func in _PRODUCTS and len(args) == 2 and not kwargs and _is_transpose(args[1], weight):
        return args[0], None
    return None, None


def _is_transpose(matrix: Any, weight: torch.Tensor) -> bool:
    return bool(
        isinstance(matrix, torch.Tensor)
        and matrix.dim() == 2
        and matrix._base is weight
        and matrix.shape == weight.shape[::-1]
        and matrix.stride() == (weight.stride(1), weight.stride(0))
        and matrix.storage_offset() == weight.storage_offset()
    )
