"""Freed means freed: on a CPU, resident memory follows tracked bytes."""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import memscale
from memscale._execute import malloc

_TRAIN = """
import gc, json, pathlib, re, sys
import psutil, torch
import memscale
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadOptimizer
from memscale._profile.layers import find_blocks
from benchmarks.models import Mlp

torch.set_num_threads(1)

def train(model, optimizer, rows, width, steps):
    for _ in range(steps):
        model(torch.randn(rows, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

small = Mlp(64, 2)
train(small, torch.optim.AdamW(small.parameters()), 8, 64, 1)  # loads what PyTorch loads on first use
del small
gc.collect()
before = psutil.Process().memory_info().rss
model = Mlp(1024, 6)
executor = Executor(model, ExecutionSettings(device=torch.device("cpu"), offload_dir=sys.argv[1]))
executor.attach([*(Checkpoint(fqn) for fqn in find_blocks(model)), OffloadOptimizer(1 << 24)])
optimizer = torch.optim.AdamW(model.parameters())
with memscale.measure("cpu") as tracked:
    train(model, optimizer, 256, 1024, 3)
# The kernel's own mark of this program's memory: who samples may miss it, and `ru_maxrss` begins with the parent's.
highest = int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"tracked": tracked.peak_bytes, "resident": highest - before}))
"""


@pytest.mark.slow
def test_resident_memory_follows_tracked_bytes(tmp_path: pathlib.Path) -> None:
    """The same run has 20 % and more above its tracked bytes with the C library's defaults."""
    run = subprocess.run([sys.executable, "-c", _TRAIN, str(tmp_path)], capture_output=True, text=True, check=True)
    peaks = json.loads(run.stdout)
    assert peaks["tracked"] > 400_000_000
    assert peaks["resident"] < 1.03 * peaks["tracked"]
    assert peaks["resident"] > 0.97 * peaks["tracked"]


def test_users_are_counted_and_the_last_one_puts_it_back() -> None:
    model, start = nn.Linear(1, 1), _num_users()
    with contextlib.ExitStack() as outer:
        with contextlib.ExitStack() as inner:
            assert malloc.return_freed_memory(model, outer)
            assert malloc.return_freed_memory(model, inner)
            assert _num_users() == start + 2
        assert _num_users() == start + 1
    assert _num_users() == start


@pytest.mark.parametrize(("available_bytes", "num_users"), [(10_000_000_000, 0), (1_000_000, 1)])
def test_memory_is_returned_where_it_is_short(
    available_bytes: int, num_users: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh pages cost time, which a machine with memory to spare need not pay."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    start = _num_users()
    monkeypatch.setattr(malloc, "host_memory", lambda: (10_000_000_000, available_bytes))
    memscale.wrap(model, memscale.Config(force_optimize=True, enable_logging=False), torch.zeros(512, 64))
    assert _num_users() == start + num_users
    memscale.detach(model)
    assert _num_users() == start


def test_a_model_that_is_dropped_lets_go_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody called `detach`: what the whole process sees is undone all the same."""
    monkeypatch.setattr(malloc, "host_memory", lambda: (10_000_000_000, 0))
    start, before = _num_users(), _num_hooks()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    config = memscale.Config(force_optimize=True, enable_logging=False, use_8bit_optimizer=True)
    memscale.wrap(model, config, torch.zeros(512, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(512, 64)).sum().backward()
    optimizer.step()
    assert _num_users() == start + 1
    assert _num_hooks() != before
    del model, optimizer
    assert _num_users() == start
    assert _num_hooks() == before


def _num_users() -> int:
    gc.collect()  # models that earlier tests have dropped
    return malloc._num_users


def _num_hooks() -> dict[str, int]:
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return {name: len(getattr(sys.modules["torch.optim.optimizer"], name)) for name in names}
