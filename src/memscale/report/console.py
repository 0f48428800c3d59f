"""The hardware line and the plan, for people.

An application that has configured logging gets them as records of the logger `memscale`. Otherwise they are printed
to stderr: as a rich table on a terminal, as plain text elsewhere. No handler is forced on the application.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from memscale._config import Config
from memscale._errors import ConfigError, quoted, shown
from memscale._hardware import Hardware
from memscale._plan import LayerRow, Plan
from memscale._progress import DELAY_S, Board
from memscale._units import show_bytes
from memscale.report.explain import head_lines, reason_text, techniques_text

logger = logging.getLogger("memscale")

_MANY_ROWS = 24


def open_log(config: Config, on_detach: Callable[..., Any]) -> None:
    """Send the logger's records to `config.log_file` until detached; a path that cannot be written is an error."""
    if config.log_file is None:
        return
    try:
        handler = _LogFile(config.log_file)
    except OSError as error:
        raise ConfigError(f"log_file={shown(config.log_file)} cannot be written: {quoted(error)}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.INFO)
    on_detach(_close_log, handler)
    handler.level_before = next((other.level_before for other in _log_files()), logger.level)
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)


class _LogFile(logging.FileHandler):
    """Our own file; several models may write one each, and be detached in any order."""

    level_before = logging.NOTSET
    """The logger's level before the first of them."""


def _log_files() -> list[_LogFile]:
    return [handler for handler in logger.handlers if isinstance(handler, _LogFile)]


def _close_log(handler: _LogFile) -> None:
    logger.removeHandler(handler)
    handler.close()
    if not _log_files():
        logger.setLevel(handler.level_before)


def show_hardware(hardware: Hardware) -> None:
    _emit("hardware: " + hardware.describe(), None)


def show(text: str) -> None:
    _emit(text, None)


def show_plan(plan: Plan) -> None:
    _emit(plan.explain(), plan)


def _emit(text: str, plan: Plan | None) -> None:
    logger.info("%s", text)
    if _application_listens() or _application_declines():
        return
    if plan is not None and sys.stderr.isatty():
        _print_table(plan)
    else:
        print(f"memscale: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress(is_wanted: bool = True, delay_s: float = DELAY_S) -> Iterator[None]:
    """Show the stages of what is done inside, if it lasts: on a terminal in one line that changes, else a line each.

    `MEMSCALE_PROGRESS=0` turns it off.
    """
    if not is_wanted or os.environ.get("MEMSCALE_PROGRESS") == "0":
        yield
        return
    with contextlib.ExitStack() as undo:
        undo.enter_context(Board(_StageLine(undo), delay_s))
        yield


class _StageLine:
    """Where stages are shown."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._closing = undo.enter_context(contextlib.ExitStack())
        self._line: Any = None

    def __call__(self, text: str) -> None:
        logger.info("%s ...", text)
        if _application_listens() or _application_declines():
            return
        if not sys.stderr.isatty():
            print(f"memscale: {text} ...", file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._line is None:
            # Without a thread that animates it: rich does not wait for its end.
            live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._line = self._closing.enter_context(live)
        self._line.update(Text(f"memscale: {text} ..."), refresh=True)


def _application_listens() -> bool:
    """Whether somebody other than our own log files receives the records."""
    current: logging.Logger | None = logger
    while current is not None:
        if any(not isinstance(handler, _LogFile) for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


def _application_declines() -> bool:
    """Whether our logger was told to be quiet. What our own log files did to its level does not count."""
    level = next((file.level_before for file in _log_files()), logger.level)
    return level > logging.INFO or logger.disabled or logger.manager.disable >= logging.INFO


def _print_table(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for column in ("layer", "params", "activations", "forward", "techniques", "rule"):
        table.add_column(column, justify="right" if column in ("params", "activations", "forward") else "left")
    for row in shortened(plan.rows):
        table.add_row(
            row.module_fqn,
            show_bytes(row.param_bytes),
            show_bytes(row.activation_bytes),
            f"{row.forward_ms:.2f} ms",
            techniques_text(row),
            reason_text(row.reason),
        )
    console = Console(stderr=True)
    console.print("\n".join(head_lines(plan)), highlight=False)
    console.print(table)


def shortened(rows: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    """A long list of layers with its middle left out; `plan.explain()` has them all."""
    if len(rows) <= _MANY_ROWS:
        return rows
    return (*rows[: _MANY_ROWS // 2], *rows[-_MANY_ROWS // 2 :])
