"""The benchmarks run, say what they found, and exit by their bars. No test here looks at a clock."""

from __future__ import annotations

import json
import math
import pkgutil
import re
import subprocess
import sys

import pytest
import torch
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

import benchmarks
from benchmarks import overhead, prediction
from benchmarks.models import Mlp, MlpBlock, case, suite
from tests.lanes import some

QUICK = ("mlp", "resnet", "nested", "data-dependent")
"""The others are predicted and measured in test_prediction.py."""
PEAKS_IN_THE_OPTIMIZER = ("nested",)
"""Whose few activations are not what the peak is made of."""


# ---- prediction


@pytest.mark.parametrize("name", some([entry.name for entry in suite()], *QUICK))
def test_the_predicted_peak_is_the_measured_peak(name: str) -> None:
    plain, optimized = prediction.compare(case(name))
    assert abs(plain.error) <= prediction.MAX_ERROR
    assert abs(optimized.error) <= prediction.MAX_ERROR
    assert optimized.num_actions > 0
    if name not in PEAKS_IN_THE_OPTIMIZER:
        assert optimized.measured_bytes < plain.measured_bytes


def test_the_measured_peak_is_that_of_the_whole_step() -> None:
    subject = case("mlp")
    parameter_bytes = sum(parameter.nbytes for parameter in subject.build().parameters())
    assert prediction.measured_peak(subject, subject.build) > 4 * parameter_bytes  # weights, gradients, two moments


def test_prediction_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert prediction.main(["mlp"]) == 0
    text = capsys.readouterr().out
    assert "mlp    plain" in text
    assert "the bar is 1%" in text
    assert prediction.main(["mlp", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["treatment"] for row in rows] == ["plain", "optimized"]


def test_prediction_fails_when_the_number_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = prediction.measured_peak

    def leaky(*args: object) -> int:
        return int(peak(*args) * 1.02)  # type: ignore[arg-type]

    monkeypatch.setattr(prediction, "measured_peak", leaky)
    assert prediction.main(["mlp"]) == 1


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        prediction.main(["no such model"])
    assert exit_info.value.code == 2
    assert "there are: mlp" in capsys.readouterr().err


# ---- overhead


def test_overhead_prints_its_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = overhead.Result(400.0, 12.0, 34.0, 1.01, 1.02, 1.03, 1.04, 1.5, 1.005, 0.002, 0.1)
    monkeypatch.setattr(overhead, "run", lambda repetitions: result)
    assert overhead.main([]) == 0
    text = capsys.readouterr().out
    assert "12.0 µs" in text
    assert "bar 100 µs" in text
    assert overhead.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_ratio"] == 1.01


@pytest.mark.parametrize(
    "missed",
    [
        overhead.Result(1, 101.0, 1, 1, 1, 1, 1, 1, 1, 0, 0),
        overhead.Result(1, 1, 101.0, 1, 1, 1, 1, 1, 1, 0, 0),
        overhead.Result(1, 1, 1, 1, 1, 1, 1, 1, 1, 0.4, 0),
        overhead.Result(1, 1, 1, 1, 1, 1, 1, 1, 1.02, 0, 0),
    ],
)
def test_overhead_fails_when_a_bar_is_missed(missed: overhead.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "run", lambda repetitions: missed)
    assert overhead.main([]) == 1


def test_overhead_really_measures() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    checkpoint_us, hook_us = overhead.hook_us(lambda: MlpBlock(16), x, repetitions=2)
    assert checkpoint_us > 0
    assert math.isfinite(hook_us)
    assert overhead.skipped_ratio(repetitions=2) > 0
    assert overhead.import_s("import memscale", runs=1) > 0


def test_the_hooked_side_recomputes_as_often_as_the_direct_one() -> None:
    calls = []

    class Counted(MlpBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    overhead.hook_us(lambda: Counted(16), torch.randn(4, 16, requires_grad=True), repetitions=1)
    warmup_and_one = 21
    assert len(calls) == warmup_and_one * 2 * 2 * overhead.NUM_BLOCKS  # two sides, forward and recompute


def test_the_skipped_model_has_nothing_attached() -> None:
    import memscale
    from memscale._execute.executor import executor_of

    model = memscale.wrap(Mlp(width=128), memscale.Config(enable_logging=False), torch.randn(64, 128))
    executor = executor_of(model)
    assert executor is not None
    assert executor.plan is not None
    assert executor.plan.actions == ()
    memscale.detach(model)


# ---- what there is


def test_the_package_lists_its_benchmarks() -> None:
    text = subprocess.check_output([sys.executable, "-m", "benchmarks", "--list"], text=True)
    assert "python -m benchmarks.prediction\n    Does the number hold?" in text
    assert "python -m benchmarks.overhead\n" in text
    assert "python -m benchmarks.zoo\n" in text
    assert "benchmarks.models" not in text
    shared = set(re.findall(r"`(\w+)`", benchmarks.__doc__ or ""))
    for info in pkgutil.iter_modules(benchmarks.__path__):
        is_listed = f"python -m benchmarks.{info.name}\n" in text or info.name in ("__main__", "table")
        assert is_listed != (info.name in shared), info.name
