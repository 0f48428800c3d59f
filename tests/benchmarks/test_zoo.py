"""The zoo: architectures that nobody here chose, some in each way; a difference is seen, and the table names it."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator

import pytest
import torch

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import torch_suites
from benchmarks.zoo.twins import Training, differences
from benchmarks.zoo.ways import WAYS
from tests.lanes import full

SAMPLE = [
    ("transformers", "t5", "recomputed"),
    ("transformers", "mixtral", "streamed"),
    ("transformers", "llama", "tiled"),
    ("torch.nn", "MultiheadAttention#0", "recomputed"),
    ("torch.nn", "BatchNorm2d#0", "streamed"),
    ("torch.optim", "LBFGS#1", "streamed"),
]
REST = [
    ("torch.optim", "Muon#1", "streamed"),
    ("torch.optim", "Adafactor#1", "balanced"),
    *(("torch.nn", name, way) for name in ("Linear#0", "GRU#0", "Transformer#0") for way in ("recomputed", "streamed")),
    *(("transformers", "gpt2", way) for way in WAYS),
]


@pytest.fixture(scope="module", autouse=True)
def _no_twin_is_kept() -> Iterator[None]:
    """A run keeps the plain twins of one architecture for all of its ways."""
    yield
    zoo.plain_twin.cache_clear()


@pytest.mark.filterwarnings("ignore")  # of libraries, about configurations that nobody would train
@pytest.mark.parametrize(("suite", "name", "way"), [*SAMPLE, *(pytest.param(*case, marks=full) for case in REST)])
def test_it_trains_the_same(suite: str, name: str, way: str, no_leaks: None) -> None:
    frozen = gc.get_freeze_count()
    result = zoo.attempt(suite, name, way)
    assert gc.get_freeze_count() <= frozen, "what the tests have put out of sight is theirs"
    assert gc.get_freeze_count() > 0
    assert result["status"] == "exact", result
    assert result["actions"] or way not in ("recomputed", "streamed")
    assert "TileMlp" in result["actions"] or way != "tiled"


def test_ways_take_turns() -> None:
    ways = ["a", "b", "c"]
    assert [zoo.ways_of(number, ways, 2) for number in range(3)] == [["a", "b"], ["c", "a"], ["b", "c"]]
    assert zoo.ways_of(1, ways, None) == zoo.ways_of(3, ways, 5) == ways


def test_a_difference_in_the_last_bit_is_seen() -> None:
    subject = torch_suites.build("torch.optim", "AdamW#0")
    training = Training(subject.on("cpu"))
    training.step()
    expected = training.result()
    name = "weight head.weight"
    nudged = dict(expected, **{name: torch.nextafter(expected[name], expected[name] + 1)})
    assert differences(training.result(), expected) == []
    assert differences(nudged, expected) == [name]
    found = zoo.compare(subject, {}, WAYS["recomputed"])
    assert found["status"] == "WRONG"


def test_what_cannot_be_built_is_not_usable_plain() -> None:
    assert zoo.attempt("transformers", "no such model", "recomputed")["status"] == "plain"


def test_the_table_counts_and_names() -> None:
    results = {
        ("transformers", "a", "streamed"): {"status": "exact", "why": "", "actions": "2 Checkpoint, 1 TileHead"},
        ("transformers", "b", "streamed"): {"status": "WRONG", "why": "1 of 9: loss of step 0", "class": "B"},
        ("transformers", "c", "streamed"): {"status": "plain", "why": ""},
        ("transformers", "d", "streamed"): {"status": "ended", "why": "the process ended with code 3"},
    }
    text = zoo.describe(results, ["timm"])
    row = next(line for line in text.splitlines() if line.startswith("transformers  streamed"))
    assert row.split()[2:] == ["4", "1", "0", "1", "1", "1", "0", "33.3", "%"]
    assert "timm is not installed" in text
    assert "Checkpoint in 1" in text
    assert "transformers b streamed (B): 1 of 9: loss of step 0" in text


def test_a_log_is_reported_without_a_trial(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "zoo.jsonl"
    log.write_text('{"case": ["torch.nn", "x", "streamed"], "status": "exact", "why": "", "actions": "1 Checkpoint"}\n')
    assert zoo.main(["--report", "--log", str(log)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("torch.nn"))
    assert row.split() == ["torch.nn", "streamed", "1", "1", "0", "0", "0", "0", "0", "100.0", "%"]
