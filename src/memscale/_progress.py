"""What takes long says what it is doing: stages, and the board that shows them when they last.

    with Board(show), stage("planning GPT2"):           # whoever begins the work opens a board for this thread
        with stage("rehearsing a step"): ...            # whoever does a part of it names that part

Nothing is shown of work that is over within two seconds. After that the stage under way is shown, and each that begins
later. A stage without a board says nothing. Where and how it is shown is decided in `report/console.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

DELAY_S = 2.0
_here = threading.local()


class Board:
    """Shows the stages of one thread's work, once that lasts. Inside another board of the thread it does nothing."""

    def __init__(self, show: Callable[[str], None], delay_s: float = DELAY_S) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._text = ""
        self._before: Board | None = None
        self._is_late = False
        self._timer = threading.Timer(delay_s, self._be_late)
        self._timer.daemon = True

    def __enter__(self) -> Board:
        self._before = getattr(_here, "board", None)
        if self._before is None:
            _here.board = self
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is None:
            _here.board = None
            self._timer.cancel()
            self._timer.join()

    def _be_late(self) -> None:
        with self._lock:
            self._is_late = True
            if self._text:
                self._show(self._text)

    def begin(self, text: str) -> str:
        """Another stage is under way; returns the one before."""
        with self._lock:
            before, self._text = self._text, text
            if self._is_late:
                self._show(text)
        return before

    def end(self, before: str) -> None:
        """It is over: the one before goes on, which was shown already."""
        with self._lock:
            self._text = before


@contextlib.contextmanager
def stage(text: str) -> Iterator[None]:
    """Name what is done inside."""
    board: Board | None = getattr(_here, "board", None)
    if board is None:
        yield
        return
    before = board.begin(text)
    try:
        yield
    finally:
        board.end(before)
