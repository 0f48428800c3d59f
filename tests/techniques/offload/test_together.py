"""Streaming, activations, optimizer state and checkpointing at once: the same training, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from memscale._config import AsyncOffloadConfig
from memscale._execute import ExecutionSettings, Executor
from memscale._plan import Action, Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale._profile.layers import find_blocks
from tests.models import SUITE, Case
from tests.techniques.offload.runs import DEVICE, Run, pair, train, without_caches


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_trains_the_same(
    case: Case, asynchronous: bool, plain_runs: dict[str, Run], tmp_path: pathlib.Path, no_races: Any, no_leaks: Any
):
    plain, model = pair(lambda: without_caches(case.build()))
    if case.name not in plain_runs:
        plain_runs[case.name] = train(plain, case)
    del plain
    blocks = list(find_blocks(model))
    actions: list[Action] = [
        *(StreamParameters(module_fqn) for module_fqn in blocks[::2]),
        *(Checkpoint(module_fqn) for module_fqn in blocks[1::2]),
        *(OffloadActivations(module_fqn) for module_fqn in blocks),
        OffloadOptimizer(bucket_bytes=20_000),
    ]
    settings = ExecutionSettings(
        device=DEVICE,
        asynchronous=asynchronous,
        async_config=AsyncOffloadConfig(min_tensor_bytes=1024),
        offload_dir=str(tmp_path),
    )
    kept: list[Any] = []
    executor = Executor(model, settings)
    executor.attach(actions)
    train(model, case, keep=kept).assert_same(plain_runs[case.name])
    moved = executor.stats().transfers
    assert moved["streaming"].num_visits > 0
    assert moved["activations"].num_sent > 0
    assert moved["optimizer"].num_steps == 5
    executor.detach()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert list(tmp_path.iterdir()) == []
