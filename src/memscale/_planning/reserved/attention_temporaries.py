"""What backward of fused attention allocates and frees inside itself, by kernel, type, width of a head and card.

    groups(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, args, "sm_86")

The memory-efficient kernel adds up gradients of queries tile by tile in a workspace, and those of keys and values as
well where heads are wide and in 16 bits. How large its tiles are depends on what fits the shared memory of a
multiprocessor. The flash kernel adds up gradients of queries in single precision. Both copy gradients that do not lie
as they need them.

The sizes are those that PyTorch 2.13 asks its allocator for on the emulated card, where its own host code runs: on
cards with much shared memory, with little, and on one before sm_80.

NOTE [deterministic attention]: with `torch.use_deterministic_algorithms` kernels do not split the work, and may need
more or less than this. That is not modelled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from memscale._units import round_up

_aten = torch.ops.aten
EFFICIENT = _aten._scaled_dot_product_efficient_attention_backward.default
FLASH = _aten._scaled_dot_product_flash_attention_backward.default

_FLOAT_BYTES = 4
_LARGE_SHARED_MEMORY = frozenset(("sm_80", "sm_90", "sm_100"))
"""Architectures with 160 KiB and more a multiprocessor; others have 64 to 100."""
_KEYS_A_TILE = 64
_MOST_SPLITS = 200
_HEADER_BYTES = 16
"""The lock and the counter of each tile in the workspace."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """How a memory-efficient kernel goes over queries."""

    rows: int
    columns: int
    sums_keys: bool = False
    """Whether gradients of keys and values are added up in the workspace, too."""


def groups(func: Any, args: tuple[Any, ...], architecture: str) -> list[tuple[int, ...]]:
    """What is allocated and freed, one group after the other; a group is there at once. () for other operators."""
    if func is EFFICIENT:
        gradient, query, key, value, *_ = args
        return _of_efficient(gradient, query, key, value, architecture)
    return _of_flash(args[0], args[1], args[4]) if func is FLASH else []


def _of_efficient(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, architecture: str
) -> list[tuple[int, ...]]:
    batch, heads, length, width = query.shape
    sums_bytes = batch * heads * length * _FLOAT_BYTES
    copied = _copied(gradient)
    tiles = _tiles(query, max(width, value.shape[-1]), architecture)
    workspace_bytes = batch * heads * _workspace_bytes(tiles, query, key, value)
    last = (*copied, sums_bytes, workspace_bytes)
    if query.element_size() < _FLOAT_BYTES:
        return [last]
    turned = (sums_bytes,) if heads > 1 and length > 1 else ()
    return [(*copied, gradient.numel() * _FLOAT_BYTES, sums_bytes, *turned), last]


def _tiles(query: torch.Tensor, width: int, architecture: str) -> _Tiles:
    is_large, is_half = architecture in _LARGE_SHARED_MEMORY, query.element_size() < _FLOAT_BYTES
    if width <= 64:
        return _Tiles(64, 64)
    if not is_half:
        return _Tiles(128 if is_large else 64, 64)
    if width > 128:
        return _Tiles(128, 64, sums_keys=True)
    if is_large:
        return _Tiles(128, 128)
    is_old = architecture in ("sm_70", "sm_75")
    return _Tiles(128, 64) if width <= 96 or is_old else _Tiles(64, 64, sums_keys=True)


def _workspace_bytes(tiles: _Tiles, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """The workspace for one head of one example."""
    batch, heads, length, width = query.shape
    num_tiles = -(-length // tiles.rows) * -(-width // tiles.columns)
    num_bytes = num_tiles * (_HEADER_BYTES + tiles.rows * tiles.columns * _FLOAT_BYTES)
    if not tiles.sums_keys:
        return num_bytes
    num_splits = max(1, min(-(-key.shape[2] // _KEYS_A_TILE), _MOST_SPLITS // (batch * heads)))
    widths = sum(round_up(tensor.shape[-1], tiles.rows) for tensor in (key, value))
    return num_bytes + num_splits * _KEYS_A_TILE * widths * _FLOAT_BYTES


def _of_flash(gradient: torch.Tensor, query: torch.Tensor, output: torch.Tensor) -> list[tuple[int, ...]]:
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, 128)
    columns = round_up(width, 32 if width <= 128 else 64)
    return [(*_copied(gradient), *_copied(output), rows * _FLOAT_BYTES, rows * columns * _FLOAT_BYTES)]


def _copied(tensor: torch.Tensor) -> tuple[int, ...]:
    """The bytes of the copy, if the tensor does not lie head beside head, as kernels want it."""
    return () if tensor.transpose(1, 2).is_contiguous() else (tensor.numel() * tensor.element_size(),)
