"""Cross-entropy of lazy logits, tile by tile: neither the logits nor their gradient ever exist whole.

When the loss is one number, the gradients of hidden states and weights are formed together with it, in forward: three
products a tile, as many as the plain path computes. A second backward, a loss a row, or half precision (whose upstream
scale must come before rounding) make them in backward, at a fourth product. See `sweep.py` for the tiles themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from memscale._torch import private
from memscale.techniques.tiling.head.lazy import LazyLogits, plain, same
from memscale.techniques.tiling.head.recipe import Block, Map
from memscale.techniques.tiling.head.sweep import Request, Rows, Sweep, wide


class _TiledLoss(torch.autograd.Function):
    """The loss as autograd sees it: a function of the logits, and of what they are made of.

    The gradient goes to hidden states and weights, and none to the logits; or, when someone has asked for the
    logits' own since, to the logits and on along the ordinary graph. See NOTE [two paths].
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, sweep: Sweep, *tensors: Any) -> Any:
        ctx.sweep = sweep
        ctx.save_for_backward(*tensors)
        request = sweep.request
        needs = list(ctx.needs_input_grad[2:])
        halves = any(p.dtype == torch.float16 for p in request.block.projections)
        early = request.reduction != "none" and any(needs) and not halves
        losses, ctx.early = sweep.losses(tensors, needs if early else None)
        if request.reduction == "none":
            return torch.empty_like(losses).index_copy_(0, sweep.rows.order, losses)
        return losses.sum() * sweep.scale

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        tensors, sweep, needs = ctx.saved_tensors, ctx.sweep, list(ctx.needs_input_grad[2:])
        early, ctx.early = ctx.early, None  # handed over: a second backward makes them anew
        if not private.keeps_graph():
            ctx.sweep = None  # a loss that lives on holds no hidden states, as no plain one does
        if sweep.request.logits.block.family.touched:
            return (_logit_gradient(sweep.request, gradient), None, *[None] * len(tensors))
        if torch.is_grad_enabled():
            with sweep.block.weights_present():
                return (None, None, *_differentiable(sweep, tensors, needs, gradient))
        if early is not None:
            found = [each if each is None else each.mul_(gradient) for each in early]
        else:
            upstream = gradient[sweep.rows.order] if gradient.dim() else gradient * sweep.scale
            found = sweep.gradients(tensors, needs, upstream)
        return (None, None, *(g if g is None else g.to(t.dtype) for g, t in zip(found, tensors, strict=True)))


def _logit_gradient(request: Request, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the logits themselves, whole, as the plain path has it; in a double backward it has a graph."""
    again = torch.is_grad_enabled()
    logits = plain(request.logits) if again else request.logits.value().detach().requires_grad_()
    with torch.enable_grad():
        loss = request.plain_loss(logits)
        upstream = gradient.view_as(loss).to(loss.dtype)
        found: torch.Tensor = torch.autograd.grad(loss, logits, upstream, create_graph=again)[0]
    return found


def _differentiable(sweep: Sweep, tensors: Any, needs: list[bool], gradient: torch.Tensor) -> list[Any]:
    """Gradients that can be differentiated again: through the plain path, at its price."""
    request = sweep.request
    # Aliases: the derivative with respect to each alone, not through the hidden states to a tied weight.
    tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    logits = request.block.compute(tensors, request.logits.row_ids().reshape(-1))
    target = request.target.reshape(-1)
    loss = dataclasses.replace(request, target=target, is_nll=False).plain_loss(logits)
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
    found = iter(torch.autograd.grad(loss, wanted, gradient.view_as(loss).to(loss.dtype), create_graph=True))
    return [next(found) if need else None for need in needs]


# ---- what the functions of PyTorch become


def cross_entropy(
    input: LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` of lazy logits."""
    reduction = _reduction(reduction, size_average, reduce)
    if not _can_tile(input, target, weight, reduction):
        return F.cross_entropy(
            plain(input),
            plain(target),
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    return _tiled(input, input.block, target, weight, ignore_index, label_smoothing, reduction, is_nll=False)


def nll_loss(
    input: LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`F.nll_loss` of lazy log-probabilities."""
    reduction = _reduction(reduction, size_average, reduce)
    block = _before_log_softmax(input.block) if isinstance(input, LazyLogits) else None
    if block is None or not _can_tile(input, target, weight, reduction):
        return F.nll_loss(plain(input), target, weight, ignore_index=ignore_index, reduction=reduction)
    return _tiled(input, block, target, weight, ignore_index, 0.0, reduction, is_nll=True)


def gather(input: LazyLogits, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.gather` of one log-probability a row: the negative of a loss a row."""
    block = _before_log_softmax(input.block)
    vocabulary_dim = input.vocabulary_dim
    one_each = list(input.shape)
    one_each[vocabulary_dim] = 1
    is_pick = block is not None and dim % input.dim() == vocabulary_dim and list(index.shape) == one_each
    if not (is_pick and not kwargs and vocabulary_dim and input.is_traceable() and index.dtype == torch.long):
        return torch.gather(plain(input), dim, index, **kwargs)
    rows: Any = input.movedim(vocabulary_dim, -1).flatten(0, -2) if input.dim() > 2 else input
    target = index.movedim(vocabulary_dim, -1).reshape(-1)
    picked = -nll_loss(rows, target, ignore_index=-1 - input.shape[vocabulary_dim], reduction="none")
    return picked.view(input.row_shape()).unsqueeze(vocabulary_dim)


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _can_tile(logits: Any, target: Any, weight: torch.Tensor | None, reduction: str) -> bool:
    """Class indices of the right shape, no gradient to the class weights, and a recipe that may be followed."""
    return (
        isinstance(logits, LazyLogits)
        and type(target) is not LazyLogits
        and logits.vocabulary_dim == (0 if logits.dim() == 1 else 1)
        and target.dtype == torch.long
        and target.shape == torch.Size(logits.row_shape())
        and reduction in ("none", "mean", "sum")
        and (weight is None or (not weight.requires_grad and weight.shape == (logits.block.vocabulary,)))
        and logits.is_traceable()
    )


def _before_log_softmax(block: Block) -> Block | None:
    """The logits behind log-probabilities; None if this is something else."""
    expression = block.expression
    while isinstance(expression, Map) and expression.kind == "cast":
        expression = expression.inner
    if not (isinstance(expression, Map) and expression.kind == "log_softmax"):
        return None
    return block.with_(expression.inner, block.rows)


def _tiled(
    logits: LazyLogits,
    block: Block,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    reduction: Any,
    *,
    is_nll: bool,
) -> torch.Tensor:
    block.check_current()
    tile_rows = block.projections[0].tile_rows
    handle = same(logits)
    request = Request(
        handle, block, target, weight, ignore_index, smoothing, reduction, is_nll=is_nll, tile_rows=tile_rows
    )
    with torch.no_grad():
        rows = Rows(request, logits.row_ids().reshape(-1))
        sweep = Sweep(request, rows, _scale(request, rows))
    tensors = block.tensors()
    if not logits.requires_grad:
        tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    loss: torch.Tensor = _TiledLoss.apply(handle, sweep, *tensors)  # type: ignore[no-untyped-call]
    if reduction == "none":
        loss = loss.view(target.shape)
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


def _scale(request: Request, rows: Rows) -> torch.Tensor:
    one = torch.ones((), dtype=wide(request.logits.dtype), device=rows.ids.device)
    if request.reduction != "mean":
        return one
    if request.class_weight is None:
        return one / rows.num_kept if rows.num_kept else one / 0.0
    return one / request.class_weight.to(one.dtype)[rows.targets[: rows.num_kept]].sum()
