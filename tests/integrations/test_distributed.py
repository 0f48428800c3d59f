"""DDP and FSDP2 with batches that differ between ranks: planning communicates with nobody."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("uneven_batches.py")
HANGS_AFTER_S = 1200
"""A guard against a hang, and no more: a busy machine is slow."""


@pytest.mark.slow
def test_ranks_whose_batches_differ_train_as_plain_ones() -> None:
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(PROGRAM),
            "ddp",
            "fsdp2",
        ],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    for kind in ("ddp", "fsdp2"):
        for rank in (0, 1):
            assert f"{kind}: the same on rank {rank}" in answer.stdout
