"""Uniform random draws: a rehearsal chooses whether they give the highest number, one in the middle or the lowest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HIGHEST_DRAW, MIDDLE_DRAW, LOWEST_DRAW = 1.0 - 2.0**-10, 0.5, 2.0**-10
"""A number inside of the interval in every dtype: a probability of 0 or 1 stays certain."""

_aten = torch.ops.aten


def is_luck(func: Any) -> bool:
    """Whether the operator draws random numbers that a rehearsal cannot choose."""
    return func not in DRAWS and torch.Tag.nondeterministic_seeded in func.tags


def _uniform(share: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`rand` and `rand_like`."""
    is_like = isinstance(args[0], torch.Tensor)
    dtype = kwargs.get("dtype") or (args[0].dtype if is_like else torch.get_default_dtype())
    return torch.full(args[0].shape if is_like else args[0], share, dtype=dtype)


def _uniform_in_place(share: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    start, end = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
    drawn: torch.Tensor = args[0].fill_(start + (end - start) * share)
    return drawn


def _coin(share: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`bernoulli` in its forms: what may fall either way falls on 1, or on 0."""
    chances = args[0] if func is _aten.bernoulli.default else torch.as_tensor(args[1] if len(args) > 1 else 0.5)
    fallen = (chances > 0) if share >= MIDDLE_DRAW else (chances >= 1)
    target: torch.Tensor = args[0] if func._schema.is_mutable else torch.empty_like(args[0])
    return target.copy_(fallen.expand(target.shape))


DRAWS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.rand.default: _uniform,
    _aten.rand.generator: _uniform,
    _aten.rand_like.default: _uniform,
    _aten.uniform_.default: _uniform_in_place,
    _aten.bernoulli.default: _coin,
    _aten.bernoulli.p: _coin,
    _aten.bernoulli_.float: _coin,
    _aten.bernoulli_.Tensor: _coin,
}
