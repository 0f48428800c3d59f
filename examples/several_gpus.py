"""Several GPUs, or several processes on a CPU: DDP or FSDP2 around a model that MemScale plans.

torchrun --nproc-per-node=2 examples/several_gpus.py ddp
torchrun --nproc-per-node=2 examples/several_gpus.py fsdp2

accelerate launch --multi_gpu --num_processes 2 examples/several_gpus.py ddp

`several_machines.slurm` starts it on two machines.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import memscale

way = sys.argv[1] if len(sys.argv) > 1 else "ddp"
if "RANK" not in os.environ:  # without --multi_gpu, `accelerate launch` starts one process where it finds no GPUs
    sys.exit("start it as several ranks: torchrun --nproc-per-node=2 examples/several_gpus.py")
accelerator = torch.accelerator.current_accelerator(check_available=True)
device = torch.device("cpu")
if accelerator is not None:
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)
dist.init_process_group()  # NCCL on NVIDIA's cards, gloo on a CPU
rank = dist.get_rank()

torch.manual_seed(0)  # the same weights everywhere
config = GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to(device)
if way == "fsdp2":
    for block in model.transformer.h:
        fully_shard(block)
    runner = fully_shard(model)
else:
    runner = DistributedDataParallel(model)

# The one line. Before DDP or fully_shard it does the same.
runner = memscale.wrap(runner, memscale.Config(force_optimize=True, enable_logging=rank == 0))

optimizer = torch.optim.AdamW(runner.parameters(), lr=1e-3)
torch.manual_seed(rank)  # other data on every rank
for step in range(3):
    tokens = torch.randint(256, (2, 32 + 16 * rank), device=device)  # batches may differ in length
    loss = runner(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

memscale.detach(runner)
dist.destroy_process_group()
