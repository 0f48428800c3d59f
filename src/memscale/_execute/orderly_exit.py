"""An orderly end of the process: PyTorch's threads let go of their last Python objects before the interpreter stops.

A pass of backward leaves Python objects with threads of PyTorch: autograd's thread for a device holds what the pass
saved; gloo's thread holds the context of a gradient's all-reduce, because a collective captures the caller's
thread-local state, in which `torch.autograd` keeps a `contextvars` copy. They let go of them a moment after
`backward()` has returned, and need the interpreter's lock for it. On a busy machine that moment may come when the
script has ended. Python then ends the thread in the middle of a C++ destructor, and the process aborts ("terminate
called without an active exception"), after all its work was done.

So the end of the process waits for those threads. A thread on its way is runnable, or waits for the lock; the lock is
released between two looks, which makes it runnable. Two looks in a row that find none mean that nobody is on the way.
This reads `/proc`; elsewhere there is a pause instead.
"""

from __future__ import annotations

import atexit
import functools
import pathlib
import time

TASKS = pathlib.Path("/proc/self/task")
PREFIX = "pt_"
"""What PyTorch calls its threads: `pt_autograd_0`, `pt_gloo_runloop`."""
BUSY = "RD"
"""Running or runnable, and waiting for a page of memory."""
NAP_S = 0.002
LONGEST_S = 10.0
"""A thread that is still busy then has not been seen yet, and is not waited for."""
PAUSE_S = 0.1


@functools.cache
def be_orderly() -> None:
    """Have the end of this process wait for PyTorch's threads. Once is enough."""
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Return when no thread of PyTorch is on its way to the interpreter's lock."""
    if not TASKS.exists():
        time.sleep(PAUSE_S)
        return
    deadline = time.monotonic() + LONGEST_S
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline:
        time.sleep(NAP_S)  # releases the interpreter's lock
        num_quiet = 0 if _busy_threads() else num_quiet + 1


def _busy_threads() -> list[str]:
    found = []
    for task in TASKS.iterdir():
        try:
            name, state = _read(task)
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
        if name.startswith(PREFIX) and state in BUSY:
            found.append(name)
    return found


def _read(task: pathlib.Path) -> tuple[str, str]:
    """The thread's name and state. The name stands in brackets and may hold brackets itself."""
    before, _, after = (task / "stat").read_text().rpartition(")")
    return before.partition("(")[2], after.split()[0]
