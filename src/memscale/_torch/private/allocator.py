"""The accelerator's caching allocator: what it has handed out, and its settings.

Relies on: the statistics of the accelerator's allocator, and the function that sets `PYTORCH_ALLOC_CONF` anew.
"""

from __future__ import annotations

import torch


def allocator_bytes(device_index: int) -> tuple[int, int] | None:
    """What the accelerator's allocator has handed out, now and at most; None where it does not count.

    What `torch.accelerator.memory_allocated` and `max_memory_allocated` say, at once and for a tenth of the time.
    """
    try:
        if not torch._C._accelerator_isAllocatorInitialized():
            return None
        counted = torch._C._accelerator_getDeviceStats(device_index)["allocated_bytes"]["all"]
    except RuntimeError:  # the backend has no allocator of PyTorch's kind
        return None
    return int(counted["current"]), int(counted["peak"])


def set_allocator_settings(text: str) -> None:
    """Change what this text names of `PYTORCH_ALLOC_CONF`, also after memory was allocated; the rest stays as it is."""
    torch._C._accelerator_setAllocatorSettings(text)
