"""A memo that only hands a text to a logger is told from one that remembers, and from one whose line is counted."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

from memscale._torch.messages import says_once

pytestmark = pytest.mark.unit


def _warns(self: Any, *args: Any, **kwargs: Any) -> None:
    """As libraries write it."""
    self.warning(*args, **kwargs)


def _informs(logger: Any, text: str) -> None:
    logger.info(text)


def _gives(self: Any, text: str) -> Any:
    return self.info(text)


def _gives_a_number(self: Any, text: str) -> int:
    self.info(text)
    return 1


def _asks_another(self: Any, text: str) -> None:
    self.count(text)


def _stores(self: Any, text: str) -> None:
    self.warning = text


def _says_what_it_is_given(text: str, logger: Any) -> None:
    logger.info(text)


def _says_twice(self: Any, text: str) -> None:
    self.info(text)
    self.info(text)


def _says_to_what_it_finds(self: Any, text: str) -> None:
    logging.info(text)


def _with_a_default(self: Any, text: str = "") -> None:
    self.info(text)


class Own(logging.Logger):
    pass


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Nothing that could be seen."""


class Formatter(logging.Formatter):
    pass


def _logger(handler: logging.Handler | None = None) -> logging.Logger:
    logger = logging.Logger("said")
    if handler is not None:
        logger.addHandler(handler)
    return logger


@pytest.mark.parametrize("function", [_warns, _informs])
def test_a_function_that_only_logs_says(function: Any) -> None:
    memo = functools.lru_cache(None)(function)
    assert says_once(memo)
    memo(_logger(), "text")
    assert says_once(memo)


@pytest.mark.parametrize(
    "function",
    [
        _gives, _gives_a_number, _asks_another, _stores, _says_what_it_is_given, _says_twice, _says_to_what_it_finds,
        _with_a_default,
    ],
)  # fmt: skip
def test_a_function_that_does_more_does_not(function: Any) -> None:
    assert not says_once(functools.lru_cache(None)(function))


def test_a_function_that_is_not_remembered_does_not() -> None:
    assert not says_once(_warns)


@pytest.mark.parametrize("bound", [None, 4])
def test_what_it_was_called_with_must_be_a_plain_logger_and_what_cannot_change(bound: int | None) -> None:
    memo = functools.lru_cache(bound)(_informs)
    for owner, text in ((Own("said"), "text"), (object(), "text"), (_logger(), Own("text"))):
        memo.cache_clear()
        if isinstance(owner, logging.Logger):
            memo(owner, text)
            assert not says_once(memo)
    memo.cache_clear()
    memo(_logger(), "text")
    assert says_once(memo)


def _formatted() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    return handler


def _overridden() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.emit = lambda record: None  # type: ignore[method-assign]
    return handler


def _filtered() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: True)
    return handler


class Stream:
    def write(self, text: str) -> None:
        pass


@pytest.mark.parametrize(
    "make", [Handler, _formatted, _overridden, _filtered, lambda: logging.StreamHandler(Stream())]
)  # fmt: skip
def test_a_line_that_goes_through_somebodys_own_code_is_not_only_shown(make: Any) -> None:
    memo = functools.lru_cache(None)(_informs)
    memo(_logger(make()), "text")
    assert not says_once(memo)


def test_nor_is_one_whose_records_somebody_makes() -> None:
    memo = functools.lru_cache(None)(_informs)
    memo(_logger(logging.StreamHandler()), "text")
    assert says_once(memo)
    shipped = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *args, **kwargs: shipped(*args, **kwargs))
    try:
        assert not says_once(memo)
    finally:
        logging.setLogRecordFactory(shipped)
