"""The files of docs/results: each says how it was made, and what follows from data there is what that data gives.

Pages that a command writes from kept data are compared beside that command (`test_published.py`, `test_peers.py`,
`test_growth.py`, `test_table.py`, `test_make_cards.py`, `test_fit_page.py`, `test_docs.py`). Here are the outputs
of single runs, which have their data beside them.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import precision, tiling
from benchmarks.full_stack import loss
from memscale.cli import app

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = sorted([*RESULTS.rglob("*.md"), *RESULTS.rglob("*.txt")])
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}

_COMMAND = re.compile(r"(?:^\$ |`|^)(?:[A-Z_]+=\S+ )*(python -m|memscale|make) ([\w.-]+)", re.MULTILINE)


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """The programs that a text names, and what of each."""
    yield from _COMMAND.findall(text)


def exists(kind: str, name: str) -> bool:
    if kind == "python -m":
        is_ours = name.split(".")[0] in ("benchmarks", "tools")
        return importlib.util.find_spec(name) is not None if is_ours else name.split(".")[0] in ("emucuda", "simgpu")
    return name in (TARGETS if kind == "make" else COMMANDS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_page_names_commands_that_exist(path: pathlib.Path) -> None:
    named = [*commands_of(path.read_text())]
    assert named, f"{path.name} does not say which command made it"
    assert all(exists(*command) for command in named), named


def test_all_data_is_read_by_something() -> None:
    readers = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    texts = [path.read_text() for path in readers]
    for path in RESULTS.glob("*.json"):
        assert any(re.search(rf"\b{path.stem}(\.json|\.md|\b\")", text) for text in texts), path.name


def full_stack_losses(data: Any) -> list[str]:
    return [loss.show_runs([loss.Run(**{**run, "losses": tuple(run["losses"])}) for run in data])]


def precision_losses(data: Any) -> list[str]:
    return [precision.show([precision.Run(**run) for run in data])]


def tiled_peaks(data: Any) -> list[str]:
    return [
        tiling.head_table([tiling.HeadRun(**run) for run in data["head"]]),
        tiling.device_table([tiling.DeviceRun(**run) for run in data["head_on_simgpu"]]),
        tiling.sweep_table([tiling.Peak(**peak) for peak in data["sweep"]]),
    ]


OUTPUTS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "full_stack_loss.txt": ("full_stack_loss.json", full_stack_losses),
    "precision.txt": ("precision.json", precision_losses),
    "tiling.txt": ("tiling.json", tiled_peaks),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_that_of_its_data(name: str) -> None:
    data, tables_of = OUTPUTS[name]
    text = (RESULTS / name).read_text()
    for table in tables_of(json.loads((RESULTS / data).read_text())):
        assert table in text


def test_the_page_on_policies_has_the_figures_of_the_run() -> None:
    rows = re.findall(r"^\| (.+ \| .+) \|$", (ROOT / "docs" / "design" / "policy.md").read_text(), re.MULTILINE)
    printed = {" ".join(line.split()) for line in (RESULTS / "policy.txt").read_text().splitlines()}
    figures = [" ".join(row.replace("|", " ").split()) for row in rows if "%" in row and row[-1].isdigit()]
    assert len(figures) == 12
    assert set(figures) <= printed
