"""What the environment says about PyTorch's caching allocator, and what a plan may ask of it here. Needs no torch."""

from __future__ import annotations

import os
import sys

SMALL_PAGES = "expandable_segments:True,large_segment_size_mb:12"
"""What plans ask for: segments that grow in pages of 12 MiB, the smallest even number that PyTorch takes. The smaller
they are, the fewer are held by the little that lives on in them."""


def own_settings() -> str:
    """What the user has set for PyTorch's allocator by the environment; "" for nothing."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def may_switch() -> bool:
    """Whether segments could grow page by page here, and the user has said nothing about the allocator."""
    return sys.platform == "linux" and not own_settings()


def growing_segments() -> str:
    """Whether plans ask for segments that grow page by page, and why not, for people."""
    if own_settings():
        return "plans ask for none: the settings above are yours, and stay"
    if not may_switch():
        return f"plans ask for none: PyTorch has none on {sys.platform}"
    return f"plans that must be low ask for {SMALL_PAGES} while they are attached"
