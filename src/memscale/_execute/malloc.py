"""Freed means freed: on a CPU, memory of dead tensors goes back to the system at once.

glibc keeps freed memory for itself: it raises its threshold for direct mappings as large blocks are freed, and the
heap then shrinks only from its top. A model that was made to fit would stay as large as its largest moment, or twice as
large as its tensors. So where memory is short, tensors of 64 KiB and more are mapped directly while a plan is attached
on a CPU, and unmapped when they die. Fresh pages have their price: steps are a quarter to a half slower.

Known limits: glibc has no way to read the thresholds, so they are put back to its defaults, without the automatic
adjustment that it starts with. Other C libraries are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from memscale._hardware.host import host_memory
from memscale._torch.overrides import undo_with

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_DIRECT_BYTES = 64 * 1024
_DEFAULT_BYTES = 128 * 1024
_DEFAULT_MAX_MAPPINGS, _MAX_MAPPINGS = 65536, 1_000_000

_LARGEST_EXCESS = 2.5
"""Resident over tracked bytes, as seen where the C library was left alone."""

_lock = threading.Lock()
_num_users = 0


def is_short(peak_bytes: int | None) -> bool:
    """Whether a step of this peak could be too large for this machine if the C library kept what is freed."""
    return peak_bytes is None or _LARGEST_EXCESS * peak_bytes > host_memory()[1]


def return_freed_memory(owner: Any, undo: contextlib.ExitStack) -> bool:
    """Let freed tensors go back to the system until undone, or until the owner is gone.

    False where the C library does not offer it.
    """
    if _mallopt() is None:
        return False
    _acquire()
    undo_with(owner, _release, undo)
    return True


def _acquire() -> None:
    global _num_users
    with _lock:
        _num_users += 1
        if _num_users == 1:
            _set(_DIRECT_BYTES, _MAX_MAPPINGS)


def _release() -> None:
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users == 0:
            _set(_DEFAULT_BYTES, _DEFAULT_MAX_MAPPINGS)


def _set(threshold_bytes: int, max_mappings: int) -> None:
    mallopt = _mallopt()
    assert mallopt is not None
    for parameter, value in (
        (_M_MMAP_THRESHOLD, threshold_bytes),
        (_M_TRIM_THRESHOLD, threshold_bytes),
        (_M_MMAP_MAX, max_mappings),
    ):
        mallopt(parameter, value)
    ctypes.CDLL(None).malloc_trim(0)


def _mallopt() -> ctypes._NamedFuncPointer | None:
    """glibc's; others have the name without the parameters."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return None
    return library.mallopt
