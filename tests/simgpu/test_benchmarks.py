"""The benchmarks' own machinery; the numbers they gave stand in docs/design/simgpu.md."""

import dataclasses
import subprocess
import sys

import pytest

from simgpu.benchmarks import published, speed

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    pass


def small(case: published.Case) -> published.Case:
    return dataclasses.replace(case, hidden=64, layers=2, heads=4, batch=2, sequence=64)


@pytest.mark.parametrize("name", ["BERT-Base", "GPT-2 Medium"])
def test_a_small_model_is_measured_and_repeats(name):
    case = small(published.CASES[name])
    peaks = {published.measure(case) for _ in range(2)}
    assert len(peaks) == 1
    assert published.measure(case, padded=False) < peaks.pop()


def test_the_table_is_the_published_one():
    figures = {name: case.published_gib for name, case in published.CASES.items()}
    assert figures == {"BERT-Base": 3.14, "BERT-Large": 7.60, "GPT-2 Medium": 10.87, "GPT-2 Large": 14.87}
    assert published.TOLERANCE_PERCENT == 3.5


def test_an_unknown_model_is_refused():
    answer = subprocess.run(
        [sys.executable, "-m", "simgpu.benchmarks", "published", "BERT-Huge"], capture_output=True, text=True
    )
    assert answer.returncode == 2
    assert "unknown model 'BERT-Huge'" in answer.stderr


def test_the_speed_of_a_step_is_told_with_its_bar(monkeypatch, capsys):
    for ratio, status in ((speed.BAR, 0), (speed.BAR + 0.01, 1)):
        monkeypatch.setattr(speed, "measure_ratio", lambda ratio=ratio: (100.0, 100.0 * ratio, ratio))
        assert speed.main() == status
        assert f"{ratio:.3f}x" in capsys.readouterr().out


def test_both_devices_take_turns():
    cpu_ms, simgpu_ms, ratio = speed.measure_ratio(rounds=1)
    assert ratio == simgpu_ms / cpu_ms > 0
