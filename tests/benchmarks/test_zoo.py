"""The zoo: architectures that nobody here chose, some in each way; a difference is seen, and the table names it."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import torch_suites
from benchmarks.zoo.twins import Subject, Training, differences
from benchmarks.zoo.ways import WAYS, Way
from memscale._plan import TileMlp
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


class Cancels(nn.Module):
    """The square of what is normed is the same whatever the weights are: their gradients are rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def _steps(model: nn.Module) -> torch.optim.Optimizer:
    """Whole steps are made of gradients that are rounding alone."""
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _cancelling(monkeypatch: pytest.MonkeyPatch) -> Subject:
    torch.manual_seed(0)
    subject = Subject(Cancels(), {"x": torch.randn(3, 7, 16)}, lambda model, inputs: model(**inputs), _steps)
    monkeypatch.setattr(zoo, "plain_twin", lambda *_: (subject, zoo._trained(subject.on("cpu"))))
    actions = [TileMlp("blocks.0", 3), TileMlp("blocks.1", 3)]
    monkeypatch.setitem(zoo.WAYS, "tiled", dataclasses.replace(WAYS["tiled"], actions=lambda subject: actions))
    return subject


def test_sums_that_cancel_are_compared_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _cancelling(monkeypatch)
    in_single = zoo.compare(subject, zoo._trained(subject.on("cpu")), zoo.WAYS["tiled"])
    assert in_single["status"] == "WRONG", "otherwise nothing is asked again"
    assert zoo.attempt("ours", "cancels", "tiled")["status"] == "exact"
    assert next(subject.model.parameters()).dtype is torch.float32


def test_what_is_wrong_is_wrong_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    _cancelling(monkeypatch)
    treat = zoo.treat

    def forget(way: Way, subject: Subject, directory: str) -> None:
        """A hundredth of one row."""
        treat(way, subject, directory)
        subject.model.blocks[0].register_forward_hook(lambda *call: torch.cat([call[2][:1] * 0.99, call[2][1:]]))

    monkeypatch.setattr(zoo, "treat", forget)
    assert zoo.attempt("ours", "cancels", "tiled")["status"] == "WRONG"


def test_a_tight_budget_is_one_of_a_plan_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot be rehearsed is observed first: what is promised until then is the least that it can be."""

    class Looks(Cancels):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if float(x.detach().sum()) > 0 else 0.5)

    torch.manual_seed(0)
    inputs = {"x": torch.randn(64, 7, 16)}
    subject = Subject(Looks(), inputs, lambda model, inputs: model(**inputs), takes_keywords=True)
    monkeypatch.setattr(zoo, "plain_twin", lambda *_: (subject, zoo._trained(subject.on("simgpu"))))
    result = zoo.attempt("ours", "looks", "tight")
    assert result["status"] == "exact", result
    weights = sum(parameter.nbytes for parameter in subject.model.parameters())
    assert subject.tight_budgets["simgpu"] > 2 * weights


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
