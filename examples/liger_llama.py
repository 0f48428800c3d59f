"""Liger's fused kernels and MemScale: patch first, then wrap.

pip install liger-kernel        # its kernels are Triton's, and need a GPU
python examples/liger_llama.py
"""

from __future__ import annotations

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

import memscale


def main(*, wrapped: bool = True, num_steps: int = 4, budget_gb: float | None = None) -> list[float]:
    """Train a small Llama with Liger's kernels; the losses."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("Liger's kernels need a GPU, and PyTorch finds none here")
    apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(device)
    tokens = torch.randint(1024, (4, 256), device="cpu").to(device)  # stands for your data
    if wrapped:
        # As low as the mode goes, because this model is small; you would give `memory_budget_gb` alone instead.
        is_forced = budget_gb is None
        memscale.wrap(model, memscale.Config(mode="conservative", memory_budget_gb=budget_gb, force_optimize=is_forced))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if wrapped:
        memscale.detach(model)
    return losses


if __name__ == "__main__":
    print("losses:", [f"{loss:.4f}" for loss in main()])
