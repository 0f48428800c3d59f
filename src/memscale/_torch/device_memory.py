"""What a card holds in all, for this process and others."""

from __future__ import annotations

import torch


def total_peak_bytes() -> int:
    """The highest that the accelerator showed as used: this process's reserved peak, and what it cannot have, which is
    its context and what others hold. That part is read now: nobody keeps its peak."""
    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    others_bytes = max(0, total_bytes - free_bytes - torch.accelerator.memory_reserved())
    return int(torch.accelerator.max_memory_reserved() + others_bytes)
