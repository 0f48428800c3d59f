"""An image classifier of timm: a ViT whose blocks are recomputed where the budget needs it.

pip install timm        # with a torchvision that goes with your PyTorch
python examples/timm_classifier.py
"""

from __future__ import annotations

import timm
import torch
import torch.nn.functional as F

import memscale


def main(*, wrapped: bool = True, num_steps: int = 4) -> list[float]:
    """Train a small ViT on random images; the losses."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **sizes).to(device)
    images = torch.randn(8, 3, 32, 32, device="cpu").to(device)  # stand for your data
    labels = torch.randint(10, (8,), device="cpu").to(device)
    if wrapped:
        # As low as the mode goes, because this model is small; you would give `memory_budget_gb` instead.
        memscale.wrap(model, memscale.Config(mode="conservative", force_optimize=True, enable_logging=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if wrapped:
        memscale.detach(model)
    return losses


if __name__ == "__main__":
    print("losses:", [f"{loss:.4f}" for loss in main()])
