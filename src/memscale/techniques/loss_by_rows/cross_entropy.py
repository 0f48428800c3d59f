"""`F.cross_entropy` whose backward makes a few rows of its gradients at a time, with PyTorch's own kernels.

Forward is what PyTorch does: `log_softmax`, then `nll_loss`. Backward calls the backward kernels of both for some rows
after the other. Each row of them stands by itself, so the bits are those of the whole.

NOTE [whole rows, aligned]: a card's kernel adds up a row in an order that follows from where the row begins in memory,
counted in 16 bytes. Chunks are of sixteen rows or a multiple, so every row begins where it would.

NOTE [the log-probabilities' memory]: the gradient of the logits is written over the log-probabilities, row by row,
where nobody else will want them: the graph is not kept for another pass, and no saved-tensor hooks were active in
forward, whose owner may hold what is saved. Where a pass fails in the middle, autograd sees by the version that they
were written to, and refuses another one.

NOTE [whose loss]: functions are replaced for the whole process, so it is asked whose loss this is: one that is computed
inside the model's forward, or from what that has returned. Others go PyTorch's way, as does all that these kernels are
not for: probabilities as targets, label smoothing, targets with positions, class weights with a gradient. A plan counts
on one: where training shows none, that is said, once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.outputs import tensors_in
from memscale._torch.plain_path import is_plain_path

logger = logging.getLogger("memscale")
aten = torch.ops.aten

ROWS = 16
"""Chunks are of so many rows, or of a multiple: see NOTE [whole rows, aligned]."""
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_MARK = "memscale: output of a model"
_PATIENCE = 5
"""At so many forwards in training without a loss that is met, this is said."""
_MAX_NODES = 64
"""So far behind a loss its model is looked for: views, casts, what wrappers put around outputs."""


def rows_of(chunk_bytes: int, logits: torch.Tensor) -> int:
    """How many rows a chunk has."""
    row_bytes = max(1, logits.shape[1] * logits.element_size())
    return max(1, chunk_bytes // row_bytes // ROWS) * ROWS


# ---- whose loss it is


class _Mine(threading.local):
    """Which tensors of this thread are computed by the model. See NOTE [whose loss]."""

    depth = 0

    def __init__(self, token: object, is_fake: bool) -> None:
        self.token, self.is_fake = token, is_fake

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if private.is_fake(tensor) != self.is_fake:
            return False  # a rehearsal beside training, or the other way round
        return self.depth > 0 or _leads_to(tensor.grad_fn, self.token)


def _leads_to(node: Any, token: object) -> bool:
    """Whether a node with this mark is among the nearest behind this one."""
    nodes: list[Any] = [node]
    seen: set[Any] = set()
    while nodes and len(seen) < _MAX_NODES:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        if private.mark_of(node, _MARK) is token:
            return True
        seen.add(node)
        nodes += [behind for behind, _ in node.next_functions]
    return False


class ModelWatch:
    """Notes when the model is called, and what it returns: see `SurroundedForward`."""

    def __init__(self, model: nn.Module) -> None:
        parameter = next(model.parameters(), None)
        self.token = object()
        self.mine = _Mine(self.token, parameter is not None and private.is_fake(parameter))
        self.is_met = False
        """Whether a loss has come that the kernels are for."""
        self._num_forwards = 0

    def begin(self, model: nn.Module) -> None:
        """A forward of the model begins."""
        if torch.is_grad_enabled() and model.training and not self.is_met:
            self._ask()
        self.mine.depth += 1

    def end(self, output: Any) -> None:
        """It has ended. What the model has returned is told by the nodes that it hangs on."""
        self.mine.depth -= 1
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            with private.without_torch_function():
                node = tensor.grad_fn
            if node is not None:
                private.mark_node(node, _MARK, self.token)

    def _ask(self) -> None:
        """Where several forwards have gone before and none had a loss that was met, say so."""
        self._num_forwards += 1
        if self._num_forwards == _PATIENCE:
            logger.warning(
                "the plan makes the gradients of the loss by rows, and has not met a loss that it could do so with: it "
                "must be F.cross_entropy of the model's output with one class a row. A step takes more than the plan "
                "says. Use that, or set enable_loss_by_rows=False"
            )


# ---- what F.cross_entropy becomes


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of `F.cross_entropy`, under the names and with the defaults that it has."""

    input: Any
    target: Any
    weight: Any = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def is_known(self) -> bool:
        """Whether PyTorch would do no more than `log_softmax` over rows and `nll_loss` of one class a row."""
        input, target, weight = self.input, self.target, self.weight
        if not all(map(_is_plain, (input, target))) or not (weight is None or _is_plain(weight)):
            return False
        return bool(
            (self.size_average, self.reduce, self.label_smoothing) == (None, None, 0.0)
            and self.reduction in _REDUCTIONS
            and input.dim() == 2
            and target.shape == input.shape[:1]
            and target.dtype == torch.long
            and input.device == target.device
            and (weight is None or _is_weight_of(weight, input))
        )


def _is_plain(tensor: Any) -> bool:
    """No subclass with a mind of its own, such as lazy logits."""
    is_tensor = type(tensor) in (torch.Tensor, nn.Parameter) or private.is_fake(tensor)
    return is_tensor and tensor.layout is torch.strided


def _is_weight_of(weight: torch.Tensor, input: torch.Tensor) -> bool:
    alike = (weight.dtype, weight.device, weight.shape) == (input.dtype, input.device, input.shape[1:])
    return alike and not weight.requires_grad


class Losses:
    """Stands in front of `F.cross_entropy`."""

    def __init__(self, watch: ModelWatch, chunk_bytes: int) -> None:
        self._watch, self.mine, self.chunk_bytes = weakref.ref(watch), watch.mine, chunk_bytes

    def __call__(self, pass_on: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_plain_path() or not torch.is_grad_enabled():
            return pass_on(*args, **kwargs)
        try:
            call = _Call(*args, **kwargs)
        except TypeError:  # PyTorch says what is wrong
            return pass_on(*args, **kwargs)
        if not call.is_known() or not self._is_wanted(call.input):
            return pass_on(*args, **kwargs)
        num_rows, reduction = rows_of(self.chunk_bytes, call.input), _REDUCTIONS[call.reduction]
        loss, _ = _ByRows.apply(call.input, call.target, call.weight, reduction, call.ignore_index, num_rows)  # type: ignore[no-untyped-call]
        return loss

    def _is_wanted(self, logits: torch.Tensor) -> bool:
        """Whether it is this model's, is trained, and is more than one chunk."""
        if not logits.requires_grad or not logits.is_floating_point():
            return False
        if torch.is_autocast_enabled(logits.device.type) and logits.dtype not in (torch.float32, torch.float64):
            return False  # what is cast there, and when, autocast knows
        if logits not in self.mine:
            return False
        watch = self._watch()
        if watch is not None:
            watch.is_met = True
        return logits.shape[0] > rows_of(self.chunk_bytes, logits)


class _ByRows(torch.autograd.Function):
    """A cross-entropy. The log-probabilities are an output, so that what is saved of them can be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        num_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probabilities = aten._log_softmax(logits, 1, False)
        loss, total_weight = aten.nll_loss_forward(log_probabilities, target, weight, reduction, ignore_index)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_probabilities, target, weight, total_weight)
        ctx.reduction, ctx.ignore_index, ctx.num_rows = reduction, ignore_index, num_rows
        ctx.is_hooked = private.saves_are_hooked()
        return loss, log_probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        of_loss, of_log_probabilities = gradients
        if of_loss is None or of_log_probabilities is not None:
            found = _whole(ctx, of_loss, of_log_probabilities)
        elif torch.is_grad_enabled() or private.is_batched(of_loss):
            found = _whole(ctx, of_loss, None)
        else:
            found = _by_rows(ctx, of_loss)
        return found, None, None, None, None, None


def _by_rows(ctx: Any, of_loss: torch.Tensor) -> torch.Tensor:
    """See NOTE [the log-probabilities' memory]."""
    log_probabilities, target, weight, total_weight = ctx.saved_tensors
    log_probabilities = log_probabilities.detach()
    is_ours = not private.keeps_graph() and not ctx.is_hooked
    gradient = log_probabilities if is_ours else torch.empty_like(log_probabilities)
    for first in range(0, len(target), ctx.num_rows):
        part = slice(first, first + ctx.num_rows)
        rows, of_rows = log_probabilities[part], of_loss[part] if of_loss.dim() else of_loss
        of_each = aten.nll_loss_backward(
            of_rows, rows, target[part], weight, ctx.reduction, ctx.ignore_index, total_weight
        )
        gradient[part].copy_(aten._log_softmax_backward_data(of_each, rows, 1, rows.dtype))
        del of_each
    return gradient


def _whole(ctx: Any, of_loss: torch.Tensor | None, of_log_probabilities: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient at once, as PyTorch makes it: it can be differentiated again."""
    log_probabilities, target, weight, total_weight = ctx.saved_tensors
    found = of_log_probabilities
    if of_loss is not None:
        of_each = aten.nll_loss_backward(
            of_loss, log_probabilities, target, weight, ctx.reduction, ctx.ignore_index, total_weight
        )
        found = of_each if found is None else found + of_each
    if found is None:
        return None
    whole: torch.Tensor = aten._log_softmax_backward_data(found, log_probabilities, 1, log_probabilities.dtype)
    return whole
