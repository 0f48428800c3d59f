"""Steps that only try an optimizer out, on stand-ins of its parameters, are nobody's steps: no hook is told of them.

`torch.optim.optimizer.register_optimizer_step_pre_hook` and its kin register hooks for every optimizer of the process:
counters, loggers, schedules. An optimizer of a class derived from another may fire them twice, since its step calls the
other's. So the hooks are wrapped for as long as somebody tries a step, and are silent in that thread only: an optimizer
that steps in another thread meanwhile fires them as ever. Hooks of the optimizer itself are not on its stand-ins.

Nor are they the compiler's: an optimizer that compiles its step (torchao's do) takes these as written.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from memscale._torch import private


class _Gate:
    """Stands in the place of one hook, and passes everything on but for the steps of threads that are quiet."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if _quiet.is_on_here() else self.hook(*args, **kwargs)


class _QuietThreads:
    """Puts the gates up with the first thread that asks for quiet, and takes them down with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depths: collections.Counter[int] = collections.Counter()

    def is_on_here(self) -> bool:
        return self._depths[threading.get_ident()] > 0

    def enter(self) -> None:
        with self._lock:
            self._depths[threading.get_ident()] += 1
            for hooks in private.global_step_hooks():
                # Values only: others may be going through the table, or hold a key of it to remove their hook.
                for key, hook in list(hooks.items()):
                    if not isinstance(hook, _Gate):
                        hooks[key] = _Gate(hook)

    def leave(self) -> None:
        with self._lock:
            self._depths[threading.get_ident()] -= 1
            self._depths += collections.Counter()  # drops the threads that are done
            if not self._depths:
                self._open_all()

    def _open_all(self) -> None:
        for hooks in private.global_step_hooks():
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Gate):
                    hooks[key] = hook.hook


_quiet = _QuietThreads()


@contextlib.contextmanager
def quiet_steps() -> Iterator[None]:
    """Inside, steps that this thread takes fire none of the hooks that are registered for all optimizers, and run
    uncompiled."""
    _quiet.enter()
    try:
        with private.never_while_compiled():
            yield
    finally:
        _quiet.leave()
