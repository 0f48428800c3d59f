"""Fixtures of the offloading tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Leak checks collect garbage several times a test; what was imported need not be walked through each time.

    For one file only: tensors among what is frozen are not seen by `measure()`, and come back into sight at the end.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def plain_runs() -> Iterator[dict[Any, Any]]:
    """Runs of plain models, by case, for the tests of one file."""
    runs: dict[Any, Any] = {}
    yield runs
    runs.clear()  # the last test still holds them
