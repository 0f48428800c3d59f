"""How many equal pieces of work the one that runs now stands for: a rehearsal runs equal pieces once. No torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

_Piece = TypeVar("_Piece")
_local = threading.local()


def count() -> int:
    found: int = getattr(_local, "count", 1)
    return found


@contextlib.contextmanager
def standing_for(num_pieces: int) -> Iterator[None]:
    before = count()
    _local.count = before * num_pieces
    try:
        yield
    finally:
        _local.count = before


def in_turn(pieces: Sequence[_Piece], *, is_rehearsal: bool) -> Iterator[_Piece]:
    """Every piece; in a rehearsal of many, of which all but the last are alike, the first two and the last."""
    if not is_rehearsal or len(pieces) < 4:
        yield from pieces
        return
    yield pieces[0]
    with standing_for(len(pieces) - 2):
        yield pieces[1]
    yield pieces[-1]
