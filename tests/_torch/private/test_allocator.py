"""Says when a PyTorch release changes what `_torch/private/allocator.py` relies on."""

from __future__ import annotations

import pytest
import torch

import simgpu  # noqa: F401  (registers the device)
from memscale._torch import private


def test_bytes_of_the_allocator_are_those_that_the_public_functions_show() -> None:
    held = torch.ones(1000, device="simgpu")
    index = torch.accelerator.current_device_index()
    counted = private.allocator_bytes(index)
    assert counted == (torch.accelerator.memory_allocated(index), torch.accelerator.max_memory_allocated(index))
    del held


def test_allocator_settings_can_be_set_at_any_time() -> None:
    private.set_allocator_settings("expandable_segments:True,large_segment_size_mb:12")
    private.set_allocator_settings("expandable_segments:False,large_segment_size_mb:20")
    with pytest.raises(ValueError, match="large_segment_size_mb"):
        private.set_allocator_settings("large_segment_size_mb:10")
