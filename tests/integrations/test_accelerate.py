"""The real Accelerate: a model that is wrapped before `prepare`, or after it, trains as a plain one."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import memscale
from memscale._execute.executor import executor_of
from memscale._plan import Checkpoint

ROOT = pathlib.Path(__file__).parents[2]
HANGS_AFTER_S = 1200
"""A guard against a hang, and no more: a busy machine is slow."""
CONFIG = memscale.Config(mode=memscale.OptimizationMode.CONSERVATIVE, force_optimize=True, enable_logging=False)


def train(order: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
    """Losses, weights and plan of a loop with accumulation, clipping, a schedule and a smaller last batch."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)))
    data: Any = torch.randn(4 * 4 + 2, 8, 16)
    if order == "before":
        model = memscale.wrap(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(data, 4))
    if order == "after":
        model = memscale.wrap(model, CONFIG)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    if order == "plain":
        return losses, weights, None
    executor = executor_of(accelerator.unwrap_model(model))
    assert executor is not None
    memscale.detach(accelerator.unwrap_model(model))
    return losses, weights, executor.plan


@pytest.mark.parametrize("order", ["before", "after"])
def test_wrap_may_come_before_prepare_or_after_it(order: str) -> None:
    check(order)


def check(order: str) -> None:
    expected_losses, expected, _ = train("plain")
    losses, weights, plan = train(order)
    assert all(torch.equal(loss, wanted) for loss, wanted in zip(losses, expected_losses, strict=True))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert any(isinstance(action, Checkpoint) for action in plan.actions)


def start(command: str, *arguments: str) -> str:
    """What the ranks print that a command of the guide starts, as it stands there but for the program."""
    variable, _, flags = command.partition("accelerate launch ")
    environment = dict(item.split("=") for item in variable.split())
    answer = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags.split(), *arguments],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def commands() -> list[str]:
    """Those of the guide that start processes on a CPU, by what comes before the program."""
    guide = (ROOT / "docs/guides/several_gpus.md").read_text()
    found = re.findall(r"^(.*accelerate launch --multi_gpu --num_processes 2) examples/(\w+)\.py", guide, re.MULTILINE)
    assert [program for _, program in found] == ["several_gpus", "accelerate_loop"]
    return [command for command, _ in found]


@pytest.mark.slow
def test_the_guides_command_starts_ranks_that_share_a_model() -> None:
    """Accelerate puts DDP around the model, and each rank has batches of its own."""
    printed = start(commands()[1], "--module", "tests.integrations.test_accelerate")
    assert {f"both orders are the same on rank {rank} of 2" for rank in (0, 1)} <= set(printed.splitlines())


@pytest.mark.slow
def test_the_examples_start_as_the_guide_says() -> None:
    ddp, loop = commands()
    assert "step 2: loss" in start(ddp, "examples/several_gpus.py", "ddp")
    assert start(loop, "examples/accelerate_loop.py").count("losses:") == 2, "each rank prints its own"


def main() -> None:
    """One of the ranks that `accelerate launch` starts."""
    torch.set_num_threads(1)
    for order in ("before", "after"):
        check(order)
    state = Accelerator()
    sys.stdout.write(f"both orders are the same on rank {state.process_index} of {state.num_processes}\n")
    state.end_training()


if __name__ == "__main__":
    main()
