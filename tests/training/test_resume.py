"""Save, kill, resume: a training that is killed goes on in a new process as if nothing had happened."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from tests.lanes import some

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import memscale
from memscale import Config
from memscale._plan import MixedPrecision

directory, last, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
MixedPrecision.choose_dtype = staticmethod(lambda *args, **kwargs: "float16")  # as on a card without bf16

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(96, 4)
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
config = Config(
    use_mixed_precision=True, use_8bit_optimizer=True, force_optimize=True, enable_logging=False,
    offload_dir=directory if "disk" in sys.argv[4] else None,
)
if "pair" in sys.argv[4]:
    model, optimizer = memscale.apply_all_optimizations(model, optimizer, config, torch.randn(8, 96))
else:
    memscale.wrap(model, config, torch.randn(8, 96))
executor = model._memscale_executor
path, start = os.path.join(directory, "checkpoint.pt"), 0
torch.manual_seed(1)
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    executor.load_state_dict(saved["memscale"])
    torch.set_rng_state(saved["rng"])
    start = saved["step"]
for step in range(start, last):
    loss = model(torch.randn(8, 96)).square().mean() * (float("inf") if step == 1 else 1.0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    saved = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "memscale": executor.state_dict(), "rng": torch.get_rng_state(), "step": step + 1, "loss": loss.item(),
    }
    torch.save(saved, path + ".new")
    os.replace(path + ".new", path)
    if step + 1 == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
assert executor.stats().num_skipped_steps == 1, executor.stats()
"""


def run(directory: pathlib.Path, last: int, kill_at: int, how: str) -> int:
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(directory), str(last), str(kill_at), how]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode


@pytest.mark.slow
@pytest.mark.parametrize("how", some(["in place, disk", "pair"], "in place, disk"))
def test_a_killed_run_goes_on_from_the_same_state(how: str, tmp_path: pathlib.Path) -> None:
    """Weights, 8-bit state, schedule, loss scale, skipped steps and random numbers: all as without the kill."""
    assert run(tmp_path / "whole", 6, 0, how) == 0
    assert run(tmp_path / "parts", 6, 3, how) == -signal.SIGKILL
    assert run(tmp_path / "parts", 6, 0, how) == 0
    whole, parts = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["memscale"]["loss_scale"]["scale"] == 2.0**15
    for key in ("loss", "step", "memscale"):
        assert parts[key] == whole[key]
    assert torch.equal(parts["rng"], whole["rng"])
    assert all(torch.equal(parts["model"][name], value) for name, value in whole["model"].items())
    assert flat(parts["optimizer"]) == flat(whole["optimizer"])


def flat(tree: object) -> object:
    """Tensors as lists, so that == compares bits."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tree.tolist())
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in tree.items()}
    return [flat(item) for item in tree] if isinstance(tree, list | tuple) else tree
