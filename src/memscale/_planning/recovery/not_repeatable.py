"""Why a step that ran out of memory is not run again, and how that is said: the error stays the one that it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from memscale._errors import MemScaleError, shortened
from memscale._planning.recovery.watched_run import NotComparable


class NotRepeatable(MemScaleError):
    """Why a step is not run again."""


@contextlib.contextmanager
def in_other_words(failure: torch.OutOfMemoryError) -> Iterator[None]:
    """What else fails in a repetition is not the user's to see: the step ran out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, NotRepeatable):
        raise
    except NotComparable as error:
        raise NotRepeatable(str(error)) from None
    except Exception as error:
        said = f"{type(error).__name__}: {shortened(str(error))}"
        raise NotRepeatable(f"run again, it failed with {said}") from None


def unless_in_words(error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
    """The error without its frames, which hold activations; one that says all is raised as it is."""
    if getattr(error, "_is_in_words", False):
        raise error
    return error.with_traceback(None)


@contextlib.contextmanager
def in_words(failure: torch.OutOfMemoryError, where: str, numbers: Callable[[], str]) -> Iterator[None]:
    """What cannot be repeated is the error that it was, with the reason and with the numbers."""
    try:
        yield
    except NotRepeatable as reason:
        said = f"The batch is not run again after this failure in {where}: {reason}"
    else:
        return
    raise in_numbers(failure, said, numbers())


def in_numbers(failure: torch.OutOfMemoryError, said: str, numbers: str) -> torch.OutOfMemoryError:
    text = f"{shortened(str(failure))} {said.removesuffix('.')}; {numbers}"
    error = torch.OutOfMemoryError(text)
    error._is_in_words = True  # type: ignore[attr-defined]
    return error
