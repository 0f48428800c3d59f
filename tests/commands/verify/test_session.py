"""Sessions: whatever becomes of a trial's process is a result. The processes here are real, and small."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from memscale import _json
from memscale._errors import ConfigError, MemScaleError
from memscale.commands.verify.cases import CardCase
from memscale.commands.verify.record import Numbers, Record, Trial
from memscale.commands.verify.session import MARK, Session, new_record, without_paths
from tests.commands.verify.test_record import MACHINE

pytestmark = pytest.mark.unit
CASE = CardCase("gpt2", 4, 256)


def answering(*answers: Any) -> Any:
    """Makes processes that answer these, one after the other; text is a program instead."""
    left = list(answers)

    def command(arguments: Sequence[str]) -> list[str]:
        answer = left.pop(0)
        code = answer if isinstance(answer, str) else f"print({MARK + json.dumps(_json.encode(answer))!r})"
        return [sys.executable, "-c", code, *arguments]

    return command


def _saying(answer: str) -> str:
    """A program that answers with this expression, in which `o` is its order."""
    return f"import sys, os, json; o = json.loads(sys.argv[-1])['run']; print({MARK!r} + json.dumps({answer}))"


def trial(way: str, **fields: Any) -> Trial:
    return Trial(CASE.title, way, **{"outcome": "trained", "predicted": Numbers(4000, 4000, 8000), **fields})


def run(*answers: Any, record: Record | None = None) -> list[Record]:
    session = Session(command=answering(*answers))
    return list(session.run(record or new_record(MACHINE), [CASE]))


def test_each_trial_is_in_the_record_at_once() -> None:
    records = run(*(trial(way) for way in CASE.ways))
    assert [len(record.trials) for record in records] == [1, 2, 3, 4]


def test_a_budget_is_a_share_of_what_was_predicted() -> None:
    echo = _saying(
        "{'title': 'gpt2, 4 x 256', 'way': o['way'], 'outcome': 'trained', 'budget_bytes': o.get('budget_bytes')}"
    )
    last = run(trial("plain"), trial("plain again"), echo, echo)[-1]
    found = last.trial(CASE.title, "budget")
    assert found is not None
    assert found.budget_bytes == 6000


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "ended with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL: host memory may have run out"),
        (f"print('{MARK}' + '{{\"refused\": \"no such device\"}}')", "no such device"),
        (f'print(\'{MARK}\' + \'{{"crashed": "line", "detail": "RuntimeError: x"}}\')', "RuntimeError: x"),
    ],
)
def test_a_process_that_dies_is_a_result(program: str, said: str) -> None:
    last = run(program, *(trial(way) for way in CASE.ways[1:] if way != "budget"))[-1]
    failed = last.trial(CASE.title, "plain")
    assert failed is not None
    assert failed.outcome == "failed"
    assert said in failed.detail
    without = last.trial(CASE.title, "budget")
    assert without is not None
    assert "is not known" in without.detail


def test_what_is_there_is_kept_and_what_failed_is_tried_again() -> None:
    kept, failed = trial("plain", step_ms=1.0), trial("plain again", outcome="failed")
    before = Record(MACHINE, (kept, failed, trial("budget"), trial("lowest", outcome="out of memory")))
    records = run(trial("plain again"), record=before)
    assert len(records) == 1
    assert {each.outcome for each in records[0].trials} == {"trained", "out of memory"}
    assert records[0].trial(CASE.title, "plain") is kept


def test_looking() -> None:
    assert Session(command=answering(MACHINE)).look() == MACHINE
    with pytest.raises(ConfigError, match="no GPU"):
        Session(command=answering({"refused": "there is no GPU"})).look()
    with pytest.raises(MemScaleError, match="cannot be used: its process ended with code 1"):
        Session(command=answering("raise SystemExit(1)")).look()


def test_speeds_of_a_card_that_computes_nothing_are_not_measured() -> None:
    environment = "os.environ.get('MEMSCALE_MEASURE')"
    show = _saying(f"{{'title': 't', 'way': 'plain', 'outcome': 'trained', 'detail': {environment}}}")
    session = Session(
        command=answering(dataclasses.replace(MACHINE, computes=False), show), environment={"PATH": "/usr/bin"}
    )
    record = new_record(session.look())
    assert next(iter(session.run(record, [CASE]))).trials[0].detail == "0"


def test_paths_are_not_sent() -> None:
    said = without_paths('File "/home/someone/my project/train.py", line 3, in C:\\Users\\me\\x.py')
    assert said == 'File "train.py", line 3, in x.py'
