"""A program for `torchrun`: two ranks whose batches differ in length train wrapped and plain. Prints a line a rank.

torchrun --nproc-per-node=2 tests/integrations/ranks.py ddp ddp-before fsdp2
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale import Config
from memscale._progress import Board, stage

WIDTH = 16
LENGTHS = ((8, 12, 16, 8), (12, 8, 8, 8))
CONFIG = Config(force_optimize=True, enable_logging=False, mode="conservative")

Build = Callable[[nn.Module], nn.Module]


def plain_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(3)))


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicate(**options: Any) -> Build:
    return lambda model: DistributedDataParallel(model, **options)


KINDS: dict[str, tuple[Build, str, int]] = {
    "ddp": (replicate(), "after", 1),
    "ddp-inner": (replicate(), "inner", 1),
    "ddp-before": (replicate(), "before", 1),
    "ddp-no-sync": (replicate(gradient_as_bucket_view=True), "after", 2),
    "ddp-static-graph": (replicate(static_graph=True), "before", 1),
    "fsdp2": (shard, "after", 1),
    "fsdp2-before": (shard, "before", 1),
    "fsdp2-no-sync": (shard, "after", 2),
}
"""By name: who runs the model, whether it is wrapped before that or after (or its inner model is), and how many batches
make a step, of which the last one is exchanged."""


def wrapped(kind: str, *, wraps: bool) -> tuple[nn.Module, nn.Module]:
    """What runs the model, and what has the plan."""
    build, order, _ = KINDS[kind]
    model = plain_model()
    if wraps and order == "before":
        memscale.wrap(model, CONFIG)
    runner = build(model)
    target = runner if order == "after" else model
    if wraps and order != "before":
        memscale.wrap(target, CONFIG)
    return runner, target


def exchanging(runner: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    if isinstance(runner, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else runner.no_sync()
    runner.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    return contextlib.nullcontext()


def step(runner: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, num_batches: int) -> list[float]:
    losses = []
    for index in range(num_batches):
        generator = torch.Generator().manual_seed(100 * rank + 10 * number + index)
        batch = torch.randn(2, LENGTHS[rank][number], WIDTH, generator=generator)
        with exchanging(runner, is_last=index == num_batches - 1):
            loss = runner(batch).square().mean()
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(kind: str, rank: int, *, wraps: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    runner, target = wrapped(kind, wraps=wraps)
    optimizer = torch.optim.AdamW(runner.parameters(), 1e-2)
    torch.manual_seed(7 + rank)
    losses = []
    for number in range(len(LENGTHS[rank])):
        losses += step(runner, optimizer, number, rank, KINDS[kind][2])
        if wraps and number == 0:
            check_first_plan(kind, target)
    if wraps:
        plan = target._memscale_executor.plan
        assert plan.actions, "the blocks are checkpointed"
        assert not plan.provisional
        memscale.detach(target)
        assert not hasattr(target, "_memscale_executor")
        assert not hasattr(runner, "_memscale_executor")
    return losses, {name: whole(value) for name, value in runner.state_dict().items()}


def check_first_plan(kind: str, target: nn.Module) -> None:
    """Ranks have agreed on it: the same JSON everywhere. A model that is observed has none yet."""
    plan = target._memscale_executor.plan
    texts: list[str] = ["", ""]
    dist.all_gather_object(texts, plan.to_json())
    assert plan.provisional or texts[0] == texts[1], f"{kind}: the ranks have different plans"


def whole(value: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered.detach().clone()


def compare(kind: str, rank: int) -> None:
    losses, weights = train(kind, rank, wraps=True)
    plain_losses, plain_weights = train(kind, rank, wraps=False)
    assert losses == plain_losses, kind
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights), kind
    sums = torch.stack([value.double().sum() for value in weights.values()])
    others = [torch.zeros_like(sums) for _ in range(2)]
    dist.all_gather(others, sums)
    assert torch.equal(*others), f"{kind}: the ranks have different weights"


def resume(rank: int) -> None:
    """A distributed checkpoint of a wrapped run goes on plain with the same bits, and the other way round."""
    losses = {}
    for saves, loads in ((True, False), (False, True), (False, False)):
        runner, _ = wrapped("fsdp2", wraps=saves)
        optimizer = torch.optim.AdamW(runner.parameters(), 1e-2)
        torch.manual_seed(7 + rank)
        step(runner, optimizer, 0, rank, 1)
        folder = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        model_state, optimizer_state = get_state_dict(runner, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])

        runner, _ = wrapped("fsdp2", wraps=loads)
        optimizer = torch.optim.AdamW(runner.parameters(), 1e-2)
        model_state, optimizer_state = get_state_dict(runner, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(runner, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.manual_seed(9 + rank)
        losses[saves, loads] = step(runner, optimizer, 1, rank, 1) + step(runner, optimizer, 2, rank, 1)
    assert losses[True, False] == losses[False, True] == losses[False, False], losses


def refuse_flat(rank: int) -> None:
    """FSDP1 is refused: before, in the first forward; after, by `wrap`."""
    for use_orig_params in (True, False):
        model = memscale.wrap(plain_model(), CONFIG)
        runner = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(memscale.MemScaleError, match="fully_shard"):
            runner(torch.randn(2, 8, WIDTH))
        with pytest.raises(memscale.MemScaleError, match="fully_shard"):
            memscale.wrap(runner, CONFIG)


class Averages(nn.Module):
    """Communicates in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean()
        dist.all_reduce(mean)
        return x - mean


def refuse_communicating(rank: int) -> None:
    """All ranks are told, and none waits for another."""
    runner = DistributedDataParallel(memscale.wrap(nn.Sequential(plain_model(), Averages()), CONFIG))
    with pytest.raises(memscale.MemScaleError, match=r"communicates|could not plan"):
        runner(torch.randn(2, LENGTHS[rank][0], WIDTH))


def show_waiting(rank: int) -> None:
    """A rank that waits for others says so, where that takes long."""
    runner, target = wrapped("ddp", wraps=True)
    shown: list[str] = []
    with Board(shown.append, delay_s=0), stage("begun"):
        while not shown:  # from here on, every stage is shown
            time.sleep(0.01)
        step(runner, torch.optim.AdamW(runner.parameters(), 1e-2), 0, rank, 1)
    assert any("waiting for the other ranks" in text for text in shown), shown
    follow = [False, False]
    dist.all_gather_object(follow, any("waiting for the plan of the rank" in text for text in shown))
    assert sum(follow) == 1, "one rank plans, and the other waits for it"
    memscale.detach(target)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    rank = dist.get_rank()
    special = {"dcp": resume, "fsdp1": refuse_flat, "communicating": refuse_communicating, "waiting": show_waiting}
    for kind in sys.argv[1:]:
        if kind in special:
            special[kind](rank)
        else:
            compare(kind, rank)
        print(f"{kind}: the same on rank {rank}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
