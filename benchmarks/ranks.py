"""What one of several ranks holds on an emulated card, beside what its plan says. Their collectives do nothing.

    python -m emucuda -m benchmarks.ranks ddp 8                  # plain
    python -m emucuda -m benchmarks.ranks fsdp2 8 conservative   # wrapped, as low as the mode allows
    python -m emucuda -m benchmarks.ranks fsdp2-whole 8 conservative   # the whole model was on the card first
    python -m emucuda -m benchmarks.ranks fsdp2 8 balanced plain # wrapped, with a plan that leaves it as it is

GPT-2 with 6 layers of 512, batch 4 x 256, AdamW, four steps; bytes that PyTorch's allocator hands out and reserves.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

import memscale

NUM_STEPS = 4


def build(way: str, num_ranks: int) -> nn.Module:
    """The model as these ranks would hold it."""
    config = GPT2Config(n_layer=6, n_embd=512, n_head=8, bos_token_id=0, eos_token_id=0, use_cache=False)
    if way == "ddp":
        replica = DistributedDataParallel(GPT2LMHeadModel(config).to("cuda"), device_ids=[0])
        replica.register_comm_hook(None, _send_nothing)  # the group without others has no answer of its own
        return replica
    with torch.device("meta" if way == "fsdp2" else "cpu"):
        model = GPT2LMHeadModel(config)
    if way == "fsdp2-whole":
        model.to("cuda")
    mesh = init_device_mesh("cuda", (num_ranks,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _filled(model) if way == "fsdp2" else model


def _filled(model: nn.Module) -> nn.Module:
    """Parameters that come as shares, as from a checkpoint: no card ever holds the whole model."""
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def _send_nothing(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    sent: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


def main(way: str, num_ranks: int, mode: str | None, *, forces: bool = True) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    runner = build(way, num_ranks)
    device = torch.get_device_module("cuda")
    device.empty_cache()
    device.reset_peak_memory_stats()
    if mode is not None:
        config = memscale.Config(mode=mode, force_optimize=forces, enable_logging=False)  # type: ignore[arg-type]
        memscale.wrap(runner, config)
    optimizer = torch.optim.AdamW(runner.parameters(), lr=1e-4)
    tokens = torch.zeros(4, 256, dtype=torch.long, device="cuda")
    for _ in range(NUM_STEPS):
        runner(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"emulated: allocated {device.max_memory_allocated():,}, reserved {device.max_memory_reserved():,} bytes")
    if mode is not None:
        executor: Any = runner._memscale_executor
        plan = executor.plan
        print(f"planned: live {plan.predicted_peak_bytes:,} (plain {plan.baseline_peak_bytes:,})")
        print(f"planned: allocated {plan.predicted_allocated_bytes}, reserved {plan.predicted_reserved_bytes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None, forces="plain" not in sys.argv)
