"""Fixtures of the offloading tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Leak checks collect garbage several times a test; what was imported need not be walked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
