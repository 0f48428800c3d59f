"""The snapshot of a predicted step has the structure of PyTorch's own, and shows the same step.

It is compared in a process of its own: what other tests left in the allocator, and the workspace that cuBLAS has taken
for them before the history is recorded, would be in the snapshot as blocks that nobody allocated.
"""

import pickle
import subprocess
from typing import Any

import torch
from torch import nn

import emucuda
import memscale
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.questions.snapshot import step_snapshot
from memscale._profile.inputs import Inputs

WIDTH = 512


def structure(value: Any) -> Any:
    """Keys and types, of lists those of what is in them."""
    if isinstance(value, dict):
        return {name: structure(part) for name, part in value.items()}
    if isinstance(value, list):
        return sorted({repr(structure(part)) for part in value})
    return type(value).__name__


def num_matrices(snapshot: dict[str, Any]) -> int:
    """How often memory for a weight or its gradient is handed out."""
    sizes = [event["size"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    return sizes.count(WIDTH * WIDTH * 4)


def test_it_is_the_step_that_pytorch_records():
    done = emucuda.run([__file__], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def compare() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
    batch = torch.zeros(64, WIDTH, device="cuda")
    config = memscale.Config(enable_logging=False)
    planner = Planner(Job(model, config, memscale.Hardware.detect("cuda"), "sgd"), Inputs.from_sample(batch))
    predicted = pickle.loads(step_snapshot(planner, (), config))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        recorded = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)

    for name in ("segments", "allocator_settings"):
        assert structure(predicted[name]) == structure(recorded[name])
    assert set(predicted) == set(recorded)
    assert {frozenset(event) for event in predicted["device_traces"][0]} == {
        frozenset(event) for event in recorded["device_traces"][0]
    }
    assert num_matrices(predicted) == 2 + num_matrices(recorded), "a prediction begins with the weights"


if __name__ == "__main__":
    compare()
