"""A forked child: what waits on the disk is the parent's, and nobody waits for a thread that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lanes import some

PROGRAM = """
import os, signal, sys
import torch
from torch import nn
from memscale._config import AsyncOffloadConfig
from memscale._errors import OffloadError
from memscale._execute.executor import Executor
from memscale._plan import OffloadActivations, OffloadOptimizer
from memscale._execute.settings import ExecutionSettings

torch.set_num_threads(1)
PATIENCE_S = 60
Inputs = torch.arange(4 * 6 * 32).view(4, 6, 32) / 768

def build():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0) for _ in range(2)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)

def train(model, optimizer, num_steps):
    for step in range(num_steps):
        model(Inputs + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def refused(function, *args):
    try:
        function(*args)
    except OffloadError as error:
        assert "which was forked from it" in str(error), error
        return True
    return False

def everything(model, optimizer):
    values = [*model.parameters()]
    return values + [v for entry in optimizer.state_dict()["state"].values() for v in entry.values()]

def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))

twin, twin_optimizer = build()
model, optimizer = build()
settings = ExecutionSettings(
    asynchronous=sys.argv[1] == "async", async_config=AsyncOffloadConfig(min_tensor_bytes=0), offload_dir=sys.argv[2]
)
executor = Executor(model, settings, optimizer)
executor.attach([OffloadActivations("0"), OffloadActivations("1"), OffloadOptimizer(4096)])
train(model, optimizer, 2)
train(twin, twin_optimizer, 2)
loss, twin_loss = (one(Inputs).square().mean() for one in (model, twin))  # saved tensors wait on the disk now

def one_steps():
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert refused(optimizer.step)

def one_runs_the_parents_backward():
    if not refused(loss.backward):  # what is still in memory is the child's own
        twin_loss.backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters()))

def one_evaluates():
    with torch.no_grad():
        assert torch.equal(model(Inputs), twin(Inputs))

def one_has_a_model_of_its_own():
    mine, my_optimizer = build()
    mine_too, my_optimizer_too = build()
    mine_attached = Executor(mine, settings, my_optimizer)
    mine_attached.attach([OffloadActivations("0"), OffloadOptimizer(4096)])
    train(mine, my_optimizer, 2)
    train(mine_too, my_optimizer_too, 2)
    assert same(everything(mine, my_optimizer), everything(mine_too, my_optimizer_too))
    mine_attached.detach()

CHILDREN = {
    "trains": lambda: train(model, optimizer, 2),
    "saves": lambda: optimizer.state_dict(),
    "detaches": lambda: executor.detach(),
}
CHILDREN = {name: lambda child=child: refused(child) or sys.exit(1) for name, child in CHILDREN.items()}
others = (one_steps, one_runs_the_parents_backward, one_evaluates, one_has_a_model_of_its_own)
CHILDREN.update({child.__name__: child for child in others}, one_ends=lambda: None)
for name, act in CHILDREN.items():
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)  # a child that hangs is killed
        act()
        sys.exit(0)  # as an ordinary program ends: with its finalizers
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child that {name} ended with {status}"
loss.backward()
twin_loss.backward()
assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters()))
optimizer.step()
twin_optimizer.step()
train(model, optimizer, 2)
train(twin, twin_optimizer, 2)
assert same(everything(model, optimizer), everything(twin, twin_optimizer))
executor.detach()
assert same(everything(model, optimizer), everything(twin, twin_optimizer))
print("the parent is well")
"""


@pytest.mark.parametrize("way", some(["sync", "async"], "async"))
def test_the_parents_state_is_its_own_and_nothing_hangs(way: str, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "the parent is well" in done.stdout, done.stderr
    assert not done.stderr
    assert list(tmp_path.iterdir()) == []
