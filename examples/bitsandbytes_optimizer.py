"""An 8-bit optimizer of bitsandbytes that you chose yourself: MemScale counts its state as it is, and leaves it so.

python examples/bitsandbytes_optimizer.py
"""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from transformers import BertConfig, BertForMaskedLM

import memscale


def main(*, wrapped: bool = True, num_steps: int = 4) -> list[float]:
    """Train a small BERT with AdamW in 8 bits; the losses."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=256, **sizes)).to(device)
    tokens = torch.randint(256, (4, 64), device="cpu").to(device)  # stands for your data
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    config = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
    losses = []

    def train() -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if wrapped:
        with memscale.optimize(model, optimizer, config):  # knows the optimizer, so its plan counts 8 bits
            train()
    else:
        train()
    return losses


if __name__ == "__main__":
    print("losses:", [f"{loss:.4f}" for loss in main()])
