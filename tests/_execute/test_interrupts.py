"""Ctrl-C waits for the end of what must not be left half done; a second one does not."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from memscale._execute.interrupts import undisturbed

pytestmark = pytest.mark.unit


def ctrl_c(*then: str, times: int = 1, levels: int = 1) -> list[str]:
    """What was done in a block after Ctrl-C, which must reach the program in the end."""
    done: list[str] = []

    def act() -> None:
        with contextlib.ExitStack() as blocks:
            for _ in range(levels):
                blocks.enter_context(undisturbed())
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.extend(then)

    with pytest.raises(KeyboardInterrupt):
        act()
    return done


def test_it_comes_when_the_block_has_ended() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert ctrl_c("the rest") == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_one_does_not_wait() -> None:
    assert ctrl_c("the rest", times=2) == []


def test_blocks_may_be_inside_of_each_other() -> None:
    assert ctrl_c("the rest", levels=2) == ["the rest"]


def test_the_handler_of_the_program_is_called() -> None:
    called = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            assert not called
    finally:
        signal.signal(signal.SIGINT, before)
    assert called == [signal.SIGINT]


def test_an_error_inside_is_that_error() -> None:
    with pytest.raises(ValueError, match="mine"), undisturbed():
        raise ValueError("mine")


def test_other_threads_leave_handlers_alone() -> None:
    seen = []

    def look() -> None:
        with undisturbed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
