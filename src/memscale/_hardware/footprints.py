"""What CUDA and its libraries take of a card beside tensors, as data: by architecture, each figure with its source.

    footprint_of("sm_86").workspace_bytes       # 8519680

Two things are not tensors and count all the same. The *context* is what the driver holds for a process as soon as that
uses the card; PyTorch's allocator never sees it. The *workspace* is memory that cuBLAS takes from PyTorch's allocator
for each thread that multiplies matrices, for good: training has two such threads, that of the forward and that of the
backward. On a card that is present, what the context and others hold is read from the card itself
(`Hardware.held_bytes`), and the context's figure here is only shown beside it.

Add an architecture by adding a row to `FOOTPRINTS`.
"""

from __future__ import annotations

import dataclasses
import re

from memscale._units import MIB

_SMALL_WORKSPACE_BYTES = 2 * 4 * MIB + 8 * 16 * 1024
"""cuBLAS's `:4096:2:16:8`: two buffers of 4 MiB and eight of 16 KiB."""
_WORKSPACES = "aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.13"
_CONTEXT_OF_2022 = 287_047_680
_CONTEXT_OF_ADA = 426 * MIB
_LAZY = "pytorch#86509: after one tensor, kernels loaded lazily (CUDA 11.7 and later); the card is not named"
_ADA = "unsloth-zoo#1053: RTX 6000 Ada, torch 2.10 with CUDA 13.0"


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """The figures of one architecture."""

    architecture: str
    """The first compute capability that this is said of, as "sm_80"; or how an AMD architecture begins."""
    context_bytes: int
    context_source: str
    workspace_bytes: int
    """A thread that multiplies matrices."""
    workspace_source: str


FOOTPRINTS: tuple[Footprint, ...] = (
    Footprint("sm_50", _CONTEXT_OF_2022, _LAZY, _SMALL_WORKSPACE_BYTES, _WORKSPACES),
    Footprint("sm_80", _CONTEXT_OF_2022, _LAZY, _SMALL_WORKSPACE_BYTES, f"{_WORKSPACES}; measured here by emucuda"),
    Footprint("sm_89", _CONTEXT_OF_ADA, _ADA, _SMALL_WORKSPACE_BYTES, _WORKSPACES),
    Footprint("sm_90", _CONTEXT_OF_ADA, f"assumed as sm_89's ({_ADA})", 32 * MIB, _WORKSPACES),
    Footprint("sm_100", _CONTEXT_OF_ADA, f"assumed as sm_89's ({_ADA})", 32 * MIB, f"{_WORKSPACES}; pytorch#175344"),
    Footprint("gfx", _CONTEXT_OF_ADA, f"assumed as sm_89's ({_ADA})", 32 * MIB, _WORKSPACES),
    Footprint("gfx94", _CONTEXT_OF_ADA, f"assumed as sm_89's ({_ADA})", 128 * MIB, _WORKSPACES),
    Footprint("gfx95", _CONTEXT_OF_ADA, f"assumed as sm_89's ({_ADA})", 128 * MIB, _WORKSPACES),
)
"""NVIDIA's in the order of compute capabilities: a card has the figures of the last row that is not above it."""


def footprint_of(architecture: str) -> Footprint:
    """The row for this architecture ("sm_86", "gfx942"); the newest of NVIDIA's for one that is not known."""
    known = re.fullmatch(r"sm_(\d+)", architecture)
    if known is not None:
        rows = [row for row in FOOTPRINTS if row.architecture.startswith("sm_") and _number(row) <= int(known[1])]
        return rows[-1] if rows else FOOTPRINTS[0]
    alike = [row for row in FOOTPRINTS if architecture.startswith(row.architecture)]
    newest = [row for row in FOOTPRINTS if row.architecture.startswith("sm_")][-1]
    return max(alike, key=lambda row: len(row.architecture), default=newest)


def _number(row: Footprint) -> int:
    return int(row.architecture.removeprefix("sm_"))
