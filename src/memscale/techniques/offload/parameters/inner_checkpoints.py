"""A streamed layer that uses `torch.utils.checkpoint` itself.

A part that the layer checkpoints would be computed again when the layer's own recompute is over and its parameters are
home. The whole layer is recomputed anyway, so a checkpoint inside of it only calls its function. The result is the same
for the non-reentrant form. The reentrant form differs: it gives no gradients where no input needs any, and it runs a
backward pass of its own. It is refused, and so is a `context_fn`, which may change the result.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale._torch.overrides import undo_with

_INSIDE = private.SeenThrough()
"""The streamed layers that this thread is computing, by name."""


@contextlib.contextmanager
def seen_through(module_fqn: str) -> Iterator[None]:
    """Let the layer's own checkpoints only call their functions inside of this context."""
    _INSIDE.names.append(module_fqn)
    try:
        yield
    finally:
        _INSIDE.names.pop()


def _refuse(option: str) -> None:
    raise MemScaleError(
        f"{_INSIDE.names[-1]} calls torch.utils.checkpoint with {option} in its own forward, and its parameters "
        "are not on the device when that is computed again. Call it with use_reentrant=False and without context_fn, "
        "or leave this layer out of parameter streaming"
    )


class _Patch:
    """The replacement of `torch.utils.checkpoint`, in place while any model is streamed."""

    def __init__(self) -> None:
        self._num_users = 0
        self._undo = contextlib.ExitStack()
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._undo.callback(private.see_through_checkpoints(_INSIDE, _refuse))

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._undo.close()


_PATCH = _Patch()


def attach(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let streamed layers use checkpoints of their own, until undone or until the model is gone."""
    _PATCH.enter()
    undo_with(model, _PATCH.leave, undo)
