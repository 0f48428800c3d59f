"""A loop of one's own under Accelerate: wrap the model before or after `prepare`, the rest stays as it was.

python examples/accelerate_loop.py
accelerate launch examples/accelerate_loop.py  # as many processes as there are GPUs
ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py  # two on a CPU
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import memscale


def main(*, wrapped: bool = True, num_steps: int = 6) -> list[float]:
    """Train a small GPT-2 with gradient accumulation and clipping; the losses."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(256, (4 * num_steps, 64), device="cpu")  # stands for your data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=4))
    if wrapped:
        # A budget below what the model needs; without one, 85 % of the device may be filled.
        memscale.wrap(accelerator.unwrap_model(model), memscale.Config(memory_budget_gb=0.01, enable_logging=False))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if wrapped:
        memscale.detach(accelerator.unwrap_model(model))
    return losses


if __name__ == "__main__":
    print("losses:", [f"{loss:.4f}" for loss in main()])
