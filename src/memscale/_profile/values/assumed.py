"""What is assumed where nothing is known: which candidate has the highest score, how many elements a mask shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memscale._profile.values.carried import Cell, assume_value, is_small, set_value, value_of
from memscale._torch import private

_aten = torch.ops.aten


def _assume_highest(result: Any, scores: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
    _choose(result[1], scores.shape[dim] if scores.dim() else 1, dim, k)


def _assume_sorted(result: Any, scores: torch.Tensor, dim: int = -1, *_: Any, **kwargs: Any) -> None:
    dim = kwargs.get("dim", dim)
    num_candidates = scores.shape[dim] if scores.dim() else 1
    _choose(result[1], num_candidates, dim, num_candidates)


def _assume_best(result: Any, scores: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
    """The index of a maximum or minimum, with its value or alone."""
    indices = result if isinstance(result, torch.Tensor) else result[1]
    _choose(indices, scores.numel() if dim is None or not scores.dim() else scores.shape[dim], None, 1)


def _assume_drawn(result: torch.Tensor, chances: torch.Tensor, num_samples: int, *_: Any, **__: Any) -> None:
    if num_samples <= chances.shape[-1]:
        _choose(result, chances.shape[-1], -1, num_samples)


def _choose(indices: torch.Tensor, num_candidates: int, dim: int | None, num_chosen: int) -> None:
    """Every candidate is chosen by some row, as long as there are rows; all other rows choose the first ones."""
    if not is_small(indices) or not indices.numel():
        return
    shape = list(indices.shape)
    with private.real_tensors():
        starts = torch.arange(indices.numel() // num_chosen) * num_chosen
        starts = torch.where(starts < num_candidates, starts.clamp(max=num_candidates - num_chosen), 0)
        chosen = starts.unsqueeze(1) + torch.arange(num_chosen)
        if dim is not None and shape:
            last = [*shape[: dim % len(shape)], *shape[dim % len(shape) + 1 :], num_chosen]
            chosen = chosen.reshape(last).movedim(-1, dim)
        set_value(indices, chosen.reshape(shape).contiguous(), Cell())


def _assume_false(result: torch.Tensor, *_: Any, **__: Any) -> None:
    with private.real_tensors():
        set_value(result, torch.zeros((), dtype=result.dtype).expand(tuple(result.shape)), Cell())


def _assume_finite(result: torch.Tensor, number: torch.Tensor, other: Any, *_: Any, **__: Any) -> None:
    """`x == x` and `x != inf`: this is how it is asked whether a number is finite."""
    if number is other or (isinstance(other, float) and other == math.inf):
        with private.real_tensors():
            set_value(result, torch.ones((), dtype=result.dtype).expand(tuple(result.shape)), Cell())


ASSUMPTIONS: dict[Any, Callable[..., None]] = {
    _aten.topk.default: _assume_highest,
    _aten.sort.default: _assume_sorted,
    _aten.sort.stable: _assume_sorted,
    _aten.max.dim: _assume_best,
    _aten.min.dim: _assume_best,
    _aten.argmax.default: _assume_best,
    _aten.argmin.default: _assume_best,
    _aten.multinomial.default: _assume_drawn,
    _aten.isnan.default: _assume_false,
    _aten.isinf.default: _assume_false,
    _aten.eq.Tensor: _assume_finite,
    _aten.ne.Scalar: _assume_finite,
}
"""Operators whose integer results say which float is the highest, or whether one is broken."""


def _found(func: Any, mask: torch.Tensor) -> torch.Tensor:
    """`nonzero` of an unknown mask: everything is found, and the mask is true from here on."""
    assume_value(mask, 1)
    found = torch.empty((mask.numel(), mask.dim()), dtype=torch.long, device=mask.device)
    if is_small(found):
        with private.real_tensors():
            set_value(found, torch.ones(tuple(mask.shape), dtype=torch.bool).nonzero(), Cell())
    return found


def _indexed(func: Any, source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """An index with masks: as many rows as they show, or may show at most."""
    numbers: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            numbers.append(index)
        else:
            shape = (_num_chosen(index),)
            numbers += [torch.empty(shape, dtype=torch.long, device=source.device) for _ in range(index.dim())]
    result: torch.Tensor = func(source, numbers)
    return result


def _selected(func: Any, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    num_repeats = torch.broadcast_shapes(source.shape, mask.shape).numel() // max(1, mask.numel())
    return torch.empty((_num_chosen(mask) * num_repeats,), dtype=source.dtype, device=source.device)


def _num_chosen(mask: torch.Tensor) -> int:
    value = value_of(mask)
    if value is None:
        assume_value(mask, 1)
        return mask.numel()
    with private.real_tensors():
        return int(value.real.count_nonzero())


def _ctc_loss(func: Any, scores: torch.Tensor, targets: torch.Tensor, *lengths: Any, **_: Any) -> Any:
    """The loss of each sequence, and a table over time and the longest target with a blank around every token."""
    value = value_of(lengths[1])
    if value is None:
        return NotImplemented
    with private.real_tensors():
        longest = max(value.real.tolist(), default=0)
    num_steps, num_sequences = scores.shape[:2]
    return scores.new_empty((num_sequences,)), scores.new_empty((num_sequences, num_steps, 2 * longest + 1))


SHAPED_BY_VALUES: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _found,
    _aten.index.Tensor: _indexed,
    _aten.masked_select.default: _selected,
    _aten._ctc_loss.Tensor: _ctc_loss,
}
"""What is answered where not all arguments are known; of a mask of which nothing is known, the most there can be."""
