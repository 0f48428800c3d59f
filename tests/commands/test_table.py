"""`memscale table`: what is asked, what follows, what is kept, and what the page says of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
from typing import Any

import pytest
import torch
from torch import nn

from memscale import zoo
from memscale._errors import MemScaleError
from memscale._planning import stage
from memscale._profile.inputs import derive_inputs
from memscale._profile.profiler import open_rehearsal
from memscale.cli import main
from memscale.commands.table import (
    CARDS,
    FAMILIES,
    NUM_PARAMETERS,
    Answer,
    Kind,
    Log,
    Question,
    Stairs,
    ask,
    fits,
    page,
    plan_all,
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
    for models in FAMILIES.values():
        for model in models:
            zoo.find_entry(model)
        sizes = [NUM_PARAMETERS[name] for name in models]
        assert sizes == sorted(sizes), "the smallest first"


@full
@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_parameters_are_counted(name: str) -> None:
    assert sum(parameter.numel() for parameter in zoo.build(name).parameters()) == NUM_PARAMETERS[name]


def walk(stairs: Stairs, largest: dict[int, str], log: Log | None = None) -> tuple[Log, list[tuple[int, str]]]:
    """What is asked, where these are the largest models that fit cards of these sizes."""
    log, models, asked = log or Log(), FAMILIES[stairs.family], list[tuple[int, str]]()
    while (question := stairs.next_question(log)) is not None:
        is_small = models.index(question.model) <= models.index(largest[question.size])
        log = log.with_answer(answer(question, fits=is_small))
        asked.append((question.size, question.model))
        assert len(asked) <= len(models) * len(CARDS), "it ends"
    return log, asked


def test_a_family_is_asked_about_like_a_walk_down_stairs() -> None:
    largest = {8: "gpt2", 24: "gpt2-large", 48: "gpt2-large"}
    log, asked = walk(Stairs("GPT-2", "full", (8, 24, 48)), largest)
    assert asked == [
        (48, "gpt2-xl"),
        (48, "gpt2-large"),
        (24, "gpt2-large"),
        (8, "gpt2-large"),
        (8, "gpt2-medium"),
        (8, "gpt2"),
    ]
    found = {cell.size: cell for cell in page.cells(log, "full") if cell.family == "GPT-2"}
    for size, model in largest.items():
        assert found[size].is_final
        assert found[size].best is not None
        assert found[size].best.question.model == model
    assert "gpt2-medium or larger" not in page.markdown(log)


def test_a_walk_goes_on_where_it_was_stopped() -> None:
    stairs = Stairs("GPT-2", "full", (8, 24))
    log, asked = walk(stairs, {8: "gpt2", 24: "gpt2-xl"})
    half = Log(answers=log.answers[:2])
    assert walk(stairs, {8: "gpt2", 24: "gpt2-xl"}, half)[1] == asked[2:]
    assert stairs.next_question(log) is None
    assert list(plan_all(log, [stairs])) == []


def test_what_no_host_can_hold_is_not_planned() -> None:
    """13 billion weights in fp32 with two moments are 156 GB."""
    first = Stairs("Llama", "full").next_question(Log())
    assert first == Question("RTX A6000", "llama-3-8b", "full")
    assert Stairs("Llama", "full").next_question(Log(host_gb=256.0)) == Question("RTX A6000", "llama-2-13b", "full")
    assert fits(Log(), Question("RTX A6000", "llama-2-13b", "full")) is False
    assert fits(Log(), Question("RTX A6000", "llama-2-13b", "lora")) is None


def test_what_follows_from_an_answer() -> None:
    larger_card = dataclasses.replace(SMALL, card="RTX 3090")
    no = Log().with_answer(answer(SMALL, fits=False))
    assert fits(no, LARGE) is False
    assert fits(no, larger_card) is None
    assert fits(no, dataclasses.replace(LARGE, kind="lora")) is None
    yes = Log().with_answer(answer(LARGE, fits=True))
    assert fits(yes, SMALL) is True
    assert fits(yes, larger_card) is True, "a smaller model on a larger card"
    assert fits(Log().with_answer(answer(larger_card, fits=False)), LARGE) is False
    assert fits(Log().with_answer(answer(LARGE, fits=False)), SMALL) is None
    failed = Log().with_answer(Answer(SMALL, 1, False, error="it could not be profiled"))
    assert fits(failed, LARGE) is None, "an error says nothing about larger models"


def test_a_cell_of_another_version_says_so() -> None:
    log = Log(version="2.0.0").with_answer(answer(SMALL, fits=True, version="1.0.0"))
    assert "gpt2 or larger (1.0.0)" in page.markdown(log)
    assert "larger (2.0.0)" not in page.markdown(
        Log(version="2.0.0").with_answer(answer(SMALL, fits=True, version="2.0.0"))
    )


def test_a_cell_needs_a_plan_for_its_own_card() -> None:
    """That a smaller card trains a larger model shows that there is more, and no figures for it."""
    log = (
        Log().with_answer(answer(LARGE, fits=True)).with_answer(answer(Question("RTX 3080", "gpt2", "full"), fits=True))
    )
    found = {cell.size: cell for cell in page.cells(log, "full") if cell.family == "GPT-2"}
    assert not found[10].is_final
    assert found[10].best is not None
    assert found[10].best.question.model == "gpt2"
    assert found[48].best is None


def test_a_log_is_read_as_it_was_saved(tmp_path: pathlib.Path) -> None:
    log = Log(64.0, "0.1.0").with_answer(answer(SMALL, fits=True))
    log.save(tmp_path / "log.json")
    assert Log.load(tmp_path / "log.json") == log
    (tmp_path / "log.json").write_text('{"answers": 3}')
    with pytest.raises(MemScaleError, match="is not a log of memscale table"):
        Log.load(tmp_path / "log.json")


def test_a_cell_says_what_is_not_known() -> None:
    log = Log().with_answer(answer(SMALL, fits=True))
    cell = page.cells(log, "full")[0]
    for text in ("\n".join(page.lines(log)), page.markdown(log)):
        assert all(f"{gb} GB {card}" in text for gb, card in CARDS.items()), "whose times these are"
    assert (cell.size, cell.family, cell.is_final) == (8, "GPT-2", False)
    assert "gpt2 or larger" in "\n".join(page.lines(log))
    log = log.with_answer(answer(LARGE, fits=False))
    assert page.cells(log, "full")[0].is_final
    text = page.markdown(log)
    assert "| 8 GB | GPT-2 | gpt2 | 6.00 GB | 100 ms, 1.25x | 1.00 GB | balanced | gpt2-medium |" in text
    num_questions = sum(map(len, FAMILIES.values())) * len(CARDS) * 2
    assert re.search(rf"answers \d+ of {num_questions} questions", text)
    none = page.cells(Log().with_answer(answer(SMALL, fits=False)), "full")[0]
    assert (none.best, none.is_final) == (None, True)


def test_a_cell_without_figures_says_why_and_has_a_command() -> None:
    log = Log().with_answer(answer(LARGE, fits=True))
    log = log.with_answer(Answer(Question("RTX 3070", "qwen2.5-0.5b", "full"), 1, False, error="it has no inputs"))
    text = page.markdown(log)
    assert "| 10 GB | GPT-2 | gpt2-medium or larger, as a smaller card trains it: not planned for yet |" in text
    assert "| 48 GB | Llama | not planned for yet |" in text
    largest = page.markdown(Log().with_answer(answer(Question("RTX 3070", "gpt2-xl", "full"), fits=True)))
    assert "| 10 GB | GPT-2 | gpt2-xl, as a smaller card trains it: not planned for yet |" in largest
    assert "| 8 GB | Qwen | not known: it has no inputs |" in text
    assert "| 48 GB | FLUX | none: weights and optimizer state alone exceed card and host |" in text
    assert "memscale table --log docs/results/what_fits.json --card 48 --family Llama --kind full\n" in text
    no_plan = page.markdown(Log().with_answer(answer(SMALL, fits=False)))
    assert "| 8 GB | GPT-2 | none: no plan fits |" in no_plan
    num_cells = len(CARDS) * len(FAMILIES) * 2
    assert text.count("\nmemscale ") == num_cells, "a command each"
    assert f"7 of {num_cells} cells have their answer" in text, "FLUX in full on six cards, and GPT-2 Medium on one"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=full)])
def test_a_cell_is_reproduced_by_its_command(kind: Kind, tmp_path: pathlib.Path) -> None:
    question = Question("RTX 3070", "vit-tiny", kind)
    found = ask(question)
    assert found.fits
    assert not found.error
    path = tmp_path / "plan.json"
    assert main([*shlex.split(question.command(64.0))[1:], "--output", str(path)]) == 0
    plan = json.loads(path.read_text())
    assert plan["predicted_total_bytes"] == found.total_bytes
    assert plan["baseline_step_ms"] * plan["predicted_slowdown"] == pytest.approx(found.step_ms)


@pytest.mark.slow
def test_cards_of_one_model_are_planned_on_one_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers as for each card alone, and the model is profiled once for all of them."""
    opened = list[nn.Module]()

    def counting(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        opened.append(model)
        return open_rehearsal(model, *args, **kwargs)

    monkeypatch.setattr(stage, "open_rehearsal", counting)
    monkeypatch.setitem(FAMILIES, "ViT", ("vit-tiny",))
    *_, log = plan_all(Log(), [Stairs("ViT", "full", (8, 16))])
    assert len(opened) == 1
    assert len(log.answers) == 2
    for found in log.answers:
        assert dataclasses.replace(found, planning_s=0.0) == dataclasses.replace(ask(found.question), planning_s=0.0)


def test_adapters_are_what_is_trained() -> None:
    model = zoo.with_adapters(zoo.build("gpt2"), 4)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


@pytest.mark.slow
def test_networks_of_diffusers_have_adapters_too() -> None:
    """On attention, and their batch is of the type of the weights."""
    with torch.device("meta"):
        from diffusers import UNet2DConditionModel

        unet = UNet2DConditionModel(
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            sample_size=16,
            layers_per_block=1,
        )
    inputs = derive_inputs(unet)
    assert inputs is not None
    adapted, batch = zoo.with_adapters_for(unet, inputs, 4)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(re.search(r"\.to_(q|k|v|out\.0)\.lora", name) for name in trained)
    assert {tensor.dtype for tensor in batch.tensors()} == {torch.bfloat16, torch.int64}
    assert adapted(**batch.kwargs).sample.shape == (1, 4, 16, 16)


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
