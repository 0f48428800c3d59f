"""What a command says while it works, which goes to stderr; and its result, which goes to stdout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memscale import _json, zoo


def print_result(data: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result, as JSON or as the lines that say the same."""
    print(_json.dumps(data) if as_json else "\n".join(lines), end="" if as_json else "\n")


def say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Say what takes time: a spinner on a terminal, a line elsewhere."""
    with status() as show:
        show(text)
        yield


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """The same for work in several parts: each says what it is."""
    if not sys.stderr.isatty():
        yield say
        return
    from rich.console import Console

    with Console(stderr=True).status("...") as shown:
        yield lambda text: shown.update(f"{text} ...")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Others' chatter is not ours to print: advice of `transformers`. What the model itself prints goes to stderr."""
    with zoo.quiet(), zoo.speaking_on_stderr():
        yield
