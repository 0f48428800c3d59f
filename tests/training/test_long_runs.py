"""Long runs: after thousands of steps nothing has grown, on any tier.

`make test` takes 200 steps, `make test-all` 2,000. What is counted after the first twenty is no larger after every
further sixty, so that a leak of one object a step, or of one in sixty, is seen.
"""

from __future__ import annotations

import collections
import gc
import os
import pathlib
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_internals
from torch.optim import optimizer as optimizer_internals

import memscale
import simgpu
from memscale import Config
from memscale._execute.executor import executor_of
from tests.techniques.offload.runs import let_autograd_finish
from tests.training.histories import LETS_GO_S, LITTLE_HOST_GB, Batch, Net, Side, plan_for

FIRST, EVERY = 20, 60
WAYS = (
    ("simgpu", "everything", True, False),
    ("simgpu", "optimizer", False, True),
    ("cpu", "kept outputs", False, False),
    ("simgpu", "stream, step on the device", True, False),
    ("simgpu", "in backward", True, False),
    ("cpu", "optimizer", False, False),
)
LANES = [
    *((*way, 200) for way in WAYS[:2]),
    *(pytest.param(*way, 2000, marks=pytest.mark.full) for way in WAYS),
]


def census(model: nn.Module) -> dict[str, int]:
    """What may grow: bytes by tier, hooks, nodes of graphs, threads, descriptors, objects."""
    let_autograd_finish()
    gc.collect()
    torch.accelerator.synchronize()
    executor = executor_of(model)
    assert executor is not None
    stats = executor.stats()
    ours = collections.Counter(
        type(one).__name__ for one in gc.get_objects() if str(type(one).__module__).startswith("memscale.")
    )
    return {
        "device bytes": torch.accelerator.memory_allocated(),
        "pinned bytes": simgpu.pinned_stats().requested_bytes,
        "most bytes on the host": stats.host_bytes,
        "most bytes on disk": stats.disk_bytes,
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),  # asks no proxy for its class
        "hooks": sum(
            len(v) for m in model.modules() for k, v in vars(m).items() if "hook" in k and hasattr(v, "__len__")
        )
        + sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
        "global hooks": sum(
            len(table)
            for owner in (module_internals, optimizer_internals)
            for name, table in vars(owner).items()
            if name.startswith("_global_") and table is not None
        ),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        **{f"objects of {name}": count for name, count in ours.items()},
    }


def grown(model: nn.Module, before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is more than it was. Autograd's thread drops a pass a moment late: only a failure waits to the end."""
    deadline_s = time.monotonic() + LETS_GO_S
    while True:
        now = census(model)
        found = {name: (before.get(name, 0), count) for name, count in now.items() if count > before.get(name, 0)}
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize(("device", "way", "asynchronous", "disk", "steps"), LANES)
def test_nothing_grows(
    device: str,
    way: str,
    asynchronous: bool,
    disk: bool,
    steps: int,
    tmp_path: pathlib.Path,
    simgpu_device: Any,
    no_leaks: None,
) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    side = Side(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    config = Config(
        device=device,
        offload_dir=str(tmp_path),
        enable_logging=False,
        max_cpu_offload_gb=LITTLE_HOST_GB if disk else None,
    )
    memscale.execute(model, plan_for(model, way, device, asynchronous), config)
    first: dict[str, int] = {}
    more: dict[str, tuple[int, int]] = {}
    for step in range(1, steps + 1):
        side.loss(Batch().ids(step, device)).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        if step == FIRST:
            first = census(model)
        elif step > FIRST and (step - FIRST) % EVERY == 0:
            more |= grown(model, first)
    memscale.detach(model)
    assert not more, more
    assert list(tmp_path.iterdir()) == []
