"""QLoRA: the base model's weights are in 4 bits (bitsandbytes), adapters train, the plan comes with the first steps.

python examples/qlora.py

With `from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))` the model is in 4 bits already.
"""

from __future__ import annotations

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memscale


def in_4_bits(model: nn.Module, device: torch.device) -> nn.Module:
    """Every linear layer but the head, as `load_in_4bit` does it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                packed = Linear4bit(child.in_features, child.out_features, child.bias is not None, torch.float32)
                packed.weight = Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, name, packed)
    return model.to(device)


def main(*, wrapped: bool = True, num_steps: int = 4, bf16: bool = False) -> list[float]:
    """Train adapters of a small Llama, in 32 bits or under autocast; the losses."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 256}
    base = in_4_bits(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)), device)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).to(device)
    tokens = torch.randint(256, (4, 64), device="cpu").to(device)  # stands for your data
    if wrapped:
        # Without a sample_input: 4-bit weights cannot be rehearsed, so the first steps are observed and planned from.
        memscale.wrap(model, memscale.Config(mode="conservative", force_optimize=True, enable_logging=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if wrapped:
        memscale.detach(model)
    return losses


if __name__ == "__main__":
    print("losses:", [f"{loss:.4f}" for loss in main()])
