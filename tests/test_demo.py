"""The examples run as they are, and the demo's table says what happened."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pathlib
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
_SIZES = {
    "layers": 3,
    "width": 32,
    "heads": 2,
    "vocabulary": 64,
    "batch": 8,
    "length": 64,
    "steps": 2,
    "timed-steps": 1,
}
SMALL = [f"--{name}={value}" for name, value in _SIZES.items()]


@pytest.fixture
def demo() -> Iterator[types.ModuleType]:
    spec = importlib.util.spec_from_file_location("demo_under_test", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_under_test"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo_under_test"]


def test_demo_prints_one_table_and_says_so_when_training_differs(
    demo: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    results = []
    compare = demo.compare

    def compare_and_keep(*args: object) -> object:
        results.append(compare(*args))
        return results[0]

    monkeypatch.setattr(demo, "compare", compare_and_keep)
    assert demo.main([*SMALL, "--json", str(tmp_path / "demo.json")]) == 0
    _check_table(capsys)
    _check_data(json.loads((tmp_path / "demo.json").read_text()))

    plain, wrapped = results[0].plain, results[0].wrapped
    for other in (
        dataclasses.replace(wrapped, losses=[math.nextafter(plain.losses[0], 0), *plain.losses[1:]]),
        dataclasses.replace(wrapped, weights_digest="other"),
    ):
        monkeypatch.setattr(demo, "compare", lambda *args, other=other: dataclasses.replace(results[0], wrapped=other))
        assert demo.main(SMALL) == 1
        assert capsys.readouterr().out.count("DIFFERENT") == 1


def _check_table(capsys: pytest.CaptureFixture[str]) -> None:
    captured = capsys.readouterr()
    assert captured.out.count("peak memory by kind") == 1
    for row in ("parameters", "gradients", "optimizer state", "activations", "temporaries", "seconds a step"):
        assert row in captured.out
    assert captured.out.count("identical, bit for bit") == 2
    assert "training it with MemScale" in captured.err


def _check_data(data: dict[str, Any]) -> None:
    assert data["losses_identical"]
    assert data["weights_identical"]
    plain, wrapped = data["plain"], data["wrapped"]
    assert wrapped["peak_bytes"] <= data["budget_bytes"] < plain["peak_bytes"]
    assert sum(plain["by_kind"].values()) == plain["peak_bytes"]
    assert max(sum(sample[1:]) for sample in wrapped["timeline"]) == wrapped["peak_bytes"]
    assert data["predicted_peak_bytes"] == pytest.approx(wrapped["peak_bytes"], rel=0.01)


def test_the_minimal_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = runpy.run_path(str(EXAMPLES / "train.py"))
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert not hasattr(namespace["model"], "_memscale_executor")
