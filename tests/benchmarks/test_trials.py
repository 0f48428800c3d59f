"""Trials in a process of their own: what hangs or ends the process is a result, and a log is not tried again."""

from __future__ import annotations

import contextlib
import json
import pathlib

import pytest

from benchmarks.trials import Result, Server, run

WORDS = "tests.benchmarks.trial_words"


def test_a_process_answers_and_one_that_hangs_is_ended() -> None:
    with contextlib.closing(Server(WORDS)) as server:
        assert _without_time(server.ask(("good",), seconds=600)) == {"status": "tried good"}
        assert server.ask(("hang",), seconds=0.2) == "over 0 s"
        assert server.process.returncode is not None


def test_a_trial_is_told_what_it_took_of_the_processor_and_ended_when_it_took_too_much() -> None:
    with contextlib.closing(Server(WORDS)) as server:
        answer = server.ask(("good",), seconds=600)
        assert not isinstance(answer, str)
        assert float(answer["seconds"]) >= 0
        assert server.ask(("work",), seconds=1) == "over 1 s"


def test_the_end_of_a_process_is_a_result_and_the_next_trial_has_another(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    cases = [("end",), ("good",)]
    found = run(WORDS, cases, 600, log)
    assert found[("end",)] == {"status": "ended", "why": "the process ended with code 3"}
    assert _without_time(found[("good",)]) == {"status": "tried good"}
    assert [json.loads(line)["case"] for line in log.read_text().splitlines()] == [["end"], ["good"]]


def test_what_the_log_knows_is_not_tried_again(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps({"case": ["hang"], "status": "known"}) + "\n")
    assert run("no.such.module", [("hang",)], 600, log) == {("hang",): {"status": "known"}}


def _without_time(answer: Result | str) -> Result:
    assert not isinstance(answer, str)
    return {key: value for key, value in answer.items() if key != "seconds"}


@pytest.fixture(autouse=True)
def _quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Progress goes to standard error."""
