"""Where a step on fake tensors would go another way than the real one, and how it is kept on the real way.

What a GPU's kernels save for backward, on fake CPU tensors:

A profile must be made for the device that will run it: a CUDA card fuses dropout (it saves a boolean mask, the CPU a
scaled float mask) and picks the memory-efficient attention kernel in fp32 (it saves output and log-sum-exp, never
the scores; the CPU has no such kernel with dropout). That kernel knows no groups of queries: with `enable_gqa` a card
computes the scores as a matrix, unless its flash kernel can (16 bits, no mask). RMS norm is one kernel there, which
saves its input and a number a row. When a plan is made for a card that is not in this machine, the step runs on fake
CPU tensors with these kernels put in their place. What stays the CPU's: everything else, which saves the same tensors
on both (matmul, other norms, activations, losses); recurrent networks and convolution workspaces, which do not, are not
emulated.

What the CPU's own kernels save and fake tensors do not show: an LSTM of oneDNN keeps a workspace of a size that only
oneDNN knows, and the fake one is empty. `CpuKernels` asks it, by running the layer once on real zeros.

What fake tensors refuse and every device has: grouped matrix products, by which mixtures of experts compute, in other
types than bfloat16.

What real tensors do in place and fake ones do not: see NOTE [biases in place].

What some losses keep and fake tensors do not show: a mean that lies in the memory of all that it is the mean of.

Where values steer the way: `transformers` looks for packed sequences in the position ids, cannot read fake ones, and
takes the batch for packed; real batches are, unless position ids are passed. It also skips an attention mask that
hides nothing. The plan counts the mask: a later batch may be padded.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._torch import private
from memscale._units import round_up

_DROPOUT, _ATTENTION, _RMS_NORM, _LINEAR = F.dropout, F.scaled_dot_product_attention, F.rms_norm, F.linear


class GpuKernels(TorchFunctionMode):
    """Dropout, attention and RMS norm save what a CUDA card saves, in forward, while this mode is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DROPOUT:
            return fused_dropout(*args, **kwargs)
        if func is _ATTENTION:
            return efficient_attention(*args, **kwargs)
        if func is _RMS_NORM:
            return fused_rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    result: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return result


class LinearAsTrained:
    """A linear layer as it is in a real step, though a stage's modes see it.

    NOTE [biases in place]: PyTorch multiplies rows that do not lie one after the other first, and adds the bias to the
    product in place. Where tensors are subclasses, or a mode sees operators, as on a stage, the sum is a new tensor.
    Attention of `torch.nn` that gets its batch first is such a layer.
    """

    def __init__(self, stage_modes: tuple[Any, ...], stage_kinds: tuple[type, ...], *, is_seen: bool) -> None:
        """`stage_modes` and modes of the `stage_kinds` are there on the stage alone. Others, of techniques, are there
        in a real step, too. `is_seen`: operators of a real step are seen in any case."""
        self._modes, self._kinds, self._is_seen = stage_modes, stage_kinds, is_seen

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_by_parts = bias is not None and input.dim() > 2 and not (input.dim() == 3 and input.is_contiguous())
        if not is_by_parts or torch.is_autocast_enabled(input.device.type) or self._is_seen or self._sees_another():
            return _LINEAR(input, weight, bias)
        product = input @ weight.t()
        return product.add_(bias) if bias is not None else product

    def _sees_another(self) -> bool:
        others = [mode for mode in private.active_modes() if all(mode is not own for own in self._modes)]
        return not all(isinstance(mode, self._kinds) for mode in others)


class _RmsNorm(torch.autograd.Function):
    """A card has one kernel for it, which saves the input and a number a row; on a CPU it is written in operators."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> torch.Tensor:
        rows = (*input.shape[: input.dim() - num_dims], *(1,) * num_dims)
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32, device=input.device))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        _contiguous = [gradient.contiguous() for gradient in gradients]  # as the kernel needs them
        of_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return of_input, of_weight, None


def fused_rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if weight is not None and weight.dtype != input.dtype:  # no kernel takes both: the operators run
        return _RMS_NORM(input, normalized_shape, weight, eps)
    result: torch.Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if query.dim() != 4:
        return _efficient_attention_3d(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if enable_gqa and not _has_flash_kernel(query, attn_mask):
        return _attention_by_scores(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if enable_gqa:
        key, value = _repeated(query, key, value)
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return result


def _attention_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The scores are a matrix. PyTorch adds the mask to them in place, but not where they are a subclass of tensors, as
    fake ones are: in full precision it is written out here."""
    if _is_half(query):
        whole: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
        return whole
    factor = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    query = query * factor
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    key, value = _repeated(query, key, value)
    scores = query @ (key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        scores.add_(attn_mask)
    shares: torch.Tensor = _aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        shares = fused_dropout(shares, dropout_p)
    return shares @ value


def _repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values for each head of the queries."""
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _is_half(query: torch.Tensor) -> bool:
    return query.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(query.device.type)


def _has_flash_kernel(query: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    return _is_half(query) and attn_mask is None


def _efficient_attention_3d(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
    tensors = (query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
    return efficient_attention(*tensors, mask, dropout_p, is_causal, scale).squeeze(1)


def cpu_kernels(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A mode costs time at every operator: only where there is something for it to do."""
    return CpuKernels() if any(isinstance(module, nn.LSTM) for module in model.modules()) else contextlib.nullcontext()


class CpuKernels(TorchDispatchMode):
    """LSTMs on fake CPU tensors save what they save on real ones, while this mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace_bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.mkldnn_rnn_layer.default:
            return result
        output, hidden, cell, _ = result
        return output, hidden, cell, torch.empty(self._workspace_of(func, args), dtype=torch.uint8)

    def _workspace_of(self, func: Any, args: tuple[Any, ...]) -> int:
        key = str([(tuple(arg.shape), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args])
        if key not in self._workspace_bytes:
            with private.real_tensors():
                real = [_zeros_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
                self._workspace_bytes[key] = func(*real)[3].nbytes
        return self._workspace_bytes[key]


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")


def nothing_packed(*_: Any, **__: Any) -> None:
    """What `transformers` would find of packed sequences in real tensors."""


_aten = torch.ops.aten
_ROW_ALIGNMENT_BYTES = 16


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a grouped product gives: groups of rows, of the summed dimension, or whole matrices; rows are aligned."""
    rows, columns = first.shape[-2], second.shape[-1]
    groups = [first.shape[0]] if first.dim() == 3 == second.dim() else []
    if first.dim() == 2 == second.dim():
        assert offs is not None
        groups = [offs.shape[0]]
    dtype = out_dtype or first.dtype
    width = round_up(columns, _ROW_ALIGNMENT_BYTES // dtype.itemsize)
    strides = [rows * width, width, 1] if groups else [width, 1]
    return torch.empty_strided([*groups, rows, columns], strides, dtype=dtype, device=first.device)


FAKE_KERNELS: dict[Any, Any] = {_aten._grouped_mm.default: _grouped_mm}
"""Shapes of results where PyTorch's own fake kernel refuses what devices compute."""

WIDE_LOSSES = frozenset(
    (
        _aten.mse_loss.default,
        _aten.smooth_l1_loss.default,
        _aten.binary_cross_entropy.default,
        _aten.soft_margin_loss.default,
    )
)
"""They write their terms into the result's memory and then make it a number, which keeps that memory."""


def widen(loss: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Give a fake loss the memory that a real one keeps; whether it is more than it has."""
    if not private.is_fake(loss):
        return False
    num_bytes = torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * loss.element_size()
    storage = loss.untyped_storage()
    if num_bytes <= storage.nbytes():
        return False
    storage.resize_(num_bytes)
    return True


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A softmax whose rows are zero where they are masked as a whole."""
    result = torch.softmax(scores, dim, dtype)
    is_masked = scores.eq(float("-inf"))
    is_row_masked = is_masked.all(dim, keepdim=True)
    result.masked_fill_(is_row_masked, torch.zeros((), dtype=result.dtype, device=result.device))
    del is_row_masked, is_masked  # in the order in which they go there
    return result


OPENED: dict[Any, Any] = {_aten._safe_softmax.default: _safe_softmax}
"""Kernels that are operators inside, which allocate in their turn; fake tensors show only their result."""
