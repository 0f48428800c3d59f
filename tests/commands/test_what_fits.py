"""`memscale table`: what is asked, what follows, what is kept, and what the page says of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex

import pytest
import torch

from memscale import zoo
from memscale._errors import MemScaleError
from memscale.cli import main
from memscale.commands.what_fits import (
    CARDS,
    FAMILIES,
    NUM_PARAMETERS,
    Answer,
    Kind,
    Log,
    Question,
    is_settled,
    page,
    plan_all,
    wanted,
)
from tests.lanes import full

pytestmark = pytest.mark.unit
ROOT = pathlib.Path(__file__).parent.parent.parent
GB = 10**9
SMALL, LARGE = Question("RTX 3070", "gpt2", "full"), Question("RTX 3070", "gpt2-medium", "full")


def answer(question: Question, fits: bool, **fields: object) -> Answer:
    known = {
        "total_bytes": 6 * GB,
        "host_bytes": GB,
        "step_ms": 100.0,
        "slowdown": 1.25,
        "what": "checkpoint: 3 layers",
    }
    return Answer(question, 124_000_000, fits, **{**known, **fields})  # type: ignore[arg-type]


def test_every_model_and_card_is_known() -> None:
    for question in wanted(CARDS, FAMILIES):
        zoo.find_entry(question.model)
    for models in FAMILIES.values():
        sizes = [NUM_PARAMETERS[name] for name in models]
        assert sizes == sorted(sizes), "the smallest first"


@full
@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_parameters_are_counted(name: str) -> None:
    assert sum(parameter.numel() for parameter in zoo.build(name).parameters()) == NUM_PARAMETERS[name]


def test_what_is_likely_to_fit_is_asked_first() -> None:
    order = wanted([8, 48], ["GPT-2"], ["full"])
    assert [(question.card, question.model) for question in order[:3]] == [
        ("RTX 3070", "gpt2-medium"),
        ("RTX A6000", "gpt2-xl"),
        ("RTX 3070", "gpt2-large"),
    ]
    assert len(order) == 8
    assert sum(parameter.numel() for parameter in zoo.build("gpt2").parameters()) == NUM_PARAMETERS["gpt2"]


def test_what_follows_is_not_asked() -> None:
    log = Log().with_answer(answer(SMALL, fits=False))
    assert is_settled(log, LARGE)
    assert not is_settled(log, dataclasses.replace(LARGE, kind="lora"))
    assert is_settled(Log().with_answer(answer(LARGE, fits=True)), SMALL)
    assert not is_settled(Log().with_answer(answer(LARGE, fits=False)), SMALL)
    failed = Log().with_answer(Answer(SMALL, 1, False, error="it could not be profiled"))
    assert not is_settled(failed, LARGE), "an error says nothing about larger models"
    assert list(plan_all(log, [SMALL, LARGE])) == []


def test_a_log_is_read_as_it_was_saved(tmp_path: pathlib.Path) -> None:
    log = Log(64.0, "0.1.0").with_answer(answer(SMALL, fits=True))
    log.save(tmp_path / "log.json")
    assert Log.load(tmp_path / "log.json") == log
    (tmp_path / "log.json").write_text('{"answers": 3}')
    with pytest.raises(MemScaleError, match="is not a log of memscale table"):
        Log.load(tmp_path / "log.json")


def test_a_cell_says_what_is_not_known() -> None:
    log = Log().with_answer(answer(SMALL, fits=True))
    (cell,) = page.cells(log, "full")
    assert (cell.size, cell.family, cell.is_final) == (8, "GPT-2", False)
    assert "gpt2 or larger" in "\n".join(page.lines(log))
    log = log.with_answer(answer(LARGE, fits=False))
    assert page.cells(log, "full")[0].is_final
    text = page.markdown(log)
    assert "| 8 GB | GPT-2 | gpt2 | 6.00 GB | 100 ms, 1.25x | 1.00 GB | balanced | gpt2-medium |" in text
    assert f"answers 4 of {len(wanted(CARDS, FAMILIES))} questions" in text
    none = page.cells(Log().with_answer(answer(SMALL, fits=False)), "full")[0]
    assert (none.best, none.is_final) == (None, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=full)])
def test_a_cell_is_reproduced_by_its_command(kind: Kind, tmp_path: pathlib.Path) -> None:
    question = Question("RTX 3070", "vit-tiny", kind)
    (log,) = plan_all(Log(), [question])
    found = log.answers[0]
    assert found.fits
    assert not found.error
    path = tmp_path / "plan.json"
    assert main([*shlex.split(question.command(64.0))[1:], "--output", str(path)]) == 0
    plan = json.loads(path.read_text())
    assert plan["predicted_total_bytes"] == found.total_bytes
    assert plan["baseline_step_ms"] * plan["predicted_slowdown"] == pytest.approx(found.step_ms)


def test_adapters_are_what_is_trained() -> None:
    model = zoo.with_adapters(zoo.build("gpt2"), 4)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


def test_the_command_goes_on_from_its_log(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, target = tmp_path / "log.json", tmp_path / "page.md"
    Log(64.0, "x").with_answer(answer(SMALL, fits=True)).save(log)
    assert main(["table", "--log", str(log), "--show", "--page", str(target)]) == 0
    assert "gpt2 or larger" in capsys.readouterr().out
    assert target.read_text().startswith("# What can my card train?")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--card", "9"], "--card 9 is not known; it must be one of 8, 10"),
        (["--family", "Mamba"], "--family 'Mamba' is not known"),
        (["--kind", "half"], "must be one of full, lora"),
        (["--log", "x.json", "--page", "x.json"], "one would overwrite the other"),
        (["--host", "32", "--log", str(ROOT / "docs" / "results" / "what_fits.json")], "answers for a host of 64 GB"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "--show", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_host_needs_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--host", "64"]) == 2
    assert "comes with --gpu" in capsys.readouterr().err


def test_the_page_is_what_the_log_says() -> None:
    folder = ROOT / "docs" / "results"
    said = page.markdown(Log.load(folder / "what_fits.json"))
    assert (folder / "what_fits.md").read_text() == said, (
        "run `memscale table --log docs/results/what_fits.json --show --page docs/results/what_fits.md`"
    )
