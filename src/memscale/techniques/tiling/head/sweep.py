"""One pass over the tiles of a cross-entropy: losses of rows, and gradients of what the logits are made of.

A tile is a few rows of logits; it is turned in place into exponentials and into gradients, and is gone. See `loss.py`
for who asks for what.

NOTE [row maximum]: a row's log-sum-exp is kept as its maximum and the log of the remaining sum. Their sum would cancel
against the target's logit on confident rows, and lose the loss.

NOTE [same bytes on fake tensors]: rows that are ignored are sorted behind the others, and every array is as long as
the batch. A rehearsal on fake tensors, which cannot count them and takes all rows, so allocates what the run does.

NOTE [cast before summing]: in mixed precision a streamed weight visits in fp32, is cast, and leaves before the sums of
its gradient, which are as large, exist. The tiles see the 16-bit copy alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F

from memscale._torch import fake_repeats, private
from memscale.techniques.tiling.head.lazy import LazyLogits
from memscale.techniques.tiling.head.recipe import Block, Projection, is_plain, linear, threes

Reduction = Literal["none", "mean", "sum"]
PRODUCT_BYTES = 8 * 1024 * 1024
"""How much of a weight's gradient is there in 16 bits on its way into the sum."""


@dataclasses.dataclass(eq=False)
class Request:
    """One loss, as asked for."""

    logits: LazyLogits
    """What the loss was called with, as it was then: see `lazy.same`."""
    block: Block
    """What its cross-entropy is taken of."""
    target: torch.Tensor
    class_weight: torch.Tensor | None
    ignore_index: int
    smoothing: float
    reduction: Reduction
    is_nll: bool
    tile_rows: int

    def plain_loss(self, logits: torch.Tensor) -> torch.Tensor:
        if self.is_nll:
            return F.nll_loss(
                logits, self.target, self.class_weight, ignore_index=self.ignore_index, reduction=self.reduction
            )
        return F.cross_entropy(
            logits,
            self.target,
            self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.smoothing,
        )


def num_ignored(is_ignored: torch.Tensor) -> int:
    """How many rows do not count, read back from the device."""
    return int(is_ignored.sum())


class Rows:
    """The rows of one loss: those that count first, each with its target."""

    def __init__(self, request: Request, row_ids: torch.Tensor) -> None:
        flat = request.target.reshape(-1)
        is_ignored = flat == request.ignore_index
        self.order = torch.sort(is_ignored, stable=True).indices
        self.num_all = flat.numel()
        # See NOTE [same bytes on fake tensors].
        has_values = not private.is_fake(flat) and flat.device.type != "meta"
        self.num_kept = self.num_all - num_ignored(is_ignored) if has_values else self.num_all
        self.ids = row_ids[self.order]
        self.targets = flat[self.order]

    def tiles(self, tile_rows: int) -> list[slice]:
        return [slice(a, min(a + tile_rows, self.num_kept)) for a in range(0, self.num_kept, tile_rows)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is summed in half precision is summed in single."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Sweep:
    """Passes over the tiles of one loss."""

    def __init__(self, request: Request, rows: Rows, scale: torch.Tensor) -> None:
        self.request = request
        self.block = request.block
        self.rows = rows
        self.scale = scale
        """What the sum of the rows is multiplied with."""
        dtype = wide(request.logits.dtype)
        self.row_max = torch.zeros(rows.num_all, dtype=dtype, device=scale.device)
        self.log_sum = torch.zeros_like(self.row_max)
        weight = request.class_weight
        self.class_weight = None if weight is None else weight.to(dtype)
        self.total_weight: Any = self.block.vocabulary if self.class_weight is None else self.class_weight.sum()

    def losses(self, tensors: Any, needs: list[bool] | None) -> tuple[torch.Tensor, list[Any] | None]:
        """A loss a row, in the order of `rows`; and, if anything needs them, gradients of their scaled sum."""
        losses = torch.zeros_like(self.row_max)
        with torch.autocast(self.block.device.type, enabled=False), self._cast_weights(tensors) as cast:
            gradients = None if needs is None else self._accumulators(tensors, needs)
            for tile in self._tiles():
                computed = _Tile(self, cast, tile, with_gradients=gradients is not None)
                losses[tile] = computed.loss()
                if gradients is not None:
                    computed.add_gradients(gradients, self.scale)
                del computed
        return losses, gradients

    def gradients(self, tensors: Any, needs: list[bool], upstream: torch.Tensor) -> list[Any]:
        """Gradients for an upstream gradient a row (in the order of `rows`), or one for all."""
        with torch.autocast(self.block.device.type, enabled=False), self._cast_weights(tensors) as cast:
            gradients = self._accumulators(tensors, needs)
            for tile in self._tiles():
                computed = _Tile(self, cast, tile, with_gradients=True)
                computed.to_exponentials()
                computed.add_gradients(gradients, upstream if upstream.dim() == 0 else upstream[tile])
                del computed
        return gradients

    def _tiles(self) -> Iterator[slice]:
        tiles = list(self.rows.tiles(self.request.tile_rows))
        return fake_repeats.in_turn(tiles, is_rehearsal=private.is_fake(self.row_max))

    @contextlib.contextmanager
    def _cast_weights(self, tensors: Any) -> Iterator[list[Any]]:
        """The tensors with weights in the dtype of the product, once for all tiles."""
        with contextlib.ExitStack() as staying:
            cast: list[Any] = []
            for projection, (hidden, weight, bias) in zip(self.block.projections, threes(tensors), strict=True):
                narrow_bias = None if bias is None else bias.to(projection.dtype)
                cast += [hidden, _cast_weight(projection, weight, staying), narrow_bias]
            yield cast

    def _accumulators(self, tensors: Any, needs: list[bool]) -> list[Any]:
        return [
            torch.zeros(t.shape, dtype=wide(t.dtype), device=t.device) if need and t is not None else None
            for t, need in zip(tensors, needs, strict=True)
        ]


def _cast_weight(projection: Projection, weight: torch.Tensor, staying: contextlib.ExitStack) -> torch.Tensor:
    """The weight, there for as long as it is needed. See NOTE [cast before summing]."""
    if weight.dtype == projection.dtype:
        staying.enter_context(projection.weight_present())
        return weight
    with projection.weight_present():
        return weight.to(projection.dtype)


class _Tile:
    """A few rows of logits while they exist. They are turned in place into exponentials, then into gradients."""

    def __init__(self, sweep: Sweep, tensors: list[Any], tile: slice, *, with_gradients: bool) -> None:
        self.sweep, self.tile, self.tensors = sweep, tile, tensors
        self.ids, self.targets = sweep.rows.ids[tile], sweep.rows.targets[tile]
        self.hiddens = [hidden[self.ids] for hidden in tensors[0::3]]
        self.needs_autograd = with_gradients and not is_plain(sweep.block.expression)
        self.outputs, mapped = self._outputs()
        self.mapped = mapped if self.needs_autograd else None  # in 16 bits it would stand beside the logits
        values = mapped.detach()
        logits = values.to(wide(values.dtype))
        self.logits = logits.clone() if self.needs_autograd and logits is values else logits

    def _outputs(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The projections' outputs, and the logits made of them, with a small graph between where maps need one."""
        block = self.sweep.block
        outputs = [
            linear(projection, hidden, weight, bias)
            for projection, hidden, (_, weight, bias) in zip(
                block.projections, self.hiddens, threes(self.tensors), strict=True
            )
        ]
        if not self.needs_autograd:
            return [], block.expression.evaluate(outputs)
        with torch.enable_grad():
            outputs = [output.requires_grad_() for output in outputs]
            return outputs, block.expression.evaluate(outputs)

    @property
    def target_weight(self) -> Any:
        weight = self.sweep.class_weight
        return 1.0 if weight is None else weight[self.targets]

    def loss(self) -> torch.Tensor:
        sweep, smoothing = self.sweep, self.sweep.request.smoothing
        logits, vocabulary = self.logits, self.sweep.block.vocabulary
        at_target, row_max = logits.gather(1, self.targets[:, None])[:, 0], logits.amax(1)
        logits.sub_(row_max[:, None])
        flat: Any = 0.0
        if smoothing:
            flat = logits.sum(1) if sweep.class_weight is None else logits @ sweep.class_weight
        log_sum = logits.exp_().sum(1).log_()
        sweep.row_max[self.tile], sweep.log_sum[self.tile] = row_max, log_sum
        # See NOTE [row maximum].
        loss: torch.Tensor = (1 - smoothing) * self.target_weight * (log_sum + (row_max - at_target))
        if smoothing:
            loss = loss + smoothing / vocabulary * (sweep.total_weight * log_sum - flat)
        return loss

    def to_exponentials(self) -> None:
        """What `loss` leaves behind, from the statistics that it kept."""
        self.logits.sub_(self.sweep.row_max[self.tile][:, None]).exp_()

    def add_gradients(self, gradients: list[Any], upstream: torch.Tensor) -> None:
        self._to_logit_gradients(upstream.to(self.logits.dtype))
        for index, output_gradient in enumerate(self._output_gradients()):
            self._add(gradients[3 * index : 3 * index + 3], index, output_gradient)

    def _to_logit_gradients(self, upstream: torch.Tensor) -> None:
        sweep, smoothing = self.sweep, self.sweep.request.smoothing
        share = smoothing / sweep.block.vocabulary
        upstream = upstream.expand(len(self.targets))
        hit = upstream * (1 - smoothing) * self.target_weight
        normaliser = torch.exp(-sweep.log_sum[self.tile])
        self.logits.mul_(((hit + upstream * (share * sweep.total_weight)) * normaliser)[:, None])
        self.logits.scatter_add_(1, self.targets[:, None], -hit[:, None])
        if smoothing:
            weight = sweep.class_weight
            weight = torch.ones_like(self.logits[0]) if weight is None else weight
            self.logits.addr_(upstream, weight, alpha=-share)

    def _output_gradients(self) -> tuple[torch.Tensor, ...]:
        """In the dtype of the products. In 16 bits the logits do not stand beside them any longer."""
        logits = self.logits
        del self.logits
        if self.mapped is None:
            return (logits.to(self.sweep.block.projections[0].dtype),)
        gradient = logits.to(self.mapped.dtype)
        del logits
        return torch.autograd.grad(self.mapped, self.outputs, gradient)

    def _add(self, gradients: list[Any], index: int, output_gradient: torch.Tensor) -> None:
        of_hidden, of_weight, of_bias = gradients
        dtype = output_gradient.dtype
        if of_hidden is not None:
            product = output_gradient @ self.tensors[3 * index + 1]
            of_hidden.index_add_(0, self.ids, product.to(of_hidden.dtype))
        if of_weight is not None:
            hidden = self.hiddens[index].to(dtype)
            if of_weight.dtype == dtype:
                of_weight.addmm_(output_gradient.T, hidden)
            else:
                _add_product(of_weight, output_gradient, hidden)
        if of_bias is not None:
            of_bias.add_(output_gradient.sum(0))


def _add_product(sums: torch.Tensor, output_gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add `output_gradient.T @ hidden`, which is narrower than the sums, a few rows of the weight at a time."""
    num_rows = max(1, PRODUCT_BYTES // max(1, hidden.shape[1] * hidden.dtype.itemsize))
    for part, columns in zip(sums.split(num_rows), output_gradient.split(num_rows, dim=1), strict=True):
        part.add_(columns.T @ hidden)
