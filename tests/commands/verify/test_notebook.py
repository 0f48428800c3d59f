"""The notebook for people with a card: its cells run in order, here on a processor and on the simulated device."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.lanes import full

NOTEBOOK = pathlib.Path(__file__).parent.parent.parent.parent / "notebooks" / "measure_on_a_card.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_a_clean_notebook() -> None:
    assert json.loads(NOTEBOOK.read_text())["nbformat"] == 4
    for cell in code_cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        compile("".join(cell["source"]), "cell", "exec")


@full
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_its_cells_run(
    device: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in code_cells():
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert (names["MODELS"], names["DEVICE"]) == ([], None)
            names |= {"MODELS": ["bert-tiny"], "DEVICE": device}
    shown = capsys.readouterr().out
    assert shown.count("identical, bit for bit") == 2 * 3, "three ways beside the plain one, shown twice"
    assert "took more than their budget: none (of 2)" in shown
    assert (tmp_path / "memscale-verify.json").exists()
