"""A Python module that some of the odd programs keep something in."""

from __future__ import annotations

import enum

KEPT: list[int] = []
SCALE = 1.5


class Kind(str, enum.Enum):
    GELU = "gelu"
    RELU = "relu"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def size_of() -> int:
    return len(KEPT)
