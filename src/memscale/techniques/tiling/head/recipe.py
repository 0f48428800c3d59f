"""How lazy logits are computed: products with vocabulary-wide weights, and functions of single rows.

See NOTE [two paths] and NOTE [stale logits] in `lazy.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from memscale._errors import MemScaleError


class StaleLogitsError(MemScaleError, RuntimeError):
    """Logits were read after the weights that they come from had changed."""


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
    lender: Any = None
    """Brings a streamed weight back while it is used; None for a weight that stays."""

    @property
    def num_rows(self) -> int:
        return self.hidden.numel() // max(self.hidden.shape[-1], 1)

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def flat_hidden(self) -> torch.Tensor:
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def weight_present(self) -> contextlib.AbstractContextManager[None]:
        """A weight that is streamed has its values inside. See `offload/parameters/borrowed_weights.py`."""
        return contextlib.nullcontext() if self.lender is None else self.lender.present()

    def check_current(self) -> None:
        if self.versions != versions_of(self.hidden, self.weight, self.bias) or not self.is_current():
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


def versions_of(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
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


def shifted(expression: Expression, by: int) -> Expression:
    match expression:
        case Leaf(index):
            return Leaf(index + by)
        case Map(inner, kind, function):
            return Map(shifted(inner, by), kind, function)
        case Sum(left, right):
            return Sum(shifted(left, by), shifted(right, by))


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
        """The rows that are shown; None: all of them, in order."""
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

    @contextlib.contextmanager
    def weights_present(self) -> Iterator[None]:
        """Weights that are streamed have their values inside."""
        with contextlib.ExitStack() as away:
            for projection in self.projections:
                away.enter_context(projection.weight_present())
            yield

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
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), self.weights_present():
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
