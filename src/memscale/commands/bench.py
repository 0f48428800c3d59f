"""`memscale bench`: the benchmarks, which lie beside the package."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

from memscale import zoo
from memscale._errors import MemScaleError


def run(**options: Any) -> None:
    with zoo.quiet():
        _benchmarks_table().run(**options)


def _benchmarks_table() -> Any:
    """The benchmark lies in a folder of its own beside the package, and is not installed with it."""
    root = pathlib.Path(__file__).parents[3]
    if (root / "benchmarks" / "table.py").is_file() and str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        return importlib.import_module("benchmarks.table")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.table"):
            raise
        raise MemScaleError(
            "The benchmarks are not part of the installed package. Clone the repository and run `memscale bench` or "
            "`python -m benchmarks` in its folder."
        ) from error
