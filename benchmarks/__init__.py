"""Measurements that anyone can repeat: `python -m benchmarks.<name>` at the root of the repository.

`python -m benchmarks --list` names them. What it does not name is what several of them share: `models` and
`architectures` (what is trained), `text` (a real text), `runs`, `trials` and `real_step` (how something is run),
`pictures` and `kept_sections` (how results are drawn and kept), `torchvision_names`.
"""

from __future__ import annotations

import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent


def environment(**variables: str) -> dict[str, str]:
    """What a process of its own needs to find the benchmarks, whatever folder it runs in."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
