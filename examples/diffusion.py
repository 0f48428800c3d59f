"""Diffusion models: a UNet or a DiT, all of it or LoRA adapters, with text encoder and VAE frozen and parked.

python examples/diffusion.py --network unet
python examples/diffusion.py --network dit --lora

The networks are tiny and random, so that this runs anywhere; `from_pretrained` of `diffusers` takes their place. What
the text encoder and the VAE give for the data is computed once, and then their device memory is handed back.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, SD3Transformer2DModel, UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

import memscale

TEXT_WIDTH = 32


def unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def dit() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=64,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=8,
    )


def encode(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents of the images, and the texts: as sequences and as one vector each."""
    vae = AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, latent_channels=4, sample_size=8).to(device)
    text_sizes = {"hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextModel(CLIPTextConfig(vocab_size=64, **text_sizes, eos_token_id=2)).to(device)
    images = torch.randn(16, 3, 8, 8, device="cpu").to(device)  # stands for your data
    words = torch.randint(3, 64, (16, 12), device="cpu").to(device)
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mean
        encoded = text(words)
    for frozen in (vae, text):
        memscale.park(frozen)  # no byte of them is left on the device; `memscale.resume` brings them back
    return latents, encoded.last_hidden_state, encoded.pooler_output


def main(network: str = "unet", *, lora: bool = False, wrapped: bool = True, num_steps: int = 3) -> list[float]:
    """Train the network to find the noise; the losses."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    latents, texts, vectors = encode(device)
    model = {"unet": unet, "dit": dit}[network]().to(device)
    if lora:
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]), model)
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    # As low as the mode goes, because this model is small; you would give `memory_budget_gb` instead.
    config = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
    losses = []
    with memscale.optimize(model, optimizer, config) if wrapped else contextlib.nullcontext():
        for _ in range(num_steps):
            noise, times = torch.randn_like(latents), torch.randint(1000, (len(latents),), device=device)
            inputs: dict[str, Any] = {"timestep": times, "encoder_hidden_states": texts}
            if network == "dit":
                inputs["pooled_projections"] = vectors
            optimizer.zero_grad()
            loss = F.mse_loss(model(scheduler.add_noise(latents, noise, times), **inputs).sample, noise)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=["unet", "dit"], default="unet")
    parser.add_argument("--lora", action="store_true")
    arguments = parser.parse_args()
    print("losses:", [f"{loss:.4f}" for loss in main(arguments.network, lora=arguments.lora)])
