"""Records: written and read, compared in words, shown as tables."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from memscale._errors import MemScaleError, UnknownModelError
from memscale.commands.verify import cases, words
from memscale.commands.verify.record import Machine, Numbers, Record, Trial, parity_of

pytestmark = pytest.mark.unit
GB = 10**9
MACHINE = Machine("RTX 3090", "cuda", 24 * GB, 23 * GB, "sm_86", 64 * GB, {"torch": "2.13.0"}, computes=True)
PLAIN = Trial(
    "gpt2, 4 x 256",
    "plain",
    "trained",
    predicted=Numbers(4 * GB, 4 * GB, 5 * GB, 6 * GB, 0),
    measured=Numbers(None, 4 * GB, 5 * GB, 6 * GB, 0),
    nvidia_smi=6 * GB,
    predicted_step_ms=100.0,
    step_ms=110.0,
    losses=((3.5).hex(), (3.25).hex()),
    weights="abc",
)
BUDGET = dataclasses.replace(PLAIN, way="budget", what="checkpoint: 3 layers", budget_bytes=5 * GB)
OTHER = dataclasses.replace(PLAIN, losses=((3.5).hex(), (3.0).hex()), weights="def")


def record_of(*trials: Trial, machine: Machine = MACHINE) -> Record:
    return Record(machine, trials, made="2026-01-02")


def test_what_is_saved_is_read(tmp_path: pathlib.Path) -> None:
    record = record_of(PLAIN, BUDGET)
    record.save(tmp_path / "card.json")
    assert Record.load(tmp_path / "card.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "lacks"), ("nothing", "is not what memscale verify writes"), ('{"format": []}', "lacks")]
)
def test_what_is_no_record_is_refused(tmp_path: pathlib.Path, text: str, said: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(MemScaleError, match=said):
        Record.load(path)


def test_another_format_is_refused(tmp_path: pathlib.Path) -> None:
    dataclasses.replace(record_of(PLAIN), format=99).save(tmp_path / "card.json")
    with pytest.raises(MemScaleError, match="has format 99"):
        Record.load(tmp_path / "card.json")


def test_a_trial_replaces_an_earlier_one() -> None:
    record = record_of(PLAIN, BUDGET).with_trial(dataclasses.replace(PLAIN, step_ms=1.0))
    assert [(trial.way, trial.step_ms) for trial in record.trials] == [("budget", 110.0), ("plain", 1.0)]
    assert record.trial("gpt2, 4 x 256", "lowest") is None


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ((PLAIN, BUDGET), "identical, bit for bit"),
        (
            (PLAIN, dataclasses.replace(OTHER, way="budget")),
            "DIFFERS: losses by 2.5e-01 at most (the plain model was not",
        ),
        (
            (PLAIN, dataclasses.replace(PLAIN, way="plain again"), dataclasses.replace(OTHER, way="budget")),
            "DIFFERS: losses by 2.5e-01 at most",
        ),
        (
            (PLAIN, dataclasses.replace(OTHER, way="plain again"), dataclasses.replace(OTHER, way="budget")),
            "plain runs differ by themselves here",
        ),
        ((dataclasses.replace(PLAIN, outcome="out of memory"), BUDGET), "nothing to compare with"),
        ((PLAIN, dataclasses.replace(BUDGET, outcome="out of memory")), "-"),
    ],
)
def test_parity_in_words(trials: tuple[Trial, ...], said: str) -> None:
    assert parity_of(record_of(*trials), PLAIN.title, "budget").startswith(said)


def test_garbage_is_not_called_parity() -> None:
    emulated = dataclasses.replace(MACHINE, computes=False, clock="none")
    record = record_of(PLAIN, BUDGET, machine=emulated)
    assert parity_of(record, PLAIN.title, "budget").startswith("not meaningful")
    text = "\n".join(words.record_lines(record))
    assert "losses, weights and times mean nothing" in text
    assert "110.0" not in text, "a time of nothing"


def test_the_table_has_every_number() -> None:
    failed = dataclasses.replace(
        PLAIN, title="gpt2-xl, 1 x 512", outcome="out of memory", measured=Numbers(), detail="it was too large"
    )
    text = "\n".join(words.record_lines(record_of(PLAIN, BUDGET, failed)))
    assert "4.000     5.000  6.000" in text
    assert "+0.00%" in text
    assert "gpt2-xl, 1 x 512, plain: out of memory: it was too large" in text
    assert "more than their budget: none (of 1)" in text
    over = dataclasses.replace(BUDGET, budget_bytes=GB)
    assert "more than their budget: gpt2, 4 x 256 budget" in "\n".join(words.record_lines(record_of(PLAIN, over)))
    page = "\n".join(words.record_markdown(record_of(PLAIN, BUDGET), "rtx-3090.json"))
    assert "## RTX 3090\n" in page
    assert (
        "| gpt2, 4 x 256 | plain | 4.000 | 5.000 | 6.000 | 4.000 | 5.000 | 6.000 | 6.000 | +0.00% | 100.0 | 110.0 |"
        in page
    )


def test_cases_by_name() -> None:
    named = cases.named_cases(["gpt2", "bert-tiny"], None, 64)
    assert [case.title for case in named] == ["gpt2, 4 x 64", "bert-tiny, 4 x 64"]
    assert len(cases.default_cases("cuda")) == 7
    assert sum(case.is_large for case in cases.default_cases("cuda")) == 2
    assert not any(case.is_large for case in cases.default_cases("cuda", with_large=False))
    with pytest.raises(UnknownModelError):
        cases.named_cases(["gpt9"], None, None)
