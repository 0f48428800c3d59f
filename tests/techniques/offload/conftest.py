"""Fixtures of the offloading tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def plain_runs() -> Iterator[dict[Any, Any]]:
    """Runs of plain models, by case, for the tests of one file."""
    runs: dict[Any, Any] = {}
    yield runs
    runs.clear()  # the last test still holds them
