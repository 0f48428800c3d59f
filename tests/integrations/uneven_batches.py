"""A program for `torchrun`: two ranks whose batches differ in length, wrapped and plain. Prints a line a rank."""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale import Config

LENGTHS = ((16, 16, 24, 16, 16), (16, 24, 16, 16, 16))


def build(kind: str) -> tuple[nn.Module, nn.Module]:
    """The model, and what runs it."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)))
    if kind == "ddp":
        return model, DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return model, fully_shard(model, mesh=mesh)


def train(kind: str, rank: int, *, wrapped: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, runner = build(kind)
    if wrapped:
        memscale.wrap(runner, Config(force_optimize=True, enable_logging=False, mode="conservative"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(7 + rank)
    losses = []
    for step, length in enumerate(LENGTHS[rank]):
        batch = torch.randn(4, length, 32, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = runner(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if wrapped:
        plan = runner._memscale_executor.plan
        assert plan.actions, "the blocks are checkpointed"
        assert not plan.provisional
    return losses, {name: whole(value) for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered.detach().clone()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    rank = dist.get_rank()
    for kind in sys.argv[1:]:
        losses, weights = train(kind, rank, wrapped=True)
        plain_losses, plain_weights = train(kind, rank, wrapped=False)
        assert losses == plain_losses, kind
        assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights), kind
        sums = torch.stack([value.double().sum() for value in weights.values()])
        others = [torch.zeros_like(sums) for _ in range(2)]
        dist.all_gather(others, sums)
        assert torch.equal(*others), f"{kind}: the ranks have different weights"
        print(f"{kind}: the same on rank {rank}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
