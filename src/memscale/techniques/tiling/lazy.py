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

Known limits: `backward(inputs=[logits])` leaves `logits.grad` empty (`retain_grad`, hooks and `autograd.grad` work);
assigning `logits.data` is not followed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from memscale import _torch_private
from memscale._errors import MemScaleError

aten = torch.ops.aten

_COPIES = frozenset({aten._to_copy.default, aten.clone.default})
_SCALAR_MAPS = frozenset(
    {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.tanh.default, aten.neg.default}
)


class StaleLogitsError(MemScaleError, RuntimeError):
    """Logits were read after the weights that they come from had changed."""


# ---- the recipe


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """One product with a vocabulary-wide weight: `linear(hidden, weight, bias)` in `dtype`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    tile_rows: int
    """Rows of logits that a loss computes at once."""
    is_current: Callable[[], bool]
    """False once someone has changed the weight behind autograd's back."""
    versions: tuple[int | None, ...]

    @property
    def num_rows(self) -> int:
        return self.hidden.numel() // max(self.hidden.shape[-1], 1)

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def flat_hidden(self) -> torch.Tensor:
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def check_current(self) -> None:
        if self.versions != _versions(self.hidden, self.weight, self.bias) or not self.is_current():
            raise StaleLogitsError(
                "these logits were never built, and the head's weight (or its input) has changed since: "
                "optimizer.step() came before they were read. Read what you need before the step "
                "(for example predictions = logits.argmax(-1)), or take the tiling of the head off."
            )


def linear_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype that a linear computes in here and now."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _versions(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if t is None or t.is_inference() else t._version for t in tensors)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The output of projection number `index`."""

    index: int

    def evaluate(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return outputs[self.index]


@dataclasses.dataclass(frozen=True)
class Map:
    """A function of single rows, [rows, vocabulary] to the same."""

    inner: Expression
    kind: Literal["cast", "scalar", "log_softmax"]
    function: Callable[[torch.Tensor], torch.Tensor]

    def evaluate(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.function(self.inner.evaluate(outputs))


@dataclasses.dataclass(frozen=True)
class Sum:
    """Two expressions added: a head and its low-rank adapter."""

    left: Expression
    right: Expression

    def evaluate(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.left.evaluate(outputs) + self.right.evaluate(outputs)


Expression = Leaf | Map | Sum


def is_plain(expression: Expression) -> bool:
    """One projection and casts: its gradient needs no autograd on the tile."""
    return isinstance(expression, Leaf) or (
        isinstance(expression, Map) and expression.kind == "cast" and is_plain(expression.inner)
    )


def _shifted(expression: Expression, by: int) -> Expression:
    match expression:
        case Leaf(index):
            return Leaf(index + by)
        case Map(inner, kind, function):
            return Map(_shifted(inner, by), kind, function)
        case Sum(left, right):
            return Sum(_shifted(left, by), _shifted(right, by))


class Family:
    """What all lazy tensors share that come from the same projections."""

    def __init__(self, *parents: Family) -> None:
        self.parents = parents
        self.nodes: set[Any] = {node for parent in parents for node in parent.nodes}
        """The heads' own nodes in the graph."""
        self._touched = False

    @property
    def touched(self) -> bool:
        """Hooked, or written in place: the tiled path would miss it. See NOTE [two paths]."""
        return self._touched or any(parent.touched for parent in self.parents)

    def touch(self) -> None:
        self._touched = True


class Block:
    """Rows of logits that are not built: row `i` is the expression on row `rows[i]` of the projections' inputs."""

    def __init__(
        self,
        projections: tuple[Projection, ...],
        expression: Expression,
        family: Family,
        rows: torch.Tensor | None = None,
    ) -> None:
        self.projections = projections
        self.expression = expression
        self.family = family
        self.rows = rows
        """None: all of them, in order."""
        self.full: torch.Tensor | None = None
        """The values of the whole block, once they had to be shared memory."""

    @property
    def vocabulary(self) -> int:
        return self.projections[0].vocabulary

    @property
    def device(self) -> torch.device:
        return self.projections[0].hidden.device

    def with_(self, expression: Expression, rows: torch.Tensor | None) -> Block:
        return Block(self.projections, expression, self.family, rows)

    def row_numbers(self) -> torch.Tensor:
        return torch.arange(self.projections[0].num_rows, device=self.device) if self.rows is None else self.rows

    def tensors(self) -> list[torch.Tensor | None]:
        """Flat inputs of the tiled loss: hidden, weight, bias of every projection."""
        return [t for p in self.projections for t in (p.flat_hidden(), p.weight, p.bias)]

    def check_current(self) -> None:
        for projection in self.projections:
            projection.check_current()

    def compute(self, tensors: Sequence[torch.Tensor | None], rows: Any) -> torch.Tensor:
        """Rows of logits from `tensors`, with whatever autograd is on."""
        outputs = [
            linear(projection, _chosen(hidden, rows), weight, bias)
            for projection, (hidden, weight, bias) in zip(self.projections, threes(tensors), strict=True)
        ]
        return self.expression.evaluate(outputs)

    def values(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Plain values, outside autograd and autocast; `rows` None means all."""
        self.check_current()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self.compute(self.tensors(), rows)


def threes(tensors: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    return zip(tensors[0::3], tensors[1::3], tensors[2::3], strict=True)


def _chosen(hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return hidden if rows is None else hidden[rows]


def linear(
    projection: Projection, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    dtype = projection.dtype
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


# ---- the tensor


class LazyLogits(torch.Tensor):
    """A view of whole rows of a `Block`. `geometry` is a tensor without memory that has its shape and strides."""

    on_build: ClassVar[Callable[[LazyLogits], None] | None] = None
    """Told whenever logits are built, for those who want to know."""
    is_lazy = True
    """For whoever must not look; see `memscale._profile.rehearsal`."""
    block: Block
    geometry: torch.Tensor
    vocabulary_dim: int
    cache: torch.Tensor | None

    @staticmethod
    def __new__(cls, block: Block, geometry: torch.Tensor, vocabulary_dim: int) -> LazyLogits:
        self: LazyLogits = _torch_private.wrapper_tensor(cls, geometry, block.device)
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
        if LazyLogits.on_build is not None:
            LazyLogits.on_build(self)
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
        """The same rows, outside the graph and without built values."""
        return LazyLogits(self.block, self.geometry, self.vocabulary_dim)

    def is_traceable(self) -> bool:
        """Whether the graph from here to the heads consists of operators that the recipe repeats."""
        if self.block.family.touched:
            return False
        return not self.requires_grad or _leads_to(self.grad_fn, self.block.family.nodes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from memscale.techniques.tiling import functions

        return functions.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if _torch_private.is_composite(func):
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
        expression = Sum(mine.expression, _shifted(theirs.expression, len(mine.projections)))
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
        if node is None or not _torch_private.is_own_node(node) or not node.next_functions:
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
    versions = _versions(hidden, weight, bias)
    projection = Projection(hidden, weight, bias, linear_dtype(hidden), tile_rows, is_current, versions)
    logits: LazyLogits = LazyProjection.apply(hidden, weight, bias, projection, family)  # type: ignore[no-untyped-call]
    if logits.grad_fn is not None:
        family.nodes.add(logits.grad_fn)
    return logits
