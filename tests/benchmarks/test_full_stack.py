"""The benchmark of the full stack, at a size that takes seconds."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import simgpu  # noqa: F401  before the first backward: autograd counts the devices then
from benchmarks import full_stack
from benchmarks.full_stack import loss, peaks, setups
from benchmarks.full_stack import state as state_module


@pytest.mark.full
def test_peaks_on_the_simulated_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any, simgpu_device: Any):
    monkeypatch.setitem(setups.BATCHES, "bert-tiny", (4, 32))
    monkeypatch.setitem(peaks.PUBLISHED_GB, "bert-tiny", 0.1)
    assert full_stack.main(["peaks", "--model", "bert-tiny", "--json", str(tmp_path / "peaks.json")]) == 0
    (peak,) = json.loads((tmp_path / "peaks.json").read_text())
    assert 0 < peak["measured_bytes"] < peak["baseline_bytes"]
    assert peak["predicted_bytes"] == pytest.approx(peak["measured_bytes"], rel=0.02)
    assert peak["measured_bytes"] <= 1.005 * peak["predicted_bytes"]
    assert peak["state_bytes"] > 3.9 * peak["packed_bytes"] > 0
    assert peak["losses"][1] < peak["losses"][0]
    shown = capsys.readouterr().out
    assert "bert-tiny  4 x 32" in shown
    assert "8-bit optimizer: AdamW itself, its waiting state packed in place" in shown


def test_a_peak_above_the_published_one_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    peak = peaks.Peak("bert-base", "16 x 128", 4, 2, 10**9, 8, 2, (), (), 0.0)
    monkeypatch.setattr(full_stack, "measure_peak", lambda name: dataclasses.replace(peak, model=name))
    assert full_stack.main(["peaks", "--model", "bert-base"]) == 1
    assert full_stack.main(["peaks", "--model", "gpt2-medium"]) == 0
    assert "1.000" in capsys.readouterr().out


@pytest.mark.full
def test_curves(tmp_path: Any, capsys: Any) -> None:
    assert full_stack.main(["loss", "--steps", "2", "--json", str(tmp_path / "a")]) == 0
    runs = {run["name"]: run for run in json.loads((tmp_path / "a").read_text())}
    assert list(runs) == list(loss.RUNS)
    assert len({run["losses"][0] for run in runs.values()}) > 1  # bf16 is another number
    wide = runs["AdamW"]["state_bytes"]
    assert all(wide >= 3.5 * run["state_bytes"] for name, run in runs.items() if name != "AdamW")
    assert "3.5" in capsys.readouterr().out


def test_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    monkeypatch.setitem(setups.BATCHES, "bert-tiny", (4, 32))
    status = full_stack.main(["state", "--model", "bert-tiny", "--json", str(tmp_path / "state.json")])
    assert status == 1, "its embeddings are most of it"
    states = json.loads((tmp_path / "state.json").read_text())
    assert [state["way"] for state in states] == list(state_module.WAYS)
    model, _ = setups.fresh_model("bert-tiny")
    num_elements, num_tensors = (sum(size(p) for p in model.parameters()) for size in (torch.numel, lambda p: 1))
    for state in states:
        assert state["wide_bytes"] == 8 * num_elements + 4 * num_tensors
        assert 3.9 < state["converted_wide_bytes"] / state["converted_bytes"] < 4
        stays_wide = state["wide_bytes"] - state["converted_wide_bytes"]
        assert state["whole_bytes"] == pytest.approx(stays_wide + state["converted_bytes"], rel=0.01)
        assert 0.5 < state["embedding_share"] < 1
    assert capsys.readouterr().out.count("3.5x, missed") == 2


def test_bars() -> None:
    first = loss.Run("AdamW", 0.0, (2.0,), 400, 1.0)
    near = loss.Run("AdamW8bit", 0.01, (2.01,), 100, 1.0)
    assert loss.meets_bars([first, near])
    assert not loss.meets_bars([first, dataclasses.replace(near, losses=(2.03,))])
    assert not loss.meets_bars([first, dataclasses.replace(near, state_bytes=120)])


@pytest.mark.parametrize("argv", [[], ["loss", "--steps", "0"], ["peaks", "--model", "bort"]])
def test_bad_input_is_a_sentence(argv: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_info:
        full_stack.main(argv)
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
