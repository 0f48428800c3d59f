"""The host memory of a plan is what CUDA's allocator of pinned memory takes for it, powers of two and all."""

import pytest
import torch
from torch import nn

import memscale


class Tied(nn.Module):
    """Blocks of 8 MB between an embedding and a head that share their weight, of 16 MB."""

    def __init__(self, width: int = 512, words: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self.blocks = nn.ModuleList(nn.Sequential(*(type(layer)(*_sizes(layer)) for layer in layers)) for _ in range(6))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()


@pytest.mark.parametrize("on_host", [False, True], ids=["device step", "host step"])
def test_what_is_planned_is_taken(on_host, monkeypatch):
    monkeypatch.setenv("MEMSCALE_MEASURE", "0")
    model = Tied().cuda()
    ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    config = memscale.Config(
        force_optimize=True, async_offload=True, allow_host_step=on_host, enable_logging=False, memory_budget_gb=1
    )
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    memscale.wrap(model, config, sample_input=ids)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    executor = model._memscale_executor
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    planned = executor.plan.host_bytes + executor.plan.movable_bytes
    assert taken == executor.stats().host_bytes, "what is counted is what the allocator took"
    assert any(parameter.device.type == "cpu" for parameter in model.parameters()), "parameters are streamed"
    assert taken <= 1.02 * planned
    if not on_host:  # else gradients and state are in plain memory
        assert taken >= 0.8 * planned
    memscale.detach(model)
