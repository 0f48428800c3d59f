"""Files in the user's cache: they belong to the user alone, are written as a whole, and are not opened through links.

    MEMSCALE_CACHE_DIR=DIR      where they are; else `$XDG_CACHE_HOME/memscale`, else `~/.cache/memscale`

What lies behind a link is not ours. A file that cannot be read counts as empty; where nothing can be written, every
process finds out for itself what it would have read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import stat
import tempfile
import time
from typing import Any

from memscale import _json

logger = logging.getLogger("memscale")

MAX_FILE_BYTES = 1 << 24
"""A larger file is not one that we wrote."""
_UNFINISHED_S = 600.0
"""Nobody takes so long to write a small file."""


def cache_dir() -> pathlib.Path:
    """`RuntimeError` for a user without a home directory, as in some containers."""
    explicit, shared = os.environ.get("MEMSCALE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if explicit:
        return pathlib.Path(explicit)
    return (pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache") / "memscale"


def open_own(path: pathlib.Path, flags: int) -> int:
    """A regular file under this very name. A link, a pipe or a device is an `OSError`, and nothing is waited for."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    file = os.open(path, flags | careful, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return file


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object that the file holds; an empty one where there is none that can be read."""
    try:
        with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
            content = _json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.debug("%s cannot be read and counts as empty: %s", path, str(error))
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write the file as a whole or not at all, whoever else writes. `OSError` where it cannot be written."""
    make_own_dir(path.parent)
    _drop_unfinished(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _drop_unfinished(path: pathlib.Path) -> None:
    """Remove what writers of this file that were killed have left. One that is still writing is younger."""
    for left in path.parent.glob(f"{path.name}{'[a-z0-9_]' * 8}"):
        with contextlib.suppress(OSError):  # another process was quicker, or it is not ours
            if time.time() - left.lstat().st_mtime > _UNFINISHED_S:
                left.unlink()


def make_own_dir(path: pathlib.Path) -> None:
    """Make a directory that only the user may look into; one that is there stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
