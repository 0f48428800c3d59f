"""What every test of a repeated step needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_else_runs() -> Iterator[None]:
    """Finalizers of what earlier tests left in circles are code of others, which no repeated step may run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
