"""`LazyLogits`: a tensor of logits that remembers how to be computed, row by row, and is built only if someone looks.

It is a wrapper subclass with a real `grad_fn`. Views, casts, row selections, scalar maps and `log_softmax` stay lazy:
they move row numbers, or add a step to the recipe. Cross-entropy takes the recipe and runs over tiles of rows
(`loss.py`). Everything else sees plain values, and autograd, which works above, is right by construction.

NOTE [two paths]: the graph through the lazy tensors (views, casts, head) is always there, an ordinary one; the tiled
loss goes round it, straight to hidden states and weights. It may do so only while nobody can tell: not when a tensor
on the way has a hook, keeps its gradient or was written to (`Family.touched`), and not when an unknown node lies
between (`is_traceable`).

NOTE [stale logits]: lazy logits are computed from the head's weight as it is. Once that has changed
(`optimizer.step()`), they cannot be computed any more; reading them raises `StaleLogitsError`. A snapshot would cost
the weight's bytes in every training loop that still holds its last output, which is nearly every one.

Known limits: `backward(inputs=[logits])` leaves `logits.grad` empty (`retain_grad`, hooks and `autograd.grad` work). A
weight that is changed through its `.data`, by no optimizer, between head and loss is not noticed. Lazy logits must not
become another tensor's `.data`: PyTorch asks nobody there, and there is no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from memscale._torch import private
from memscale.techniques.tiling.head.recipe import (
    Block,
    Family,
    Leaf,
    Map,
    Projection,
    Sum,
    linear_dtype,
    shifted,
    versions_of,
)

aten = torch.ops.aten

_COPIES = frozenset({aten._to_copy.default, aten.clone.default})
_SCALAR_MAPS = frozenset(
    {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.tanh.default, aten.neg.default}
)


class LazyLogits(torch.Tensor):
    """A view of whole rows of a `Block`. `geometry` is a tensor without memory that has its shape and strides."""

    on_build: ClassVar[list[Callable[[LazyLogits], None]]] = []
    """Told whenever logits are built, in the thread that builds them, for those who want to know."""
    is_lazy = True
    """For whoever must not look: a rehearsal, and a fingerprint."""
    block: Block
    geometry: torch.Tensor
    vocabulary_dim: int
    cache: torch.Tensor | None

    @staticmethod
    def __new__(cls, block: Block, geometry: torch.Tensor, vocabulary_dim: int) -> LazyLogits:
        self: LazyLogits = private.wrapper_tensor(cls, geometry, block.device)
        self.block, self.geometry, self.vocabulary_dim, self.cache = block, geometry, vocabulary_dim, None
        return self

    @classmethod
    def dense(cls, block: Block, row_shape: Sequence[int], dtype: torch.dtype) -> LazyLogits:
        geometry = torch.empty(*row_shape, block.vocabulary, dtype=dtype, device="meta")
        return cls(block, geometry, len(row_shape))

    def row_shape(self) -> tuple[int, ...]:
        shape = tuple(self.geometry.shape)
        return shape[: self.vocabulary_dim] + shape[self.vocabulary_dim + 1 :]

    def row_ids(self) -> torch.Tensor:
        """Which rows of the projections' inputs this view shows, in its row shape."""
        width, geometry = self.block.vocabulary, self.geometry
        strides = [stride // width for dim, stride in enumerate(geometry.stride()) if dim != self.vocabulary_dim]
        return self.block.row_numbers().as_strided(self.row_shape(), strides, geometry.storage_offset() // width)

    def value(self, *, alias: bool = False) -> torch.Tensor:
        """Plain values without autograd; with `alias`, in memory that all views of the block share."""
        block, geometry = self.block, self.geometry
        for listener in list(LazyLogits.on_build):
            listener(self)
        if alias and block.full is None:
            block.full = block.values(block.rows).contiguous()
        if block.full is not None:
            return block.full.as_strided(geometry.shape, geometry.stride(), geometry.storage_offset())
        if self.cache is None:
            rows = None if self._shows_all_rows() else self.row_ids().reshape(-1)
            values = block.values(rows).view(*self.row_shape(), block.vocabulary)
            self.cache = values.movedim(-1, self.vocabulary_dim)
        return self.cache

    def _shows_all_rows(self) -> bool:
        everything = self.block.projections[0].num_rows * self.block.vocabulary
        return self.block.rows is None and self.geometry.is_contiguous() and self.geometry.numel() == everything

    def forget(self) -> LazyLogits:
        """The same rows, outside the graph and without built values: later writes do not reach them."""
        block = self.block.with_(self.block.expression, self.block.rows)
        return LazyLogits(block, self.geometry, self.vocabulary_dim)

    def is_traceable(self) -> bool:
        """Whether the graph from here to the heads consists of operators that the recipe repeats."""
        if self.block.family.touched:
            return False
        return not self.requires_grad or _leads_to(private.node_of(self), self.block.family.nodes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from memscale.techniques.tiling.head import functions

        return functions.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if private.is_composite(func):
            return func.decompose(*args, **kwargs)  # in inference mode composite operators arrive whole
        first = args[0] if args and isinstance(args[0], cls) else None
        if first is not None and first.numel() and not first.block.family.touched:
            lazy = first._stay_lazy(func, args[1:], kwargs)
            if lazy is not None:
                return lazy
        return _run_plain(func, args, kwargs, first)

    def _stay_lazy(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.is_view or func is aten._unsafe_view.default:
            return self._viewed(func, rest, kwargs)
        if func is aten.index.Tensor:
            return self._indexed(rest[0])
        if func is aten.index_select.default:
            return self._indexed([None] * (rest[0] % self.dim()) + [rest[1]])
        if func is aten.add.Tensor and isinstance(rest[0], LazyLogits) and not kwargs:
            return self._added(rest[0])
        if func in _SCALAR_MAPS and not any(isinstance(argument, torch.Tensor) for argument in rest):
            return self._mapped("scalar", func(self.geometry, *rest), lambda x: func(x, *rest))
        if func is aten._log_softmax.default and rest[0] % self.dim() == self.vocabulary_dim:
            dtype = torch.float32 if rest[1] else self.dtype
            return self._mapped(
                "log_softmax", torch.empty_like(self.geometry, dtype=dtype), lambda x: func(x, 1, rest[1])
            )
        if func in _COPIES and kwargs.get("device") in (None, self.device):
            return self._copied(func, rest, kwargs)
        return None

    def _viewed(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any view operator runs on the geometry; a result that still consists of whole rows is a row selection."""
        views = func(self.geometry, *rest, **kwargs)
        many = views if isinstance(views, list | tuple) else [views]
        dims = [whole_rows_dim(view, self.block.vocabulary) for view in many]
        if None in dims:
            return None
        lazies = [LazyLogits(self.block, view, dim) for view, dim in zip(many, dims, strict=True) if dim is not None]
        return lazies if views is many else lazies[0]

    def _indexed(self, indices: Sequence[torch.Tensor | None]) -> LazyLogits | None:
        reaches = len(indices) + sum(i.dim() - 1 for i in indices if i is not None and i.dtype == torch.bool)
        if self.vocabulary_dim != self.dim() - 1 or reaches >= self.dim():
            return None
        rows = aten.index.Tensor(self.row_ids(), indices)
        if not rows.numel():
            return None
        return LazyLogits.dense(self.block.with_(self.block.expression, rows.reshape(-1)), rows.shape, self.dtype)

    def _added(self, other: LazyLogits) -> LazyLogits | None:
        mine, theirs = self.block, other.block
        if not (mine.rows is None and theirs.rows is None and not theirs.family.touched):
            return None
        if not (_same_geometry(self, other) and mine.projections[0].num_rows == theirs.projections[0].num_rows):
            return None
        expression = Sum(mine.expression, shifted(theirs.expression, len(mine.projections)))
        block = Block(mine.projections + theirs.projections, expression, Family(mine.family, theirs.family), rows=None)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return LazyLogits(block, self.geometry.to(dtype), self.vocabulary_dim)

    def _copied(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        geometry = func(self.geometry, *rest, **kwargs)
        if geometry.dtype == self.dtype:
            return self._mapped(None, geometry, None)
        return self._mapped("cast", geometry, lambda x: x.to(geometry.dtype))

    def _mapped(self, kind: Any, geometry: torch.Tensor, function: Any) -> LazyLogits | None:
        """A new block of rows, in the order in which `geometry` lays them out."""
        dim = self.vocabulary_dim
        if whole_rows_dim(geometry, self.block.vocabulary) != dim or not geometry.is_floating_point():
            return None
        expression = self.block.expression if kind is None else Map(self.block.expression, kind, function)
        if self._shows_all_rows() and geometry.is_contiguous():
            return LazyLogits(self.block.with_(expression, None), geometry, dim)
        rows = self.row_ids()
        new = LazyLogits(self.block.with_(expression, rows.new_empty(rows.numel())), geometry, dim)
        new.row_ids().copy_(rows)
        return new


def _same_geometry(one: LazyLogits, other: LazyLogits) -> bool:
    def key(lazy: LazyLogits) -> Any:
        geometry = lazy.geometry
        return tuple(geometry.shape), geometry.stride(), geometry.storage_offset(), lazy.vocabulary_dim

    return bool(key(one) == key(other))


def whole_rows_dim(geometry: torch.Tensor, width: int) -> int | None:
    """The dimension along which whole rows of a contiguous block lie; None if this view does not consist of them."""
    if width < 2 or geometry.storage_offset() % width:
        return None
    found = [
        dim
        for dim in range(geometry.dim())
        if geometry.shape[dim] == width and geometry.stride(dim) == 1 and _others_step_rows(geometry, dim, width)
    ]
    return found[0] if len(found) == 1 else None


def _others_step_rows(geometry: torch.Tensor, dim: int, width: int) -> bool:
    return all(
        geometry.stride(other) % width == 0 or geometry.shape[other] == 1
        for other in range(geometry.dim())
        if other != dim
    )


def _leads_to(start: Any, ends: set[Any]) -> bool:
    """Whether every way from `start` reaches one of `ends` through operators of PyTorch's own.

    A lazy tensor is made by operators that the recipe repeats. A custom function may hide among them (a gradient
    reversal is a view in forward), so those stop us, but for DDP's, which hands gradients through.
    """
    todo, seen, reached = [start], set(), False
    while todo:
        node = todo.pop()
        if node in ends:
            reached = True
            continue
        if node is None or not private.is_own_node(node) or not node.next_functions:
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return reached


def _run_plain(func: Any, args: Any, kwargs: Any, first: LazyLogits | None) -> Any:
    writes = func._schema.is_mutable

    def strip(lazy: LazyLogits) -> torch.Tensor:
        if writes or func.is_view:
            lazy.block.family.touch()  # a plain view may be written to later, unseen
        return lazy.value(alias=lazy.block.family.touched)

    result = func(*tree_map_only(LazyLogits, strip, args), **tree_map_only(LazyLogits, strip, kwargs))
    return first if writes and first is not None and func._schema.name.endswith("_") else result


# ---- the head, and the way back to plain tensors


class LazyProjection(torch.autograd.Function):
    """The head as autograd sees it: an ordinary linear, for every use that is not the tiled loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, projection: Projection, family: Family) -> Any:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)  # the tiled loss goes round this node, which then gets no gradient
        return LazyLogits.dense(Block((projection,), Leaf(0), family), hidden.shape[:-1], projection.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return (None,) * 5
        hidden, weight, bias = ctx.saved_tensors
        needs, gradient = ctx.needs_input_grad, plain(gradient)
        flat = gradient.reshape(-1, gradient.shape[-1])
        rows = hidden.reshape(-1, hidden.shape[-1]).to(gradient.dtype)
        return (
            (gradient @ weight.to(gradient.dtype)).to(hidden.dtype) if needs[0] else None,
            (flat.T @ rows).to(weight.dtype) if needs[1] else None,
            flat.sum(0).to(bias.dtype) if needs[2] else None,
            None,
            None,
        )


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lazy: Any) -> Any:
        ctx.set_materialize_grads(False)
        return lazy.value().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lazy: Any) -> Any:
        ctx.set_materialize_grads(False)
        return lazy.forget()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def same(lazy: LazyLogits) -> LazyLogits:
    """These logits as they are now, in the graph: writes that follow reach neither values nor graph."""
    return _Same.apply(lazy)  # type: ignore[no-untyped-call, no-any-return]


def plain(tensor: Any) -> Any:
    """The same logits as an ordinary tensor, connected to autograd."""
    return _Plain.apply(tensor) if isinstance(tensor, LazyLogits) else tensor  # type: ignore[no-untyped-call]


def lazy_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile_rows: int,
    is_current: Callable[[], bool] = lambda: True,
) -> LazyLogits:
    """`F.linear`, not computed yet."""
    if hidden.is_inference():
        hidden = hidden.clone()  # inference tensors have no version: nobody could tell that this one was changed
    family = Family()
    versions = versions_of(hidden, weight, bias)
    lender = getattr(weight, "memscale_lender", None)
    lender = lender.use() if lender is not None else None
    projection = Projection(hidden, weight, bias, linear_dtype(hidden), tile_rows, is_current, versions, lender)
    logits: LazyLogits = LazyProjection.apply(hidden, weight, bias, projection, family)  # type: ignore[no-untyped-call]
    node = private.node_of(logits)
    if node is not None:
        family.nodes.add(node)
    return logits
