"""Measurements that anyone can repeat: `python -m benchmarks.<name>` at the root of the repository."""

from __future__ import annotations

import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent


def environment(**variables: str) -> dict[str, str]:
    """What a process of its own needs to find the benchmarks, whatever folder it runs in."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
