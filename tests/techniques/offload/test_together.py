"""Streaming, activations, optimizer state, checkpointing and a tiled head at once: same training, flat memory."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters, TileHead
from memscale._profile.layers import find_blocks
from memscale.techniques.offload.parameters.streaming import rest_of
from tests.lanes import STEPS_OF_A_LEAK, in_turns
from tests.models import SUITE, Case
from tests.parity import seed
from tests.techniques.offload.runs import (
    DEVICE,
    Run,
    let_autograd_finish,
    pair,
    same,
    train,
    weights,
    without_caches,
)

SMALL = AsyncOffloadConfig(min_tensor_bytes=1024)


@pytest.mark.parametrize(("case", "way"), in_turns(SUITE, ("sync", "async"), whole=["gpt2"]))
def test_trains_the_same(
    case: Case, way: str, plain_runs: dict[str, Run], tmp_path: pathlib.Path, no_races: Any, no_leaks: Any
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
        asynchronous=way == "async",
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
    assert moved["optimizer"].num_steps == 3
    executor.detach()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("case", "way"), in_turns([c for c in SUITE if c.is_deep], ("async", "sync"), whole=["gpt2"]))
def test_trains_the_same_on_a_cpu(case: Case, way: str, plain_runs: Any, tmp_path: pathlib.Path):
    seed(1)
    model = without_caches(case.build())
    cpu = torch.device("cpu")
    name = f"{case.name} on a CPU"  # attention draws other numbers for its dropout there
    if name not in plain_runs:
        plain_runs[name] = train(copy.deepcopy(model), case, device=cpu)
    blocks = list(find_blocks(model))
    executor = Executor(
        model, ExecutionSettings(cpu, asynchronous=way == "async", async_config=SMALL, offload_dir=str(tmp_path))
    )
    executor.attach(
        [
            *(Checkpoint(fqn) for fqn in blocks[::2]),
            *(OffloadActivations(fqn) for fqn in blocks),
            OffloadOptimizer(bucket_bytes=20_000),
        ]
    )
    kept: list[Any] = []
    train(model, case, device=cpu, keep=kept).assert_same(plain_runs[name])
    assert executor.stats().transfers["activations"].num_sent > 0
    executor.detach()
    assert list(tmp_path.iterdir()) == []


# ---- everything on


def everything(model: nn.Module) -> list[Action]:
    blocks = list(find_blocks(model))
    return [
        TileHead("lm_head", rows=16),
        *(StreamParameters(fqn) for fqn in (*rest_of(model, blocks), *blocks)),
        *(OffloadActivations(fqn) for fqn in blocks),
        OffloadOptimizer(bucket_bytes=20_000),
    ]


def gpt2(num_layers: int, width: int = 32) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    seed(1)
    return without_caches(GPT2LMHeadModel(config)).train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(number)).to(DEVICE)
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("schedule", range(8))
def test_the_order_in_which_copies_run_does_not_matter(schedule: int, plain_runs: Any, no_races: Any):
    def run(asynchronous: bool) -> list[Any]:
        model = gpt2(3)
        executor = Executor(model, ExecutionSettings(DEVICE, asynchronous=asynchronous, async_config=SMALL))
        executor.attach(everything(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(0)
        losses = [step(model, optimizer, number) for number in range(4)]
        executor.detach()
        return [losses, weights(model)]

    if "blocking" not in plain_runs:
        plain_runs["blocking"] = run(asynchronous=False)
    simgpu.set_schedule_seed(schedule)
    losses, state = run(asynchronous=True)
    assert losses == plain_runs["blocking"][0]
    assert same(state, plain_runs["blocking"][1])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_twice_the_layers_cost_less_than_one_layer(asynchronous: bool, no_leaks: Any):
    layer_bytes = sum(p.nbytes for p in gpt2(1, 64).transformer.h.parameters())
    tight = AsyncOffloadConfig(min_tensor_bytes=1024, window_bytes=layer_bytes // 8, prefetch_bytes=layer_bytes // 8)

    def peak_of(num_layers: int) -> int:
        model = gpt2(num_layers, 64)
        executor = Executor(model, ExecutionSettings(DEVICE, asynchronous=asynchronous, async_config=tight))
        executor.attach(everything(model))
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 0)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        step(model, optimizer, 1)
        peak = torch.accelerator.max_memory_allocated()
        executor.detach()
        return peak

    assert peak_of(8) - peak_of(4) < layer_bytes


@STEPS_OF_A_LEAK
def test_many_steps_use_no_more_than_ten(num_steps: int, tmp_path: pathlib.Path, no_races: Any):
    model = gpt2(2, 16)
    settings = ExecutionSettings(
        DEVICE, asynchronous=True, async_config=SMALL, host_budget_bytes=1 << 18, offload_dir=str(tmp_path)
    )
    executor = Executor(model, settings)
    executor.attach(everything(model))
    optimizer = torch.optim.AdamW(model.parameters())
    levels = []
    for number in range(num_steps):
        step(model, optimizer, number)
        if number % 10 == 9:
            let_autograd_finish()
            torch.accelerator.synchronize()
            optimizer.zero_grad()
            store = executor._offloading.parked.transfers.store
            held = [(leaf.counters.held_bytes, leaf.counters.allocated_bytes) for leaf in store.leaves()]
            levels.append((torch.accelerator.memory_allocated(), simgpu.pinned_stats().requested_bytes, *held))
    assert len(set(levels)) == 1, levels
    executor.detach()
