"""A streamed layer that uses `torch.utils.checkpoint` itself.

What the layer checkpoints would be computed again when the layer's own recompute is over and its parameters are home.
The layer is computed again as a whole anyway, so inside of it a checkpoint computes its function as if it were not
there. That is the same for the form that is not reentrant. The reentrant one differs: it gives no gradients where no
input needs any, and runs a backward pass of its own. It is refused, as is a `context_fn`, which may change the result.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale._torch.overrides import undo_with


class _Inside(threading.local):
    """The streamed layers that this thread is computing, by name."""

    def __init__(self) -> None:
        self.module_fqns: list[str] = []


_INSIDE = _Inside()


@contextlib.contextmanager
def seen_through(module_fqn: str) -> Iterator[None]:
    """Inside, checkpoints of the layer's own are as if they were not there."""
    _INSIDE.module_fqns.append(module_fqn)
    try:
        yield
    finally:
        _INSIDE.module_fqns.pop()


def _is_inside() -> bool:
    return bool(_INSIDE.module_fqns) and torch.is_grad_enabled()  # else nothing is computed again


def _refuse(option: str) -> None:
    raise MemScaleError(
        f"{_INSIDE.module_fqns[-1]} calls torch.utils.checkpoint with {option} in its own forward, and its parameters "
        "are not on the device when that is computed again. Call it with use_reentrant=False and without context_fn, "
        "or leave this layer out of parameter streaming"
    )


class _Patch:
    """In place while anybody streams."""

    def __init__(self) -> None:
        self._num_users = 0
        self._undo = contextlib.ExitStack()
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._undo.callback(private.see_through_checkpoints(_is_inside, _refuse))

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._undo.close()


_PATCH = _Patch()


def attach(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Until undone, or until the model is gone, streamed layers may use checkpoints of their own."""
    _PATCH.enter()
    undo_with(model, _PATCH.leave, undo)
