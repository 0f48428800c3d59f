"""The documents say what happens: their code runs, their commands print what they show, their links lead somewhere."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

import memscale
from benchmarks import pictures
from memscale._config import SWITCHES, OptimizationMode
from memscale._hardware.cards import KNOWN_CARDS
from memscale.cli import app
from memscale.zoo import MODELS
from tests.lanes import full
from tools import blocks, make_figures, make_screenshot, make_table

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = blocks.documents()


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks.python_blocks(p)], ids=lambda path: path.name)
def test_python_blocks_run_in_sequence(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks.python_blocks(path):
        exec(compile(block.text, str(block), "exec"), namespace)


LARGE = ("memscale estimate", "memscale fit")
"""These plan in every mode, or many times: what they print is compared in `make test-all`."""


def _lane(block: Any) -> Any:
    return pytest.param(block, id=str(block), marks=[full] if block.command.startswith(LARGE) else [])


@pytest.mark.parametrize("block", [_lane(block) for block in blocks.console_blocks()])
def test_commands_print_what_the_document_shows(block: Any) -> None:
    printed = blocks.run_command(block.command)
    assert blocks.agree(block.printed, printed), f"run `python -m tools.blocks`; {block.command} now prints:\n{printed}"


def test_a_document_that_says_something_else_is_found() -> None:
    assert blocks.agree("memscale 1\n...\nend\n", "memscale 1\nmore\nend\n")
    assert not blocks.agree("memscale 1\n", "memscale 2\n")


def test_commands_are_quoted_with_their_output() -> None:
    assert len(blocks.console_blocks()) >= 4
    assert all(block.printed.strip() for block in blocks.console_blocks())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", path.read_text())
    for target in (first or second for first, second in targets):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("picture", make_figures.PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_those_of_their_data(picture: Any) -> None:
    assert pictures.is_drawn_from(picture.make(), picture.path), "run `python -m tools.make_figures`"


@pytest.mark.parametrize("scheme", list(make_screenshot.PICTURES))
def test_the_picture_of_readme_is_that_of_its_example(scheme: Any) -> None:
    """A screenshot is not drawn again for every change of a plan: it may be some per cent beside the text."""
    path, readme = make_screenshot.PICTURES[scheme], (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "start" / "will_it_fit.md").read_text()
    assert path.name in readme
    assert all(" ".join(make_screenshot.COMMAND[:5]) in text for text in (readme, page))
    numbers = make_screenshot.numbers_of(path)
    plain = re.search(r"A plain training step peaks at ([\d.]+) GB", page)
    planned = re.search(r"^balanced +([\d.]+)", page, re.MULTILINE)
    for name, found in (("plain peak", plain), ("planned peak", planned)):
        assert found is not None
        shown_gb = float(numbers[name].split()[0])
        assert shown_gb == pytest.approx(float(found[1]), rel=0.05), "run `python -m tools.make_screenshot`"
    assert path.stat().st_size < 150_000


def test_the_table_is_that_of_the_measured_data() -> None:
    data = json.loads(make_figures.DATA.read_text())
    assert make_figures.table(data) in make_figures.PAGE.read_text(), "run `python -m tools.make_figures`"
    assert data["losses_identical"]
    assert data["weights_identical"]


def test_the_page_of_threads_names_what_is_intercepted_and_our_threads() -> None:
    text = (ROOT / "docs" / "design" / "threads.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = set(re.findall(r"intercept\([\w.]+, \"(\w+)\"", code))
    threads = set(re.findall(r"(?:name|thread_name_prefix)=\"(memscale-\w+)", code))
    assert {"cross_entropy", "memscale-io"} <= names | threads
    for name in names | threads:
        assert re.search(rf"`(?:[\w.]+\.)?{name}(?![a-z])", text), name


def test_the_page_of_all_pages_has_all() -> None:
    folder = ROOT / "docs"
    listed = set(re.findall(r"\]\(([^):]+)\)", (folder / "README.md").read_text()))
    pages = {str(path.relative_to(folder)) for path in (*folder.rglob("*.md"), *folder.glob("results/*.txt"))}
    assert sorted(pages - listed) == ["README.md"]


def test_the_first_screen_is_a_sentence_a_picture_five_lines_a_table_two_commands_and_five_links() -> None:
    text = (ROOT / "README.md").read_text()
    screen = text[: text.index("\n## ")]
    code, commands = re.findall(r"^```(?:python|sh)\n(.*?)^```$", screen, re.MULTILINE | re.DOTALL)
    order = [screen.index(part) for part in ("<picture>", code, make_table.START, commands, "](docs/")]
    assert order == sorted(order)
    assert len(code.splitlines()) == 5
    assert len(commands.splitlines()) == 2
    assert len(re.findall(r"\]\(", screen)) == len(re.findall(r"\]\(", text)) == 5


def test_every_field_of_the_config_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    for field in memscale.Config.__dataclass_fields__:
        if not field.startswith("_"):
            assert f"| `{field}` |" in text
    for field in memscale.AsyncOffloadConfig.__dataclass_fields__:
        assert f"| `{field}` |" in text


def test_the_modes_are_documented_as_they_are() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    for technique in set(SWITCHES) - {"use_mixed_precision"}:  # which the hardware decides, too
        values = [getattr(memscale.Config(mode=mode), technique) for mode in OptimizationMode]
        assert f"| `{technique}` | {' | '.join(map(str, values))} |" in text


def test_every_option_model_and_card_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"`memscale {command.callback.__name__}" in text
    for name in (*MODELS, *(card.name for card in KNOWN_CARDS)):
        assert name in text
    for option in ("--batch", "--seq", "--gpu", "--optimizer", "--budget", "--utilization", "--mode", "--force"):
        assert f"`{option}" in text
    for option in ("--with-weights", "--json", "--output", "--explain", "--pareto", "--vary", "--version"):
        assert f"`{option}" in text


def test_the_table_of_models_is_what_the_benchmark_found() -> None:
    measured, predicted = (make_table.table.read_results(path) for path in (make_table.MEASURED, make_table.PREDICTED))
    text = (ROOT / "README.md").read_text()
    assert make_table.readme_table(predicted, make_table.read_times()) in text, "run `python -m tools.make_table`"
    assert make_table.measured_table(measured, predicted) in make_table.PAGE.read_text(), (
        "run `python -m tools.make_table`"
    )
    assert text.index(make_table.START) < 2000, "it belongs on the first screen"
    for path, options in ((make_table.MEASURED, ""), (make_table.PREDICTED, " --fake")):
        command = f"python -m benchmarks{options}"
        assert path.with_suffix(".txt").read_text() == make_table.as_text(path, command), (
            "run `python -m tools.make_table`"
        )
