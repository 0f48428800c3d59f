"""Puts the kernels of `device_kernels.py` in the place of PyTorch's, in this thread and for as long as is asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.nn.functional as F

from memscale._profile.device_kernels import (
    GpuKernels,
    LinearAsTrained,
    efficient_attention,
    fused_dropout,
    fused_rms_norm,
    nothing_packed,
)
from memscale._torch.interception import replaced_in_this_thread


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Dropout, attention and RMS norm save what a CUDA card saves, also where a checkpoint recomputes.

    NOTE [modes end at backward]: the autograd engine runs without the function modes of its caller, so a recompute
    would take the CPU's kernels. There the names in `torch.nn.functional` are what is found; elsewhere the mode also
    reaches those who imported the functions before. Other threads, which may train meanwhile, find what they always
    found: a rehearsal and its backward stay in one thread.
    """
    with (
        GpuKernels(),
        replaced_in_this_thread(
            F, dropout=fused_dropout, scaled_dot_product_attention=efficient_attention, rms_norm=fused_rms_norm
        ),
    ):
        yield


@contextlib.contextmanager
def linear_as_trained(linear: LinearAsTrained) -> Iterator[None]:
    """Linear layers allocate what they allocate in a real step. See NOTE [biases in place]."""
    with replaced_in_this_thread(F, linear=linear):
        yield


@contextlib.contextmanager
def sequences_unpacked() -> Iterator[None]:
    """`transformers` takes batches without position ids for unpacked, as it would with real tensors."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    with replaced_in_this_thread(masking, find_packed_sequence_indices=nothing_packed):
        yield
