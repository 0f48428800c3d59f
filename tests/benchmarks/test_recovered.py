"""The table of ordinary models is made by training them in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_gpt2_recovers_in_a_fresh_process_from_its_first_forward_on() -> None:
    """Its first forward fills in what its library remembers: a message that is shown once."""
    command = [sys.executable, "-m", "benchmarks.recovered", "--models", "gpt2", "--setting", "plain"]
    done = subprocess.run([*command, "--every", "100000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["is_same"]
    assert row["num_failed"] == row["num_recovered"] == 3
    assert not row["refusals"]
