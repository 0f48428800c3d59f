"""The files of docs/results: each says how it was made, and what follows from data there is what that data gives.

Pages that a command writes from kept data are compared beside that command (`test_published.py`, `test_peers.py`,
`test_growth.py`, `test_table.py`, `test_make_cards.py`, `test_fit_page.py`, `test_docs.py`). Here are the outputs
of single runs, which have their data beside them.
"""

from __future__ import annotations

import importlib.util
import json
import math
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


def figures_of_techniques() -> list[str]:
    plain, half, *_ = (precision.Run(**run) for run in data_of("precision.json"))
    state = {run["name"]: run["state_bytes"] for run in data_of("full_stack_loss.json")}
    runs = {run["name"]: loss.Run(**{**run, "losses": tuple(run["losses"])}) for run in data_of("full_stack_loss.json")}
    head = {run["rows"]: run for run in data_of("tiling.json")["head"]}
    shares = [(head[rows]["peak_bytes"] - head[rows]["left_bytes"]) / 1e6 for rows in (None, 128)]
    ratio = head[128]["cpu_seconds"] / head[None]["cpu_seconds"]
    eight = "AdamW, 8-bit state"
    eight_off, smaller = runs[eight].distance(runs["AdamW"]), state["AdamW"] / state[eight]
    return [
        f"{shares[0]:,.0f} MB to {shares[1]:.1f} MB, {ratio:.2f} of the time",
        f"final loss {half.distance(plain):.2%} off, {plain.held_bytes / 1e6:.1f} MB to {half.held_bytes / 1e6:.1f} MB",
        f"final loss {eight_off:.2%} off, state {smaller:.2f} times smaller",
    ]


def figures_of_the_emulated_card() -> list[str]:
    rows = [row for row in data_of("cuda.json")["rows"] if "reserved_bytes" in row]
    worst = {
        kind: max(abs(row[f"predicted_{kind}_bytes"] / row[f"{kind}_bytes"] - 1) for row in rows)
        for kind in ("allocated", "reserved")
    }
    bounds = {kind: math.ceil(error * 1000) / 10 for kind, error in worst.items()}
    at = {(row["model"], row["mode"]): (row["allocated_bytes"] / 1e9, row["reserved_bytes"] / 1e9) for row in rows}
    shown = {
        "BERT-Base, CONSERVATIVE, transfers wait": at["bert-base", "conservative-sync"],
        "BERT-Base, BALANCED, transfers wait": at["bert-base", "balanced-sync"],
        "BERT-Base, BALANCED, transfers overlap": at["bert-base", "balanced-async"],
        "GPT-2 Small, CONSERVATIVE, transfers wait": at["gpt2", "conservative-sync"],
        "GPT-2 Small, BALANCED, transfers wait": at["gpt2", "balanced-sync"],
    }
    return [
        f"allocated bytes are within {bounds['allocated']:.1f} %, "
        f"and reserved ones within {bounds['reserved']:.1f} % on all {len(rows)} rows",
        *(f"| {name} | {allocated:.3f} |" for name, (allocated, _) in shown.items()),
        *(f"| {reserved:.3f} | {reserved / allocated:.2f} |" for allocated, reserved in shown.values()),
    ]


def figures_within_published_peaks() -> list[str]:
    rows = data_of("table.json")["results"]
    seconds = {(row["title"], row["variant"]): row["cpu_seconds"] for row in rows if row["cpu_seconds"]}
    titles = [title for title, variant in seconds if variant == "budget" and (title, "plain") in seconds]
    ratios = [seconds[title, "budget"] / seconds[title, "plain"] for title in titles]
    return [f"a step took {min(ratios):.2f} to {max(ratios):.2f} times the processor time of a plain step"]


def data_of(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


FIGURES: dict[str, Callable[[], list[str]]] = {
    "design/techniques.md": figures_of_techniques,
    "guides/memory_budget.md": figures_of_the_emulated_card,
    "results/measured.md": figures_within_published_peaks,
}


@pytest.mark.parametrize("page", FIGURES)
def test_figures_in_prose_are_those_of_the_data(page: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text().replace(" %", "%").split())
    for figure in FIGURES[page]():
        assert figure.replace(" %", "%") in text, figure


QUOTED = {"design/optimizer8bit.md": 2, "design/precision.md": 1}
"""Pages that quote tables of docs/results/*.txt in a fence without a language, and how many."""


@pytest.mark.parametrize("page", QUOTED)
def test_tables_that_a_page_quotes_are_those_of_the_results(page: str) -> None:
    outputs = "\n".join(path.read_text() for path in RESULTS.glob("*.txt"))
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len([block for block in blocks if block in outputs]) == QUOTED[page]
