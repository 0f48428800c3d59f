"""What CUDA kernels of PyTorch allocate and free inside themselves: it never shows as a tensor, and the cache keeps it.

    KernelTemporaries(hardware).inside(torch.ops.aten.sum.dim_IntList, args, result)        # [12582912, 24]

A sum over the rows of a matrix (the gradient of every bias) is split over blocks of threads where it is long, and these
meet in a buffer of device memory. How large that is follows from the launch, which follows from the shape and from how
many multiprocessors the card has: the rules are those of `aten/src/ATen/native/cuda/Reduce.cuh` of torch 2.13, written
anew. Sizes were compared with what PyTorch's own allocator was asked for on the emulated card.

NOTE [workspaces of convolutions]: cuDNN does not publish them. Its kernels want channels last and copy what lies
otherwise, so the tensors that do are counted: an estimate, and the emulated card makes the same one. Convolutions of
one channel a group are PyTorch's own kernels, and need none.

Not known here: other workspaces of cuDNN, and other libraries.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memscale._hardware import Hardware

_aten = torch.ops.aten
_SUMS = frozenset((_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim, _aten.mean.default))
_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES, _MAX_VALUES = 16, 256
"""That a thread adds up."""
_INPUT_VECTOR = 4
_SEMAPHORE_BYTES = 4


class KernelTemporaries:
    """Of one card."""

    def __init__(self, hardware: Hardware) -> None:
        self._num_multiprocessors = hardware.num_multiprocessors
        self._threads_each = threads_of(hardware.architecture)

    def inside(self, func: Any, args: tuple[Any, ...], result: Any) -> list[int]:
        """The bytes that this call allocates, all at once, and frees before it returns."""
        if func in _SUMS and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor):
            return self._of_sum(args[0], result)
        if func in (_aten.convolution.default, _aten.convolution_backward.default):
            return _of_convolution(args, result)
        return []

    def _of_sum(self, summed: torch.Tensor, result: torch.Tensor) -> list[int]:
        """Of one over the rows of a matrix, which are far apart; and of one over everything."""
        num_outputs, num_inputs = result.numel(), summed.numel()
        if not num_outputs or num_inputs // num_outputs < 2 or not summed.is_contiguous():
            return []
        is_over_all = num_outputs == 1
        if not is_over_all and not _keeps_last(summed, result):
            return []  # along the rows: one block of threads a row
        return self._staging(num_outputs, num_inputs // num_outputs, summed.dtype.itemsize, is_over_all)

    def _staging(self, num_outputs: int, per_output: int, itemsize: int, is_over_all: bool) -> list[int]:
        vector = 1 if is_over_all else _output_vector(num_outputs)
        most = _MAX_THREADS // vector
        if is_over_all:
            dim0, dim1 = per_output // (_INPUT_VECTOR if per_output > 128 else 1), 1
        else:
            dim0, dim1 = num_outputs // vector, per_output
        width, height = _block(dim0, dim1, most)
        values = -(-per_output // (width if is_over_all else 1))
        splits_warps = values >= min(16 * height, _MAX_VALUES)
        if not splits_warps:
            return []
        values = -(-values // height)
        grid = -(-(num_outputs // vector) // (1 if is_over_all else width))
        wanted = self._num_multiprocessors * (self._threads_each // (width * height))
        if values < _MAX_VALUES or grid > wanted:
            return []
        num_blocks = max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
        if num_blocks < 2:
            return []
        accumulated = max(4, itemsize)
        beside = 1 if is_over_all else width * vector
        return [accumulated * num_outputs * num_blocks * beside, _SEMAPHORE_BYTES * grid]


def _of_convolution(args: tuple[Any, ...], result: Any) -> list[int]:
    """See NOTE [workspaces of convolutions]. Of backward, the larger of both its kernels'."""
    if isinstance(result, torch.Tensor):
        kernels, weight, groups = [(args[0], args[1], result)], args[1], args[8]
    else:
        gradient, input, weight, groups = *args[:3], args[9]
        of_input, of_weight = result[:2]
        kernels = [(gradient, weight, of_input)] if of_input is not None else []
        kernels += [(gradient, input, of_weight)] if of_weight is not None else []
    if groups == weight.shape[0] > 1:
        return []
    num_bytes = max((sum(map(_bytes_to_turn, tensors)) for tensors in kernels), default=0)
    return [num_bytes] if num_bytes else []


def _bytes_to_turn(tensor: torch.Tensor) -> int:
    """Of a tensor whose channels do not come last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return 0 if is_last else tensor.numel() * tensor.element_size()


def threads_of(architecture: str) -> int:
    """That a multiprocessor can hold."""
    return {"sm_75": 1024, "sm_70": 2048, "sm_80": 2048, "sm_90": 2048, "sm_100": 2048}.get(architecture, 1536)


def _keeps_last(summed: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether the last dimension is kept and all before it are summed."""
    return summed.dim() > 1 and result.numel() == summed.shape[-1]


def _output_vector(num_outputs: int) -> int:
    return next(size for size in (4, 2, 1) if num_outputs % size == 0)


def _block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    wide, high = (most if size >= most else 1 << int(math.log2(max(1, size))) for size in (dim0, dim1))
    width = min(wide, _WARP)
    height = min(high, most // width)
    return min(wide, most // height), height
