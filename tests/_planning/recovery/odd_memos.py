"""Odd forwards, continued: what looks like a message that is shown once, or like an attribute that is set by its name,
and is more than that. See odd_programs.py; messages.py and watched_run.py say what is harmless."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests._planning.recovery.odd_programs import program
from tests.techniques.offload.runs import DEVICE

REPEATED = (
    "message_shown_once", "attribute_set_by_name", "setter_that_hands_on", "frozen_dataclass_made_anew",
)  # fmt: skip
"""Those that are harmless, as libraries do them."""
FIRST = (
    "memo_first_used_in_the_step", "memo_first_used_that_draws", "memo_first_used_that_counts",
    "memo_first_used_whose_result_is_kept",
)  # fmt: skip
"""Those that fill in something in their first forward, which is the one that fails."""


# ---- messages that are shown once


@functools.lru_cache(None)
def say_once(self: Any, *args: Any, **kwargs: Any) -> None:
    self.info(*args, **kwargs)


def _logger(handler: logging.Handler | None = None) -> logging.Logger:
    """One that no other test has said anything with."""
    logger = logging.Logger("odd", logging.INFO)
    if handler is not None:
        logger.addHandler(handler)
    return logger


def _saying(logger: Any, seen: Any) -> Any:
    """A forward that says something for the first time in its fourth run, which is the one that fails."""
    runs = [0]
    say_once.cache_clear()

    def odd(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] >= 4:
            say_once(logger, "this is shown once")
        return x * 1.5

    return odd, lambda: (runs[0], seen())


@program
def message_shown_once() -> Any:
    return _saying(_logger(), lambda: None)


class Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@program
def message_that_a_handler_counts() -> Any:
    handler = Counting()
    return _saying(_logger(handler), lambda: handler.count)


class Drawing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        torch.rand(())


@program
def message_for_which_a_handler_draws() -> Any:
    odd, seen = _saying(_logger(Drawing()), lambda: None)

    def drawing(x: torch.Tensor) -> torch.Tensor:
        return odd(x) * torch.rand(()).item()

    return drawing, seen


class Filter(logging.Filter):
    count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        Filter.count += 1
        return False


@program
def message_that_a_filter_counts() -> Any:
    logger = _logger()
    Filter.count = 0
    logger.addFilter(Filter())
    return _saying(logger, lambda: Filter.count)


class Teller:
    """Looks like a logger to a memo."""

    def __init__(self) -> None:
        self.count = 0

    def info(self, text: str) -> None:
        self.count += 1


@program
def memo_of_an_object_that_counts() -> Any:
    teller = Teller()
    return _saying(teller, lambda: teller.count)


@program
def logger_of_a_class_that_counts() -> Any:
    class Own(logging.Logger):
        count = 0

        def info(self, *args: Any, **kwargs: Any) -> None:
            self.count += 1

    logger = Own("odd")
    return _saying(logger, lambda: logger.count)


@program
def memo_that_draws() -> Any:
    @functools.lru_cache(None)
    def factor(kind: str) -> float:
        return torch.rand(()).item()

    runs = [0]

    def odd(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return x * (factor(f"{runs[0] >= 4}") + torch.rand(()).item())

    return odd, lambda: runs[0]


# ---- attributes that are set by their names


class Kept:
    def __init__(self) -> None:
        self.count = 0


@program
def attribute_set_by_name() -> Any:
    kept = Kept()

    def odd(x: torch.Tensor) -> torch.Tensor:
        name, value = "count", kept.count + 1
        setattr(kept, name, value)
        return x * kept.count

    return odd, lambda: kept.count


@program
def function_set_by_name() -> Any:
    kept = Kept()
    kept.scale = lambda x: x

    def odd(x: torch.Tensor) -> torch.Tensor:
        before, name = kept.scale, "scale"
        value = lambda x: before(x) * 1.5  # noqa: E731
        setattr(kept, name, value)
        return value(x)

    return odd, lambda: kept.scale(1.0)


@program
def attribute_of_torch_set_by_name() -> Any:
    names = ["count"]

    def odd(x: torch.Tensor) -> torch.Tensor:
        count = getattr(F.silu, "count", 0) + 1
        setattr(F.silu, names[0], count)
        return x * count

    def seen() -> Any:
        count = F.silu.count
        del F.silu.count
        return count

    return odd, seen


@program
def attribute_of_torch_set_by_object() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        object.__setattr__(F.silu, "count", getattr(F.silu, "count", 0) + 1)
        return x * F.silu.count

    def seen() -> Any:
        count = F.silu.count
        del F.silu.count
        return count

    return odd, seen


@program
def attribute_of_a_class_set_by_its_type() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        type.__setattr__(nn.Identity, "count", getattr(nn.Identity, "count", 0) + 1)
        return x * nn.Identity.count

    def seen() -> Any:
        count = nn.Identity.count
        del nn.Identity.count
        return count

    return odd, seen


@program
def setter_that_is_kept() -> Any:
    put = object.__setattr__

    def odd(x: torch.Tensor) -> torch.Tensor:
        put(F.silu, "count", getattr(F.silu, "count", 0) + 1)
        return x * F.silu.count

    def seen() -> Any:
        count = F.silu.count
        del F.silu.count
        return count

    return odd, seen


@program
def table_of_a_function_of_torch() -> Any:
    """It is counted, and no value depends on it."""

    def odd(x: torch.Tensor) -> torch.Tensor:
        table = F.silu.__dict__
        table["count"] = table.get("count", 0) + 1
        return x * 1.5

    def seen() -> Any:
        count = F.silu.count
        del F.silu.count
        return count

    return odd, seen


class HandsOn:
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


@program
def setter_that_hands_on() -> Any:
    kept = HandsOn()
    kept.count = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.count = kept.count + 1
        return x * kept.count

    return odd, lambda: kept.count


@dataclasses.dataclass(frozen=True)
class Size:
    width: float


@program
def frozen_dataclass_made_anew() -> Any:
    return (lambda x: x * Size(1.5).width), lambda: None


# ---- tensors that are told to need a gradient


@program
def tensor_told_to_need_a_gradient() -> Any:
    """One that the forward has made: transformers' own checkpointing does so."""

    def odd(x: torch.Tensor) -> torch.Tensor:
        made = x.detach().mul(1.5)
        made.requires_grad_(True)
        return x * made

    return odd, lambda: None


@program
def kept_tensor_told_to_need_a_gradient() -> Any:
    kept = [torch.ones((), device=DEVICE)]

    def odd(x: torch.Tensor) -> torch.Tensor:
        factor = 1.5 if kept[0].requires_grad else 1.0
        kept[0].requires_grad_(True)
        return x * factor

    return odd, lambda: kept[0].requires_grad


@program
def kept_tensor_whose_flag_is_stored() -> Any:
    kept = (torch.ones(()), 0)

    def odd(x: torch.Tensor) -> torch.Tensor:
        tensor, factor = kept[0], 1.5 if kept[0].requires_grad else 1.0
        tensor.requires_grad = not tensor.requires_grad
        return x * factor

    return odd, lambda: kept[0].requires_grad


@program
def input_told_to_need_a_gradient() -> Any:
    """The tensor that reaches it is the model's own, whose flag decides about a factor."""
    seen: list[bool] = []

    def odd(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.requires_grad)
        return x.detach().requires_grad_(True) * 1.5 + x * 0.5

    return odd, lambda: seen


# ---- functions that remember, used for the first time in the step that fails


def _scaled(factor: Any, seen: Any) -> Any:
    return (lambda x: x * factor(2)), seen


@program
def memo_first_used_in_the_step() -> Any:
    @functools.lru_cache(None)
    def factor(number: int) -> float:
        return number / 3

    return _scaled(factor, lambda: factor.cache_info().currsize)


@program
def memo_first_used_that_draws() -> Any:
    @functools.lru_cache(None)
    def factor(number: int) -> float:
        return number * torch.rand(()).item()

    return _scaled(factor, lambda: torch.rand(()).item())


@program
def memo_first_used_that_counts() -> Any:
    kept = Kept()

    @functools.lru_cache(None)
    def factor(number: int) -> float:
        kept.count += 1
        return number + kept.count

    return _scaled(factor, lambda: kept.count)


@program
def memo_first_used_whose_result_is_kept() -> Any:
    kept: list[Any] = []

    @functools.lru_cache(None)
    def made(number: int) -> Kept:
        return Kept()

    def factor(number: int) -> float:
        kept.append(made(number))
        return 1.0 + (kept[0] is made(number))

    return _scaled(factor, lambda: len(kept))
