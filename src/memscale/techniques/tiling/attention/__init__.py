"""Attention of models that materialise their scores: the same result without [queries, keys] ever existing whole.

While a tiled module's forward runs, the product of queries and keys comes out as `LazyScores`: a tensor that remembers
the two and everything that is done to it on the way (scale, mask, bias, softmax, cast, dropout). The product with the
values then runs through `scaled_dot_product_attention` if the steps are a scale and additive masks, and otherwise over
tiles of queries, the very same steps a tile, recomputed in backward. Anything else that is done with lazy scores
replays the steps with ordinary operators, and is right.

Dropout draws its noise for all queries in one go, as the plain path does, and keeps it as booleans: the same mask,
at a quarter of one float score matrix a layer, plus one float matrix for a moment.

Known limits: scores that are read after the module was left are computed again, with their own graph. Modules that
call a fused kernel already are untouched, except for what they do beside it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale._plan import TileAttention
from memscale._torch import private
from memscale._torch.overrides import ForwardOverride, find_module
from memscale._torch.plain_path import is_plain_path
from memscale.techniques.tiling.attention.attend import attend
from memscale.techniques.tiling.attention.scores import CASTS, SOFTMAX, Steps
from memscale.techniques.tiling.common import (
    TilingError,
    at_least_one,
    draw_noise,
    dropout_call,
    dropped,
    names,
)

_MATMULS = frozenset({"matmul", "__matmul__", "bmm"})
_HOOKS = frozenset({"register_hook", "retain_grad"})
_ELEMENTWISE = names(
    "mul __mul__ __rmul__ multiply div __truediv__ true_divide divide add __add__ __radd__ sub __sub__ masked_fill "
    "where tanh clamp"
)
_IN_PLACE = {
    "mul_": "mul",
    "div_": "div",
    "add_": "add",
    "sub_": "sub",
    "masked_fill_": "masked_fill",
    "__imul__": "mul",
    "__itruediv__": "div",
    "__iadd__": "add",
    "__isub__": "sub",
}
_METADATA = names(
    "size stride dim ndimension numel nelement is_contiguous is_floating_point is_complex get_device element_size "
    "__len__ __hash__ is_inference untyped_storage"
)
_SHOWS = frozenset({"shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "layout", "is_nested", "is_sparse"})


def attach_attention(action: TileAttention, model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Tile this attention until undone."""
    at_least_one(action.module_fqn, "rows", action.rows)
    TiledAttention(find_module(model, action.module_fqn), action).attach(undo)


class TiledAttention(ForwardOverride):
    """The forward of a tiled attention."""

    def __init__(self, module: nn.Module, action: TileAttention) -> None:
        super().__init__(module)
        self.mode = ScoreCatcher(action.rows)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_plain_path():
            return self.inner()(*args, **kwargs)
        with self.mode:
            return self.inner()(*args, **kwargs)


class ScoreCatcher(TorchFunctionMode):
    """Products that look like scores come out lazy while this mode is active."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.num_caught = 0
        """Attentions that were computed without their scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.note_fused()
        if any(issubclass(kind, LazyScores) for kind in types):
            # Here, not in the tensor's own method: modes around this one see the operators that come of it.
            return LazyScores.handle(func, args, kwargs)
        if _name(func) in _MATMULS and self._look_like_scores(args, kwargs):
            return LazyScores.of(self, Steps.of(args[0], args[1]))
        return func(*args, **kwargs)

    def note_fused(self) -> None:
        """The model called a fused kernel by itself."""

    def note_caught(self, num_queries: int) -> None:
        """An attention was computed without its scores."""
        self.num_caught += 1

    def _look_like_scores(self, args: Any, kwargs: Any) -> bool:
        """Two batched activations whose product is larger than both: more queries than a tile, more keys than width."""
        if kwargs or len(args) != 2 or not all(type(a) is not LazyScores for a in args):
            return False
        queries, keys = args
        return (
            isinstance(queries, torch.Tensor)
            and isinstance(keys, torch.Tensor)
            and queries.dim() == keys.dim() >= 3
            and queries.shape[:-2] == keys.shape[:-2]
            and queries.dtype == keys.dtype
            and queries.shape[-2] > self.rows
            and keys.shape[-1] > queries.shape[-1]
            and not isinstance(keys, nn.Parameter)
            and (torch.is_grad_enabled() or not (queries.requires_grad or keys.requires_grad))
        )


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


class LazyScores(torch.Tensor):
    """Scores that are not built. Not connected to autograd by itself: what is computed from it is, by replay."""

    catcher: ScoreCatcher
    steps: Steps
    built: torch.Tensor | None
    is_used: bool
    """Something was made from it, which a hook on it would miss."""

    @staticmethod
    def __new__(cls, catcher: ScoreCatcher, steps: Steps, geometry: torch.Tensor) -> LazyScores:
        self: LazyScores = private.wrapper_tensor(cls, geometry, steps.queries.device)
        self.catcher, self.steps, self.built, self.is_used = catcher, steps, None, False
        return self

    @classmethod
    def of(cls, catcher: ScoreCatcher, steps: Steps, dtype: torch.dtype | None = None) -> LazyScores:
        queries, keys = steps.queries, steps.keys
        shape = (*queries.shape[:-1], keys.shape[-1])
        with private.without_torch_function():
            geometry = torch.empty(shape, dtype=dtype or _product_dtype(queries), device="meta")
        return cls(catcher, steps, geometry)

    def value(self) -> torch.Tensor:
        """The scores by ordinary operators, connected to autograd; the same tensor every time."""
        if self.built is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.steps.needs_grad()):
                self.built = self.steps.replay()
        return self.built

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.handle(func, args, kwargs or {})

    @classmethod
    def handle(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Metadata are there, steps are noted, everything else is done with the built scores."""
        name = _name(func)
        if name in _METADATA or (name == "__get__" and _shows_metadata(func)):
            with private.without_torch_function():
                return func(*args, **kwargs)
        if name in _HOOKS and args[0].is_used:
            raise TilingError(
                f"{name} on tiled attention weights (or scores) after they were used would see nothing: call it before "
                "they are multiplied with the values, or set enable_tiling=False"
            )
        lazy = _follow(func, name, args, kwargs)
        if lazy is not None:
            return lazy
        args, kwargs = tree_map_only(cls, cls.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0].value().detach()
        args, kwargs = tree_map_only(cls, lambda lazy: lazy.value(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _product_dtype(queries: torch.Tensor) -> torch.dtype:
    kind = queries.device.type
    if queries.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return queries.dtype


def _shows_metadata(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in _SHOWS


def _follow(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a step makes of lazy scores: lazy scores again, or the attention's output; None for anything else."""
    places = [index for index, argument in enumerate(args) if isinstance(argument, LazyScores)]
    if not places or args[places[0]].built is not None or "out" in kwargs:
        return None
    position, scores = places[0], args[places[0]]
    if name in _MATMULS and position == 0 and len(places) == 1 and len(args) == 2 and not kwargs:
        return _attend(scores, args[1])
    if name == "type_as" and position == 0:
        return _stepped(scores, "to", torch.Tensor.to, (args[1].dtype,), {}, 0)
    if len(places) > 1 or any(isinstance(leaf, LazyScores) for leaf in tree_leaves(kwargs)):
        return None
    rest = (*args[:position], *args[position + 1 :])
    dropout = dropout_call(func, args, kwargs)
    if dropout is not None:
        return _dropped(func, *dropout)
    if name == "dropout":
        return scores  # in evaluation, or with p = 0
    if name in _IN_PLACE and position == 0:
        return _written(scores, name, rest, kwargs)
    if name in SOFTMAX and not _is_over_keys(scores, rest, kwargs):
        return None
    if name in SOFTMAX | CASTS or (name in _ELEMENTWISE and _are_sliceable(scores, rest, kwargs)):
        return _stepped(scores, name, func, rest, kwargs, position)
    if name == "clone" and not kwargs:
        return _cloned(scores)
    return scores if name == "contiguous" else None


def _cloned(scores: LazyScores) -> LazyScores | None:
    if not torch.is_grad_enabled() and scores.steps.needs_grad():
        return None
    scores.is_used = True
    return LazyScores.of(scores.catcher, scores.steps, scores.dtype)


def _stepped(scores: LazyScores, name: str, func: Any, rest: Any, kwargs: Any, position: int) -> LazyScores | None:
    steps = scores.steps.call(name, func, rest, kwargs, position)
    if not torch.is_grad_enabled() and steps.needs_grad():
        return None  # a step outside the graph, of scores inside it
    with private.without_torch_function(), torch.no_grad():
        # On one element of everything: the dtype that comes out depends on all of them, and on autocast.
        sample = torch.empty((1,) * scores.dim(), dtype=scores.dtype, device=scores.device)
        ones = [argument.detach()[(slice(0, 1),) * argument.dim()] for argument in steps.arguments]
        result = steps.steps[-1].apply(sample, ones)
    if result.device != scores.device or not result.is_floating_point() or result.dim() != scores.dim():
        return None
    if name in CASTS and result.dtype == scores.dtype and not kwargs.get("copy"):
        return scores  # as in the plain path: the same tensor, and writes to it are seen
    scores.is_used = True
    return LazyScores.of(scores.catcher, steps, result.dtype)


def _written(scores: LazyScores, name: str, rest: Any, kwargs: Any) -> LazyScores | None:
    """An in-place step changes this tensor's recipe; scores made from it before keep theirs."""
    plain_name = _IN_PLACE[name]
    if not _are_sliceable(scores, rest, kwargs):
        return None
    stepped = _stepped(scores, plain_name, getattr(torch.Tensor, plain_name), rest, kwargs, 0)
    if stepped is not None and stepped.dtype != scores.dtype:
        stepped = _stepped(stepped, "to", torch.Tensor.to, (scores.dtype,), {}, 0)
    if stepped is None:
        return None
    scores.steps, scores.is_used = stepped.steps, False
    return scores


def _dropped(func: Any, scores: Any, p: float, inplace: bool) -> Any:
    if inplace or p == 1.0 or (not torch.is_grad_enabled() and scores.steps.needs_grad()):
        return None
    scores.is_used = True
    kept = draw_noise(scores, scores.shape, p) != 0
    return dropped(func, LazyScores.of(scores.catcher, scores.steps.drop(kept, p), scores.dtype))


def _is_over_keys(scores: LazyScores, rest: Any, kwargs: Any) -> bool:
    dim = rest[0] if rest else kwargs.get("dim")
    return dim in (-1, scores.dim() - 1)


def _are_sliceable(scores: LazyScores, rest: Any, kwargs: Any) -> bool:
    """Whether every tensor among the arguments broadcasts over the scores, or is the same for all queries."""
    tensors = [leaf for leaf in tree_leaves((rest, kwargs)) if isinstance(leaf, torch.Tensor)]
    return all(type(t) is not LazyScores and _broadcasts(t.shape, scores.shape) for t in tensors)


def _broadcasts(shape: torch.Size, onto: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(onto), strict=False)
    return len(shape) <= len(onto) and all(mine in (1, theirs) for mine, theirs in pairs)


def _attend(scores: LazyScores, values: torch.Tensor) -> torch.Tensor | None:
    steps = scores.steps
    if not steps.is_softmaxed() or values.dim() != scores.dim() or values.shape[:-2] != scores.shape[:-2]:
        return None
    autocasts = torch.is_autocast_enabled(values.device.type)
    if values.shape[-2] != scores.shape[-1] or (values.dtype != scores.dtype and not autocasts):
        return None
    scores.is_used = True
    scores.catcher.note_caught(scores.shape[-2])
    return attend(steps, values, scores.catcher.rows)
