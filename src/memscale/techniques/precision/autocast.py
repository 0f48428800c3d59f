"""Mixed precision: the model computes in bf16 or fp16; parameters, gradients, optimizer state and outputs stay fp32.

A pair of hooks on the wrapped model enters and leaves `torch.autocast` around its forward, in training and in
evaluation. What comes out in 16 bits is widened to fp32. bf16 needs nothing more. fp16 gets dynamic loss scaling
(`loss_scale`, `gradients`) without a change to the training loop.

A user's own autocast wins: called under one, the model computes as it says and its outputs are left as they are.
Inside the forward, a nested autocast (a region that must stay in fp32, say) works as it does under any other.

Known limits: only calls through the model's `__call__` are covered (`model(...)`, not `model.forward(...)`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import warnings
from typing import Any

import torch
from torch import nn

from memscale._plan import MixedPrecision
from memscale._torch import private
from memscale._torch.overrides import ForwardOverride, OwnHook, keep_copies_clean
from memscale.techniques.precision.loss_scale import LossScale
from memscale.techniques.precision.output_tensors import find_foreign_hook, widened
from memscale.techniques.precision.scaled_graph import ScaledGraph

__all__ = ["LossScale", "Precision", "attach"]

logger = logging.getLogger("memscale")

_STAYS_NARROW = ("transformers.cache_utils",)
"""Modules whose objects are not widened: a key-value cache goes back into the model."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(slots=True)
class _Call:
    """One forward of the model in 16 bits."""

    autocast: torch.autocast
    graph: ScaledGraph | None
    """None where gradients are not scaled: bf16, evaluation, a scaler of the user's own."""


class Precision:
    """Autocast around one model's forward, and the loss scale of fp16."""

    def __init__(self, dtype: torch.dtype, device_type: str, scale: LossScale | None) -> None:
        self.dtype = dtype
        self.device_type = device_type
        self.scale = scale
        self.active = True
        self._local = threading.local()
        self._warned = False

    @property
    def _calls(self) -> list[_Call | None]:
        """The forwards under way in this thread; autocast is a matter of threads, too."""
        calls: list[_Call | None] = self._local.__dict__.setdefault("calls", [])
        return calls

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward begins. Also called for a forward under way, when the plan was made in its first moment."""
        if not self.active:
            return
        if torch.is_autocast_enabled(self.device_type):
            self._calls.append(None)
            return
        graph = None
        if self.scale is not None and self._scales(model):
            self.scale.begin()
            graph = ScaledGraph(self.scale, args, kwargs)
        # NOTE [no weight cache]: autocast would keep the 16-bit copy of every weight until the forward ends, though a
        # checkpointed block needs its own only briefly. It also sums gradients of a weight's uses in 16 bits.
        autocast = torch.autocast(self.device_type, self.dtype, cache_enabled=False)
        autocast.__enter__()
        self._calls.append(_Call(autocast, graph))

    def leave(self, model: nn.Module, output: Any) -> Any:
        """The forward has ended, or failed: then `output` is None. Gives what the caller shall see."""
        if not self._calls:
            return None
        call = self._calls.pop()
        if call is None:
            return None
        call.autocast.__exit__(None, None, None)
        if output is None:
            return None
        wide = widened(output, self.dtype, leave=_STAYS_NARROW)
        if call.graph is None:
            return wide
        return call.graph.close(model, output if wide is None else wide)

    def close(self) -> None:
        """Off, even in the middle of a forward (planning again happens there)."""
        self.active = False
        while self._calls:
            call = self._calls.pop()
            if call is not None:
                call.autocast.__exit__(None, None, None)

    def _scales(self, model: nn.Module) -> bool:
        assert self.scale is not None
        if not torch.is_grad_enabled() or not self.scale.is_ours():
            return False
        problem = _find_problem(model)
        if problem is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"fp16 gradients are not scaled, because {problem} Change that, or use a torch.amp.GradScaler: it "
                "takes over.",
                stacklevel=2,
            )
        return problem is None


def _find_problem(model: nn.Module) -> str | None:
    """Why gradients of a forward that begins now cannot be scaled unseen."""
    if private.inside_functional_transform() or private.in_forward_mode():
        return "torch.func and forward-mode derivatives pass by the places where they would be scaled."
    stranger = find_foreign_hook(model)
    if stranger is None:
        return None
    where, kind = stranger
    if kind == "backward":
        return f"{where} has a backward hook, which would see them scaled."
    return f"{where} has a forward hook: a loss on what it captures would enter the model unscaled."


class _Guard(ForwardOverride):
    """Leaves autocast where hooks are not asked: an interrupt is no `Exception`, and may come in a notebook."""

    may_be_compiled = True

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__(module)
        self.precision = precision

    def call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.inner()(*args, **kwargs)
        except Exception:
            raise  # the hook that leaves is called for these
        except BaseException:
            self.precision.leave(self.module, None)
            raise


class _Enter(OwnHook):
    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    @private.never_compiled
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # A hook that was removed by an earlier hook of the same call is still called, and without keyword arguments.
        self.precision.enter(model, args, kwargs or {})


class _Leave(OwnHook):
    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    @private.never_compiled
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return self.precision.leave(model, output)


def attach(
    action: MixedPrecision,
    model: nn.Module,
    device_type: str,
    undo: contextlib.ExitStack,
    *,
    scale: LossScale | None = None,
) -> Precision | None:
    """Compute in 16 bits until undone. None where that is not possible (one warning) or there is nothing to do.

    `scale` is the loss scale to go on with, for fp16; a plan that replaces another hands it over.
    """
    dtype = _DTYPES[action.dtype]
    if not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        logger.info("%s has no fp32 parameters: its own precision is kept", type(model).__name__)
        return None
    if not _can_autocast(device_type, dtype):
        return None
    if action.dtype == "float16":
        scale = scale if scale is not None else LossScale()
        scale.attach(model, undo)
    precision = Precision(dtype, device_type, scale if action.dtype == "float16" else None)
    undo.callback(precision.close)
    enter = model.register_forward_pre_hook(_Enter(precision), with_kwargs=True)
    undo.callback(enter.remove)
    leave = model.register_forward_hook(_Leave(precision), prepend=True, with_kwargs=True, always_call=True)
    undo.callback(leave.remove)
    _Guard(model, precision).attach(undo)
    keep_copies_clean(model, undo)
    return precision


def _can_autocast(device_type: str, dtype: torch.dtype) -> bool:
    problem = ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not torch.autocast(device_type, dtype)._enabled:
                problem = str(caught[0].message) if caught else "autocast is disabled"
    except RuntimeError as error:
        problem = str(error)
    if problem:
        short = str(dtype).removeprefix("torch.")
        warnings.warn(f"{device_type} has no {short} math; the model stays in full precision ({problem})", stacklevel=2)
    return not problem
