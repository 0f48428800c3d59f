"""The published table: what it shows, that it goes on where it was stopped, and a user's own model in it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

import memscale
from benchmarks import runs, table
from benchmarks.runs import Result, Subject

BERT = table.SUBJECTS[0]
OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def make():
    return Model(), torch.ones(2048, 256)
"""


def result_of(variant: str, **changes: object) -> Result:
    plain = Result(BERT.title, BERT.shape, variant, 1_010_000_000, 0, 1.0, "nothing")
    return dataclasses.replace(plain, **changes)


PLAIN = result_of("plain", measured_bytes=1_000_000_000, cpu_seconds=10.0, losses=(2.0, 1.0), weights_hash="a")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": (2.0, 1.0), "weights_hash": "a"}, "bit for bit"),
        ({"losses": (2.0, 1.0), "weights_hash": "b"}, "losses bit for bit"),
        ({"losses": (2.0, 1.01), "weights_hash": "b"}, "losses within 1e-02"),
        ({}, "-"),
    ],
)
def test_training_is_compared_with_the_plain_run(changes: dict[str, object], said: str) -> None:
    assert table.training(result_of("balanced", **changes), PLAIN) == said


def test_a_row_shows_bytes_error_reduction_and_time() -> None:
    tiered = {"host_bytes": 2_000_000_000, "disk_bytes": 500_000_000}
    balanced = result_of(
        "balanced", measured_bytes=250_000_000, predicted_bytes=251_000_000, cpu_seconds=12.0, **tiered
    )
    text = table.to_text([balanced, PLAIN], [BERT])
    rows = [line for line in text.splitlines() if line.startswith("BERT-Base")]
    assert rows[0].split()[4:] == ["plain", "1.000", "1.010", "+1.00%", "0.000", "-", "-", "1.00x", "-", "-"]
    assert rows[1].split()[4:] == ["balanced", "0.250", "0.251", "+0.40%", "2.000", "0.500", "75.0%", "1.20x", "-", "-"]
    assert rows[2].split() == ["BERT-Base", "3.14", "0.84", "0.250", "-", "0.40"]


def test_a_prediction_is_marked_as_one() -> None:
    predicted = result_of(
        "balanced", predicted_slowdown=1.5, predicted_of_bound=1.2, predicted_waiting_bytes=3_000_000_000
    )
    cells = table.to_text([predicted], [BERT]).splitlines()[1].split()
    assert cells[4:] == ["balanced", "-", "1.010", "-", "3.000", "-", "-", "(1.50x)", "(1.20x)", "-"]


def test_a_plain_run_out_of_memory_shows_what_it_would_need() -> None:
    failed = result_of("plain", failure="out of memory on a device of 10 GB", predicted_bytes=31_000_000_000)
    balanced = result_of("balanced", measured_bytes=1_000_000_000)
    lines = table.to_text([failed, balanced], [BERT]).splitlines()
    assert "31.000" in lines[1]
    assert lines[1].endswith("out of memory on a device of 10 GB")
    assert "96.8%" in lines[2]


def test_the_predicted_table_meets_its_bars() -> None:
    """As it is checked in. In full, AGGRESSIVE goes below its exact part on every row."""
    results = table.read_results(pathlib.Path(__file__).parents[2] / "docs" / "results" / "table_fake.json")
    for subject in table.SUBJECTS:
        row = {name: found.predicted_bytes for name, found in table.by_variant(results, subject).items()}
        assert row["aggressive"] < row["aggressive exact"] <= subject.bar_gb * 1e9


def test_results_are_kept_and_found_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.json"
    store = table.Store(path)
    store.add([PLAIN])
    other = table.Store(path)
    other.add([result_of("balanced")])
    store.add([result_of("budget")])
    again = table.Store(path)
    assert [result.variant for result in again.results] == ["plain", "balanced", "budget"]
    assert dataclasses.replace(again.find(BERT, "plain"), commit="") == PLAIN
    data = json.loads(path.read_text())
    assert {"machine", "num_cores", "host_gb", "python", "versions"} <= set(data)
    assert all(entry["commit"] for entry in data["results"])
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"other": 1}')
    with pytest.raises(memscale.MemScaleError, match="does not hold results"):
        table.Store(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fake": True, "quick": True}, "choose one"),
        ({"fake": True, "factory": "model.py:make"}, "memscale estimate"),
        ({"factory": "bert-base"}, "--only MODEL"),
        ({"factory": "nowhere.py:make"}, "there is no file"),
        ({"factory": "model.py:make", "only": "gpt2"}, "your own model"),
        ({"only": "gpt5"}, "bert-base, bert-large, gpt2-medium, gpt2-large, gpt2-xl"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(memscale.MemScaleError, match=said):
        table.choose_subjects(**{"fake": False, "quick": False, "factory": None, "only": None, **options})


@pytest.mark.slow
def test_what_waits_on_disk_is_counted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    result = runs.measure_apart(Subject("own", f"{path}:make", 0, 0, host_gb=0.018), "balanced")
    assert not result.failure
    assert result.disk_bytes > 4_000_000
    assert result.host_bytes < 25_000_000


def test_a_run_that_fails_says_why(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def make():\n    raise ValueError('no such luck')\n")
    result = runs.measure_apart(Subject("own", f"{path}:make", 0, 0), "plain")
    assert "no such luck" in result.failure
    assert result.measured_bytes is None


@pytest.mark.full
def test_a_killed_run_goes_on_and_its_numbers_hold(tmp_path: pathlib.Path) -> None:
    own, kept = tmp_path / "own.py", tmp_path / "results.json"
    own.write_text(OWN)
    command = [sys.executable, "-m", "memscale", "bench", f"{own}:make", "--results", str(kept)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not kept.exists():
        assert first.poll() is None
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "plain: done before" in second.stderr
    found = {result.variant: result for result in table.read_results(kept)}
    assert list(found) == ["plain", "balanced", "aggressive exact", "aggressive"]
    plain = found.pop("plain")
    for result in found.values():
        assert not result.failure
        assert abs(result.predicted_bytes / result.measured_bytes - 1) < 0.02
        assert result.measured_bytes < plain.measured_bytes / 2
        assert result.host_bytes > 0
    assert table.training(found["balanced"], plain) == "bit for bit"
    assert "bit for bit" in second.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject",
    [
        Subject("BERT-Mini", "bert-mini", 32, 64, None, 0.6),
        pytest.param(Subject("GPT-2 small", "gpt2", 1, 64, None, 0.8), marks=pytest.mark.full),
    ],
    ids=lambda subject: subject.title,
)
def test_predictions_for_a_card(subject: Subject) -> None:
    results = {result.variant: result for result in runs.predict(subject)}
    assert list(results) == list(runs.VARIANTS)
    plain = results["plain"].predicted_bytes
    assert results["aggressive exact"].predicted_bytes < results["balanced"].predicted_bytes < plain
    assert results["aggressive"].predicted_bytes <= results["aggressive exact"].predicted_bytes
    assert results["budget"].predicted_bytes <= subject.published_optimised_gb * 1e9
    assert results["budget"].predicted_slowdown < results["balanced"].predicted_slowdown
