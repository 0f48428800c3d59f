"""What PyTorch keeps for a process, or a thread, that decides which numbers a computation gives.

Relies on: the functions by which `torch.backends` reads its settings, the mode that a default device is, and the table
of `parametrize.cached()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

_QUESTIONS = (
    "_get_deterministic_algorithms", "_get_deterministic_fill_uninitialized_memory", "_get_float32_matmul_precision",
    "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction", "_get_sdp_priority_order", "_get_cudnn_enabled",
    "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32", "_get_mkldnn_enabled",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
)  # fmt: skip
_ASKED = tuple(getattr(torch._C, name) for name in _QUESTIONS if hasattr(torch._C, name))


def settings_now() -> tuple[Any, ...]:
    """To be compared with what it was: the default type and devices, precision, and which kernels may be used."""
    return (torch.get_default_dtype(), torch.get_num_threads(), _default_devices(), *(ask() for ask in _ASKED))


def _default_devices() -> tuple[torch.device, ...]:
    if not torch._C._len_torch_function_stack():
        return ()
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return tuple(mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext))


@contextlib.contextmanager
def parametrized_anew() -> Iterator[None]:
    """Inside, weights that `parametrize.cached()` has kept are not used, and what is kept there is gone afterwards."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


def cached_weights() -> dict[Any, Any] | None:
    """What `parametrize.cached()` keeps now; None: it keeps nothing, as nobody is inside of it."""
    return dict(parametrize._cache) if parametrize._cache_enabled else None


@contextlib.contextmanager
def parametrized_as(then: dict[Any, Any] | None) -> Iterator[None]:
    """Inside, parametrized weights are computed or taken as they were then; what is kept now stays as it is.

    The table is that of the process: where nothing was kept and nothing is, other threads see no change of it.
    """
    if then is None and not parametrize._cache_enabled:
        yield
        return
    before = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = dict(then or {}), int(then is not None)
    try:
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = before
