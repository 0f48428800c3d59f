"""LoRA with PEFT: the base model is frozen, adapters train, and their plan costs next to nothing.

python examples/peft_lora.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memscale


def main(*, wrapped: bool = True, num_steps: int = 4) -> list[float]:
    """Train adapters of a small Llama; the losses."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 256}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).to(device)
    tokens = torch.randint(256, (4, 64), device="cpu").to(device)  # stands for your data
    if wrapped:
        # As low as the mode goes, because this model is small; you would give `memory_budget_gb` instead.
        memscale.wrap(model, memscale.Config(mode="conservative", force_optimize=True, enable_logging=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
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
