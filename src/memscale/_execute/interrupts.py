"""Ctrl-C while something is undone: it waits until that is done, so that no half of it is left on the model.

What takes a hook or a weight off has to end: an `ExitStack` drops a callback before it calls it, so one that was
interrupted is not called again, and a second `detach()` could not do what the first has left.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

NUM_PATIENT = 1
"""Ctrl-C's that wait. The next is let through, for a device that never answers."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait for the end of this block; a second one does not. Other threads are never sent it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > NUM_PATIENT:
            waiting.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(waiting[0], None)
