"""What CUDA kernels of PyTorch allocate and free inside themselves. It never shows as a tensor, but the cache keeps it.

    temporary_bytes(torch.ops.aten._softmax_backward_data.default, args)                # (4194304,), on every card
    KernelTemporaries(hardware).inside(torch.ops.aten.sum.dim_IntList, args, result)    # [(12582912, 24)], on this card

The rules are those of torch 2.13, written anew. Most follow from the arguments alone (`temporary_bytes`). The buffer
of a sum depends on the card: a sum over the rows of a matrix (the gradient of every bias) is split over blocks of
threads where it is long, and these blocks meet in a buffer of device memory. Its size follows from the launch, which
follows from the shape and from how many multiprocessors the card has (`aten/src/ATen/native/cuda/Reduce.cuh`). The
sizes were compared with what PyTorch's own allocator was asked for on the emulated card.

Those of attention are in `attention_temporaries.py`.

NOTE [workspaces of convolutions]: cuDNN does not publish them. Its kernels want channels last and copy what lies
otherwise, so the tensors that do are counted: an estimate, and the emulated card makes the same one. Convolutions of
one channel a group are PyTorch's own kernels, and need none.

NOTE [workspaces of transforms]: cuFFT does not publish them either; its documents say that they are mostly as large as
the transformed data. So one complex number is counted for each element, and the emulated card does the same.

Not known: other workspaces of cuDNN, the buffers of layer norm's backward, and what other libraries allocate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from memscale._hardware import Hardware
from memscale._planning.reserved import attention_temporaries

_aten = torch.ops.aten
_SUMS = frozenset((_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim, _aten.mean.default))
_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES, _MAX_VALUES = 16, 256
"""How many values one thread adds up."""
_INPUT_VECTOR = 4
_SEMAPHORE_BYTES = 4


# ---- on every card

_FEW_IDS = 3072
"""Up to so many ids an embedding's backward adds rows one by one; more are sorted first."""
_IDS_A_PART = 10
_LONGEST_ROW_SORTED_AT_ONCE = 4096
_FEW_ROWS = 128
_LONG_BYTES, _FLOAT_BYTES = 8, 4


def temporary_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[int, ...]:
    """What a CUDA kernel allocates and frees inside itself, by the rules of torch 2.13; () where we know of nothing.

    Known: backward of softmax and of group norm, of embeddings with many ids, sorting, sums of booleans, and Fourier
    transforms. The emulated card says the same to the byte.
    """
    rule = _TEMPORARIES.get(func)
    return () if rule is None else rule(*args, **(kwargs or {}))


def _of_softmax_backward(gradient: torch.Tensor, output: torch.Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """The product of both, which is then summed row by row."""
    return (gradient.numel() * gradient.element_size(),)


def _of_embedding_backward(
    gradient: torch.Tensor, ids: torch.Tensor, num_weights: int, *_: Any, **__: Any
) -> tuple[int, ...]:
    """Ids that are sorted, and for each part of a run of equal ids a row in full precision."""
    num_ids = ids.numel()
    if num_ids <= _FEW_IDS:
        return ()
    num_runs = min(num_ids, num_weights)
    num_parts = num_ids // _IDS_A_PART + num_runs
    width = gradient.shape[-1]
    item_bytes = ids.element_size()
    sorted_bytes = (num_ids * item_bytes,) * 3
    counts = (num_runs * item_bytes, num_runs * item_bytes, num_parts * item_bytes, item_bytes, item_bytes)
    return (*sorted_bytes, *counts, num_parts * width * _FLOAT_BYTES)


def _of_group_norm(
    input: torch.Tensor, weight: Any, bias: Any, num: int, channels: int, area: int, groups: int, *_: Any, **__: Any
) -> tuple[int, ...]:
    """A factor and a summand for each channel; in 16 bits, mean and deviation in full precision as well."""
    a_channel = num * channels * _FLOAT_BYTES
    a_group = num * groups * _FLOAT_BYTES if input.element_size() < _FLOAT_BYTES else 0
    return tuple(filter(None, (a_channel, a_channel, a_group, a_group)))


def _of_group_norm_backward(*args: Any, **__: Any) -> tuple[int, ...]:
    """Two sums for each channel, and for the input's gradient three factors."""
    weight, num, channels, _, groups, wanted = args[4:10]
    a_channel, a_group = num * channels * _FLOAT_BYTES, num * groups * _FLOAT_BYTES
    factors = ((a_channel,) if weight is not None else ()) + (a_group, a_group) if wanted[0] else ()
    return (a_channel, a_channel, *factors)


def _of_sort(input: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> tuple[int, ...]:
    """Short rows are sorted in place, with their positions; many long ones with copies of keys and positions."""
    if input.dim() == 0 or input.numel() == 0:
        return ()
    length = input.shape[dim]
    if length <= _LONGEST_ROW_SORTED_AT_ONCE:
        return (length * _LONG_BYTES,)
    if input.numel() // length < _FEW_ROWS:  # few long rows are sorted by another algorithm, whose needs we do not know
        return ()
    return (input.numel() * (input.element_size() + 2 * _LONG_BYTES), 1)


def _of_sum(input: torch.Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """Booleans and short integers are made long ones first."""
    is_counted = not input.dtype.is_floating_point and not input.dtype.is_complex and input.dtype != torch.int64
    return (input.numel() * _LONG_BYTES,) if is_counted and input.numel() else ()


def _of_transform(input: torch.Tensor, dims: list[int], *_: Any, **__: Any) -> tuple[int, ...]:
    """See NOTE [workspaces of transforms]. The other dimensions must be one for cuFFT, or the input is copied."""
    copied_bytes = 0 if _are_one(input, dims) else input.nbytes
    return tuple(filter(None, (copied_bytes, input.numel() * input.dtype.to_complex().itemsize)))


def _of_transform_to_real(
    input: torch.Tensor, dims: list[int], mode: int, last_length: int, *_: Any, **__: Any
) -> tuple[int, ...]:
    """A workspace for the result's elements, of which the input has half; and a copy of the input, which cuFFT writes
    into."""
    num_elements = input.numel() // max(1, input.shape[dims[-1]]) * last_length
    return tuple(filter(None, (input.nbytes, num_elements * input.dtype.itemsize)))


def _are_one(input: torch.Tensor, transformed: list[int]) -> bool:
    """Whether the dimensions that are not transformed can be seen as one, whatever their order."""
    last = {dim % input.dim() for dim in transformed}
    places = ((input.stride(dim), size) for dim, size in enumerate(input.shape) if dim not in last and size > 1)
    rest = sorted(places, reverse=True)
    return all(outer == inner * size for (outer, _), (inner, size) in itertools.pairwise(rest))


_TEMPORARIES: dict[Any, Any] = {
    _aten._fft_c2c.default: _of_transform,
    _aten._fft_r2c.default: _of_transform,
    _aten._fft_c2r.default: _of_transform_to_real,
    _aten._softmax_backward_data.default: _of_softmax_backward,
    _aten.embedding_dense_backward.default: _of_embedding_backward,
    _aten.native_group_norm.default: _of_group_norm,
    _aten.native_group_norm_backward.default: _of_group_norm_backward,
    _aten.sort.default: _of_sort,
    _aten.sort.stable: _of_sort,
    _aten.sum.default: _of_sum,
    _aten.sum.dim_IntList: _of_sum,
}


# ---- on one card


class KernelTemporaries:
    """What the kernels of one card allocate; None: what is the same on all of them."""

    def __init__(self, hardware: Hardware | None) -> None:
        self._has_card = hardware is not None
        self._num_multiprocessors = hardware.num_multiprocessors if hardware is not None else 0
        self._architecture = hardware.architecture if hardware is not None else ""
        self._threads_each = threads_of(self._architecture) if hardware is not None else 0

    def inside(
        self, func: Any, args: tuple[Any, ...], result: Any, kwargs: dict[str, Any] | None = None
    ) -> Iterator[tuple[int, ...]]:
        """What this call allocates and frees before it returns, one group after the other; a group is there at once."""
        if sizes := temporary_bytes(func, args, kwargs):
            yield sizes
        if not self._has_card:
            return
        is_split = func in _SUMS and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor)
        if is_split and (sizes := self._of_split_sum(args[0], result, args[1] if len(args) > 1 else None)):
            yield sizes
        if func is _aten.convolution.default and not _has_own_kernels(args[1], args[8]):
            yield from _workspace(args[0], args[1], result)
        yield from attention_temporaries.groups(func, args, self._architecture)

    def after_each(self, func: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[int, ...]]:
        """What a convolution's backward allocates and frees after it has allocated each of its results, of which each
        has a kernel of its own; nothing for other operators."""
        if not self._has_card or func is not _aten.convolution_backward.default:
            return
        gradient, input, weight, groups = *args[:3], args[9]
        for other, found in zip((weight, input), result, strict=False):
            has_workspace = found is not None and not _has_own_kernels(weight, groups)
            yield next(_workspace(gradient, other, found), ()) if has_workspace else ()

    def _of_split_sum(self, summed: torch.Tensor, result: torch.Tensor, dims: Any) -> tuple[int, ...]:
        """The buffers of a sum over the rows of a matrix, which are far apart, or over everything."""
        num_outputs, num_inputs = result.numel(), summed.numel()
        if not num_outputs or num_inputs // num_outputs < 2 or not summed.is_contiguous():
            return ()
        is_over_all = num_outputs == 1
        if not is_over_all and not _keeps_last(summed, result, dims):
            return ()  # along the rows: one block of threads a row
        return self._staging(num_outputs, num_inputs // num_outputs, summed.dtype.itemsize, is_over_all)

    def _staging(self, num_outputs: int, per_output: int, itemsize: int, is_over_all: bool) -> tuple[int, ...]:
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
            return ()
        values = -(-values // height)
        grid = -(-(num_outputs // vector) // (1 if is_over_all else width))
        wanted = self._num_multiprocessors * (self._threads_each // (width * height))
        if values < _MAX_VALUES or grid > wanted:
            return ()
        num_blocks = max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
        if num_blocks < 2:
            return ()
        accumulated = max(4, itemsize)
        beside = 1 if is_over_all else width * vector
        return accumulated * num_outputs * num_blocks * beside, _SEMAPHORE_BYTES * grid


def _has_own_kernels(weight: torch.Tensor, groups: int) -> bool:
    """Whether PyTorch's own kernels compute this convolution."""
    return bool(groups == weight.shape[0] > 1)


def _workspace(*tensors: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The workspace of a convolution's kernel, if it needs one. See NOTE [workspaces of convolutions]."""
    num_bytes = sum(map(_bytes_to_turn, tensors))
    if num_bytes:
        yield (num_bytes,)


def _bytes_to_turn(tensor: torch.Tensor) -> int:
    """The bytes that it takes to turn a tensor whose channels do not come last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return 0 if is_last else tensor.numel() * tensor.element_size()


def threads_of(architecture: str) -> int:
    """How many threads a multiprocessor of this architecture can hold."""
    return {"sm_75": 1024, "sm_70": 2048, "sm_80": 2048, "sm_90": 2048, "sm_100": 2048}.get(architecture, 1536)


def _keeps_last(summed: torch.Tensor, result: torch.Tensor, dims: Any) -> bool:
    """Whether the last dimension is kept and all before it are summed; a square's rows are as many as its columns."""
    is_last_summed = any(dim % summed.dim() == summed.dim() - 1 for dim in dims or ())
    return summed.dim() > 1 and result.numel() == summed.shape[-1] and not is_last_summed


def _output_vector(num_outputs: int) -> int:
    return next(size for size in (4, 2, 1) if num_outputs % size == 0)


def _block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    wide, high = (most if size >= most else 1 << int(math.log2(max(1, size))) for size in (dim0, dim1))
    width = min(wide, _WARP)
    height = min(high, most // width)
    return min(wide, most // height), height
