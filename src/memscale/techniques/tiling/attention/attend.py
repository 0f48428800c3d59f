"""The product of lazy scores with the values: through a fused kernel, or by tiles of queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from memscale._torch import private
from memscale.techniques.tiling.attention.scores import CASTS, SOFTMAX, Drop, Slot, Step, Steps, replay
from memscale.techniques.tiling.common import autocast_now

_FURTHEST = 100.0
"""Single precision keeps five digits of a logarithm that is added to such a number."""


def attend(steps: Steps, values: torch.Tensor, rows: int) -> torch.Tensor:
    """The product of these scores with the values."""
    steps.check_unchanged()
    fused = _fused_arguments(steps, values)
    if fused is not None and not _hides_whole_rows(fused[1]):
        scale, mask = fused
        return F.scaled_dot_product_attention(
            steps.queries, steps.keys.transpose(-2, -1), values, attn_mask=mask, scale=scale
        )
    run = _Run(steps, rows, values.device.type)
    output: torch.Tensor = _TiledProduct.apply(run, steps.queries, steps.keys, values, *steps.arguments)  # type: ignore[no-untyped-call]
    return output


def _hides_whole_rows(mask: torch.Tensor | None) -> bool:
    """Whether some query sees no key at all, or only far away from 0.

    A fused backward gets the weights back from the logarithm of their sum, which next to such a mask has no digits.
    """
    if mask is None:
        return False
    furthest = mask.detach().amax(-1).abs_().amax()
    return _has_value(furthest) and bool(furthest > _FURTHEST)


def _has_value(tensor: torch.Tensor) -> bool:
    return not private.is_fake(tensor) and tensor.device.type != "meta"


def _fused_arguments(steps: Steps, values: torch.Tensor) -> tuple[float, torch.Tensor | None] | None:
    """(scale, mask) when the steps are a scale, additive masks that need no gradient, and a softmax; else None."""
    scale, mask, softmaxed = 1.0, None, False
    if steps.queries.dim() != 4 or values.dtype != steps.queries.dtype:
        return None
    for step in steps.steps:
        if isinstance(step, Drop):
            return None
        number = _number(step)
        if step.name in CASTS:
            continue
        if softmaxed:
            return None
        if step.name in SOFTMAX:
            softmaxed = True
        elif number is not None and step.name in ("mul", "__mul__", "__rmul__", "div", "__truediv__"):
            factor = number if step.name in ("mul", "__mul__", "__rmul__") else 1 / number
            scale, mask = scale * factor, None if mask is None else mask * factor
        elif step.name in ("add", "__add__", "__radd__") and (added := _float_mask(step, steps)) is not None:
            mask = added if mask is None else mask + added
        else:
            return None
    return scale, mask


def _number(step: Step) -> float | None:
    """The only argument, if it is a number."""
    is_one = len(step.args) == 1 and not step.kwargs and isinstance(step.args[0], int | float)
    return float(step.args[0]) if is_one and not (step.position == 1 and "div" in step.name) else None


def _float_mask(step: Step, steps: Steps) -> torch.Tensor | None:
    """The only argument, if it is an additive mask that a fused kernel takes."""
    if len(step.args) != 1 or step.kwargs or not isinstance(step.args[0], Slot):
        return None
    mask = steps.arguments[step.args[0].index]
    fits = mask.dtype == steps.queries.dtype and mask.dim() in (2, 4)
    return mask if fits and not mask.requires_grad else None


class _Run:
    """One attention in tiles of queries. See NOTE [steps hold no tensors]."""

    def __init__(self, steps: Steps, rows: int, device_type: str) -> None:
        self.steps, self.rows = steps.steps, rows
        self.num_queries = steps.queries.shape[-2]
        self.autocast = autocast_now(device_type)

    def tiles(self) -> list[slice]:
        return [slice(a, min(a + self.rows, self.num_queries)) for a in range(0, self.num_queries, self.rows)]

    def part(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        """What a tile of queries sees of an argument."""
        is_per_query = tensor.dim() >= 2 and tensor.shape[-2] == self.num_queries
        return tensor[..., rows, :] if is_per_query else tensor

    def cut(self, tensors: Sequence[Any], rows: slice) -> list[Any]:
        """The part of queries, keys, values and arguments that belongs to a tile."""
        queries, keys, values, *arguments = tensors
        return [
            None if queries is None else queries[..., rows, :],
            keys,
            values,
            *(None if argument is None else self.part(argument, rows) for argument in arguments),
        ]

    def compute(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        queries, keys, values, *arguments = tensors
        with torch.autocast(**self.autocast):
            return torch.matmul(replay(self.steps, queries, keys, arguments), values)


class _TiledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Any) -> Any:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        output: Any = None
        for rows in run.tiles():
            piece = run.compute(run.cut(tensors, rows))
            if output is None:
                output = piece.new_empty((*piece.shape[:-2], run.num_queries, piece.shape[-1]))
            output[..., rows, :] = piece
            del piece
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        run, saved, needs = ctx.run, ctx.saved_tensors, ctx.needs_input_grad[1:]
        totals = [torch.zeros_like(t) if need else None for t, need in zip(saved, needs, strict=True)]
        for rows in run.tiles():
            found = iter(_tile_gradients(run, run.cut(saved, rows), needs, gradient[..., rows, :]))
            for target in run.cut(totals, rows):
                piece = next(found) if target is not None else None
                if piece is not None:
                    target.add_(piece)
            del found, target, piece
        return (None, *totals)


def _tile_gradients(run: _Run, tensors: list[Any], needs: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of what needs them, for one tile, on detached stand-ins."""
    stand_ins = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    with torch.enable_grad():
        output = run.compute(stand_ins)
    wanted = [t for t in stand_ins if t.requires_grad]
    return torch.autograd.grad(output, wanted, gradient, allow_unused=True)
