"""Stages of long work, and where they are shown. No test waits for a clock: work is late when the test says so."""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest
import torch

import memscale
from memscale import _progress
from memscale._progress import Board, stage
from memscale.report import console
from tests.models import features, small
from tests.report.test_console import no_handlers

NEVER_S = 1e6


def be_late() -> None:
    _progress._here.board._be_late()


def test_nothing_is_shown_of_what_is_soon_over() -> None:
    shown: list[str] = []
    with Board(shown.append, NEVER_S), stage("planning"):
        pass
    assert shown == []


def test_late_work_shows_its_stage_and_those_that_follow() -> None:
    shown: list[str] = []
    with Board(shown.append, NEVER_S), stage("planning"), stage("rehearsing"):
        be_late()
        with stage("measuring"):
            pass
    assert shown == ["rehearsing", "measuring"]


def test_the_clock_itself() -> None:
    shown: list[str] = []
    with stage("before"), Board(shown.append, 0.0) as board:
        board._timer.join()
        with stage("now"):
            pass
    assert shown == ["now"]


def test_a_board_inside_another_is_the_same_one() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with Board(outer.append, NEVER_S), stage("planning"), Board(inner.append, NEVER_S), stage("moving"):
        be_late()
    assert (outer, inner) == (["moving"], [])


def test_stages_of_other_threads_are_not_shown_here() -> None:
    shown: list[str] = []
    with Board(shown.append, NEVER_S):
        be_late()
        other = threading.Thread(target=lambda: stage("elsewhere").__enter__())
        other.start()
        other.join()
    assert shown == []


def test_no_thread_is_left_by_work_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), Board(print, NEVER_S), stage("planning"):
        raise ZeroDivisionError
    assert getattr(_progress._here, "board", None) is None
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_line_a_stage_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMSCALE_PROGRESS")
    with no_handlers(), console.progress(delay_s=NEVER_S), stage("planning GPT2"):
        be_late()
        with stage("rehearsing a step"):
            pass
    assert capsys.readouterr().err.splitlines() == [
        "memscale: planning GPT2 ...",
        "memscale: rehearsing a step ...",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_changing_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSCALE_PROGRESS")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with no_handlers(), console.progress(delay_s=NEVER_S), stage("planning GPT2"):
        be_late()
    assert "memscale: planning GPT2 ..." in terminal.getvalue()


def test_an_application_that_listens_gets_records(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMSCALE_PROGRESS")
    with caplog.at_level(logging.INFO, logger="memscale"), console.progress(delay_s=NEVER_S), stage("planning GPT2"):
        be_late()
    assert "planning GPT2 ..." in caplog.text
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("is_wanted", "switch"), [(False, "1"), (True, "0")])
def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, is_wanted: bool, switch: str) -> None:
    monkeypatch.setenv("MEMSCALE_PROGRESS", switch)
    with console.progress(is_wanted):
        assert getattr(_progress._here, "board", None) is None


def test_what_wrapping_names() -> None:
    """Planning, and every rehearsal."""
    shown: list[str] = []
    config = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
    with Board(shown.append, NEVER_S):
        be_late()
        model = memscale.wrap(small(), config, sample_input=features(0))
    assert shown[:2] == ["planning Chain", "rehearsing a training step of Chain on fake tensors"]
    assert any(text.startswith("rehearsing a step with checkpoint") for text in shown)
    memscale.detach(model)


def test_moving_a_model_is_named() -> None:
    from memscale._execute.executor import execute
    from memscale._execute.settings import ExecutionSettings
    from tests.parity import plan_of

    shown: list[str] = []
    with Board(shown.append, NEVER_S):
        be_late()
        execute(small(), plan_of([]), ExecutionSettings(device=torch.device("simgpu", 0))).detach()
    assert shown == ["moving Chain to simgpu:0"]
