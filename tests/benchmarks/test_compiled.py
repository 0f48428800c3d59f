"""The table of the guide to `torch.compile` is what the benchmark measures."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/torch_compile.md"


@pytest.mark.full  # the sibling is test_compile.py::test_every_technique_stands_around_compiled_code
def test_the_guides_table_is_what_is_measured() -> None:
    """In a process of its own, whose device holds nothing else."""
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.compiled"],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    measured = [re.split(r"  +", line.strip()) for line in answer.stdout.splitlines()[1:]]
    assert len(measured) == 4
    rows = re.findall(
        r"^\| ([a-z ]+) \| ([\d.]+) MB \| ([\d.]+) MB \| (\d+) \| (\d+) \|$", GUIDE.read_text(), re.MULTILINE
    )
    assert [row[0] for row in rows] == ["as they are", *(name for name, *_ in measured[1:])]
    for row, (_, eager, compiled, graphs, runs, is_same) in zip(rows, measured, strict=True):
        assert list(row[1:]) == [eager, compiled, graphs, f"{float(runs):.0f}"]
        assert is_same == "yes", "the losses of blocks without a plan"
