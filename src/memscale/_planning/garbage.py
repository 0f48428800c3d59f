"""Python looks for circles of garbage less often while a plan is made.

    with few_collections():
        ...

A rehearsal makes and drops many small objects, so that Python keeps going through everything that the program has,
libraries and all, which took a seventh of the time of planning. What is young is still swept: only the oldest
generation waits until the plan is there. `gc.freeze` would spare more, but it hides objects from `gc.get_objects`, and
that is how optimizers are found.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_RARELY = 100_000
"""So many sweeps of the middle generation come before one of the oldest."""


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Inside, the oldest generation is left alone. A threshold that somebody else has set meanwhile stays."""
    before = gc.get_threshold()
    changed = (before[0], before[1], max(before[2], _RARELY))
    gc.set_threshold(*changed)
    try:
        yield
    finally:
        if gc.get_threshold() == changed:
            gc.set_threshold(*before)
