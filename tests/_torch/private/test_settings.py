"""Says when a PyTorch release changes what `_torch/private/settings.py` relies on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from memscale._torch import private

pytestmark = pytest.mark.unit


@contextlib.contextmanager
def _set(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


CHANGES: dict[str, Callable[[], Any]] = {
    "default type": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: torch.device("meta"),
    "deterministic algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "precision of products": lambda: _set(torch.set_float32_matmul_precision, "high", "highest"),
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "threads": lambda: _set(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_was_changed_is_seen(name: str) -> None:
    before = private.settings_now()
    with CHANGES[name]():
        assert private.settings_now() != before
    assert private.settings_now() == before


def test_weights_that_a_loop_caches_wait_outside() -> None:
    part = nn.Linear(2, 2)
    parametrize.register_parametrization(part, "weight", nn.Tanh())
    with parametrize.cached():
        kept = part.weight
        with private.parametrized_anew():
            assert part.weight is part.weight
            assert part.weight is not kept
        assert part.weight is kept


def test_parametrized_weights_are_those_that_a_loop_had_cached_then() -> None:
    part = nn.Linear(2, 2)
    parametrize.register_parametrization(part, "weight", nn.Tanh())
    before = private.cached_weights()
    with parametrize.cached():
        nothing, kept, something = private.cached_weights(), part.weight, private.cached_weights()
        with private.parametrized_as(before):
            assert part.weight is not part.weight
        with private.parametrized_as(nothing):
            assert part.weight is part.weight
            assert part.weight is not kept
        assert part.weight is kept
    with private.parametrized_as(something):
        assert part.weight is kept
    assert private.cached_weights() is None
