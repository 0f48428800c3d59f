"""What people see, and where it goes."""

from __future__ import annotations

import contextlib
import io
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memscale
from memscale import Config, ConfigError
from memscale._decide import decide
from memscale._decide.eligible import resolve
from memscale.report import console
from tests.models import Mlp
from tests.profiles import hardware_of, profile_of

pytestmark = pytest.mark.unit
LOGGER = logging.getLogger("memscale")
PLAN = decide(profile_of(4), resolve(Config(force_optimize=True), hardware_of()))


@contextlib.contextmanager
def no_handlers() -> Iterator[None]:
    """An application that has not configured logging: pytest's own handlers stand aside."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_without_handlers_it_is_printed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with no_handlers():
        console.show_plan(PLAN)
        console.show_hardware(hardware_of())
    out, err = capsys.readouterr()
    assert out == ""
    assert PLAN.explain() in err
    assert "memscale: hardware: test card" in err


@pytest.mark.parametrize("how", ["level", "disabled", "all disabled"])
def test_an_application_that_wants_no_records_is_not_printed_to(
    how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    target, name, value = {
        "level": (LOGGER, "level", logging.WARNING),
        "disabled": (LOGGER, "disabled", True),
        "all disabled": (LOGGER.manager, "_disable", logging.CRITICAL),
    }[how]
    monkeypatch.setattr(target, name, value)
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    model = Mlp()
    with no_handlers():
        console.show_plan(PLAN)
        memscale.wrap(model, Config(log_file=str(tmp_path / "log")), torch.zeros(2, 64))
    memscale.detach(model)
    monkeypatch.undo()
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    assert capsys.readouterr() == ("", "")


def test_with_handlers_it_is_a_record(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        console.show_plan(PLAN)
    assert capsys.readouterr() == ("", "")
    assert [record.name for record in caplog.records] == ["memscale"]
    assert caplog.records[0].getMessage() == PLAN.explain()


def test_an_application_that_logs_to_a_file_is_an_application_that_logs(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.FileHandler(tmp_path / "app.log")
    with no_handlers():
        logging.getLogger().addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        console.show_plan(PLAN)
        LOGGER.setLevel(logging.NOTSET)
    handler.close()
    assert capsys.readouterr().err == ""
    assert "Plan for" in (tmp_path / "app.log").read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with no_handlers():
        console.show_plan(PLAN)
    text = terminal.getvalue()
    assert "blocks.0" in text
    assert "Plan for Model" in text
    assert "│" in text


def test_long_lists_are_shortened() -> None:
    many = decide(profile_of(60), resolve(Config(), hardware_of()))
    rows = console.shortened(many.rows)
    assert len(rows) < len(many.rows)
    assert rows[0] == many.rows[0]
    assert rows[-1] == many.rows[-1]
    assert console.shortened(PLAN.rows) == PLAN.rows


# ---- through wrap


def wrapped(**fields: Any) -> Any:
    return memscale.wrap(Mlp(depth=1), Config(**fields), sample_input=torch.ones(2, 64))


def test_enable_logging_gives_the_hardware_line_and_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        wrapped()
    assert "hardware:" in caplog.text
    assert "Plan for Mlp" in caplog.text


def test_disable_logging_is_silent(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        wrapped(enable_logging=False)
    assert caplog.text == ""
    assert capsys.readouterr() == ("", "")


def test_the_log_file_gets_it_and_is_closed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "memscale.log"
    model = wrapped(log_file=path)
    assert len(LOGGER.handlers) == 1
    memscale.detach(model)
    assert LOGGER.handlers == []
    assert LOGGER.level == logging.NOTSET
    text = path.read_text()
    assert "Plan for Mlp" in text
    assert "hardware:" in text


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_log_files_close_in_any_order(tmp_path: pathlib.Path, order: tuple[int, int]) -> None:
    models = [wrapped(log_file=tmp_path / f"{index}.log") for index in range(2)]
    memscale.detach(models[order[0]])
    LOGGER.info("still there")
    memscale.detach(models[order[1]])
    assert LOGGER.level == logging.NOTSET
    assert "still there" in (tmp_path / f"{order[1]}.log").read_text()
    assert "still there" not in (tmp_path / f"{order[0]}.log").read_text()


def test_the_users_level_is_left_alone(tmp_path: pathlib.Path) -> None:
    LOGGER.setLevel(logging.DEBUG)
    try:
        memscale.detach(wrapped(log_file=tmp_path / "x.log"))
        assert LOGGER.level == logging.DEBUG
    finally:
        LOGGER.setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", ["", "missing/x.log"])
def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path: pathlib.Path, name: str) -> None:
    model = Mlp(depth=1)
    before = set(vars(model))
    path = tmp_path / name
    with pytest.raises(ConfigError, match="log_file="):
        memscale.wrap(model, Config(log_file=path))
    assert set(vars(model)) == before
    assert LOGGER.handlers == []


def test_no_handler_is_forced_on_the_application() -> None:
    before = (list(LOGGER.handlers), list(logging.getLogger().handlers))
    model = wrapped(enable_logging=True)
    assert (list(LOGGER.handlers), list(logging.getLogger().handlers)) == before
    memscale.detach(model)
