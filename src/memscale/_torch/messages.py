"""Messages that are shown once: functions under `lru_cache` that do nothing but to hand a text to a logger.

    @functools.lru_cache(None)
    def warning_once(self, *args, **kwargs):
        self.warning(*args, **kwargs)

Libraries warn so in a first forward. Such a memo remembers nothing that a computation can see: a call gives None
whether it is remembered or not, and what it does else is a line in a log. So a forward that runs again may find it
filled, where the first one did not. That holds if

- the function's code is no more than that: a method of its first argument is called, which logs (`says_once`);
- all that it was called with are loggers and values that cannot change;
- the way of a line from these loggers leads through nothing but `logging`'s own classes to a stream of `io`: a filter,
  a handler or a formatter of somebody's own may count, or draw random numbers, and would do so once too little.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import logging
import types
from typing import Any

from memscale._torch import harmless
from memscale._torch.entries import LruCache

_SAYING = harmless.words("debug info warning error critical log")
_STEPS = harmless.words(
    "CACHE RESUME NOP POP_TOP PUSH_NULL PRECALL KW_NAMES EXTENDED_ARG LOAD_METHOD LOAD_ATTR LOAD_CONST BUILD_MAP "
    "BUILD_LIST BUILD_TUPLE DICT_MERGE LIST_EXTEND LIST_TO_TUPLE CALL_INTRINSIC_1 RETURN_VALUE RETURN_CONST NOT_TAKEN"
)
_KINDS = ("LOAD_FAST", "CALL")
_SHOWING = frozenset({"logging", "_pytest.logging"})
"""Python modules whose handlers and formatters show a line and do nothing else, in a test run as well."""
_STREAMS = frozenset({"_io", "io", "codecs", "_pytest", "ipykernel"})
_METHODS = ("_log", "handle", "callHandlers", "makeRecord", "isEnabledFor", "getEffectiveLevel", *sorted(_SAYING))


def says_once(value: Any) -> bool:
    """Whether it is such a memo, and all that it has remembered was said by plain loggers."""
    if not isinstance(value, LruCache) or not _only_says(value.__wrapped__):
        return False
    return _is_logging_as_shipped() and all(map(_is_of_plain_logger, _keys_of(value)))


def is_said_by_plain_logger(frame: types.FrameType) -> bool:
    """Whether a call of the function inside of such a memo leads to plain loggers alone."""
    name = frame.f_code.co_varnames[0]
    return _is_logging_as_shipped() and _is_plain_logger(frame.f_locals.get(name))


def _only_says(function: Any) -> bool:
    if type(function) is not types.FunctionType or function.__closure__ or function.__defaults__:
        return False
    return bool(function.__code__.co_argcount) and _is_saying_code(function.__code__)


@functools.lru_cache(maxsize=256)
def _is_saying_code(code: types.CodeType) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    known = all(step.opname in _STEPS or step.opname.startswith(_KINDS) for step in steps)
    texts = all(constant is None or isinstance(constant, str) for constant in code.co_consts)
    if not known or not texts or not code.co_names or not _SAYING.issuperset(code.co_names):
        return False
    said = [step.argval for before, step in itertools.pairwise(steps) if _reads_first(before, code)]
    asked = [step for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return len(said) == len(asked) == 1 and said == [asked[0].argval] and _gives_nothing(steps)


def _reads_first(step: dis.Instruction, code: types.CodeType) -> bool:
    return step.opname.startswith("LOAD_FAST") and step.argval == code.co_varnames[0]


def _gives_nothing(steps: list[dis.Instruction]) -> bool:
    """Whether it returns None, and nothing else."""
    for before, step in itertools.pairwise(steps):
        if step.opname == "RETURN_VALUE" and not (before.opname == "LOAD_CONST" and before.argval is None):
            return False
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
    return True


def _keys_of(cache: Any) -> list[Any]:
    """What it was called with."""
    tables = [held for held in gc.get_referents(cache) if type(held) is dict and held is not vars(cache)]
    return [key for table in tables for key in table]


def _is_of_plain_logger(key: Any) -> bool:
    if type(key) is not tuple or not key:
        return False
    marks = (object, type)  # between positional and keyword arguments, and the types of arguments
    rest_is_fixed = all(harmless.is_immutable(each) or type(each) in marks for each in key[1:])
    return _is_plain_logger(key[0]) and rest_is_fixed


def _is_plain_logger(logger: Any) -> bool:
    """Whether its lines go through nothing that somebody has written."""
    while logger is not None:
        if type(logger) not in (logging.Logger, logging.RootLogger) or logger.filters:
            return False
        if any(name in vars(logger) for name in _METHODS) or not all(map(_is_plain_handler, logger.handlers)):
            return False
        logger = logger.parent if logger.propagate else None
    return True


def _is_plain_handler(handler: Any) -> bool:
    formatter, stream = handler.formatter, getattr(handler, "stream", None)
    kinds = [type(handler), *([] if formatter is None else [type(formatter)])]
    is_shown_plainly = all(kind.__module__ in _SHOWING for kind in kinds) and not handler.filters
    is_changed = any(name in vars(handler) for name in ("emit", "handle", "format", "filter", "acquire", "release"))
    return is_shown_plainly and not is_changed and type(stream).__module__.partition(".")[0] in {*_STREAMS, "builtins"}


def _is_logging_as_shipped() -> bool:
    if logging.getLogRecordFactory() is not logging.LogRecord:
        return False
    return all(getattr(logging.Logger, name).__module__ == "logging" for name in _METHODS)
