"""Puts the cross-entropy of `cross_entropy.py` in front of PyTorch's, for the losses of one model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from memscale._torch.interception import intercept
from memscale._torch.overrides import OwnHook, SurroundedForward, is_failing, undo_with
from memscale.techniques.loss_by_rows.cross_entropy import Losses, ModelWatch


def attach_rows(model: nn.Module, chunk_bytes: int, undo: contextlib.ExitStack) -> Callable[[], None]:
    """Make the gradients of this model's cross-entropies by rows until undone. What is returned is called where a
    forward of the model has begun already: see NOTE [a forward that has begun]."""
    watch = ModelWatch(model)
    SurroundedForward(model, watch).attach(undo)
    undo_with(model, intercept(F, "cross_entropy", Losses(watch, chunk_bytes)), undo)
    return functools.partial(_follow_begun, weakref.ref(model), watch, undo)


class _BegunForward(OwnHook):
    """Ends a forward that had begun when the watch was attached.

    NOTE [a forward that has begun]: a plan may be made in the first moment of a forward. PyTorch has looked up by then
    what it is going to call, and what stands in for that is called next time. So this forward is the model's until a
    hook says that it has ended.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self._watch = weakref.ref(watch)
        self._has_ended = False
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.handle is not None and not is_failing(output):
            self.handle.remove()
            self.handle = None
        watch = self._watch()
        if self._has_ended or watch is None:
            return
        self._has_ended = True
        watch.end(output)


def _follow_begun(model_ref: weakref.ref[nn.Module], watch: ModelWatch, undo: contextlib.ExitStack) -> None:
    model = model_ref()
    assert model is not None, "its forward has begun"
    hook = _BegunForward(watch)
    hook.handle = model.register_forward_hook(hook, always_call=True)
    undo.callback(hook.handle.remove)
    watch.mine.depth += 1
