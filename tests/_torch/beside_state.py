"""State of another Python module than the model's."""

from __future__ import annotations

import random

count = 0
_generator = random.Random(5)


def draw() -> float:
    return _generator.random()
