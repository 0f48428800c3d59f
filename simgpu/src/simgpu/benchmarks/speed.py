"""Time of a training step on simgpu against the same step on the plain CPU: a 4-layer, width-256 transformer."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import simgpu  # noqa: F401  registers the device

BAR = 1.15
_ROUNDS = 15


def training_step(device: str) -> Callable[[], None]:
    """One step of a 4-layer, width-256 transformer, batch 4 x 128, foreach AdamW."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(4, 128, 256, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure_ratio(rounds: int = _ROUNDS) -> tuple[float, float, float]:
    """(CPU ms, simgpu ms, ratio of the medians); the two take turns, so that a busy machine slows both."""
    steps = {device: training_step(device) for device in ("cpu", "simgpu")}
    times: dict[str, list[float]] = {device: [] for device in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for device, step in steps.items():
            started = time.perf_counter()
            step()
            times[device].append((time.perf_counter() - started) * 1e3)
    cpu_ms, simgpu_ms = (statistics.median(times[device]) for device in ("cpu", "simgpu"))
    return cpu_ms, simgpu_ms, simgpu_ms / cpu_ms


def main() -> int:
    torch.set_num_threads(1)
    cpu_ms, simgpu_ms, ratio = measure_ratio()
    print(
        f"training step, 4 layers, width 256, one thread: cpu {cpu_ms:.1f} ms, simgpu {simgpu_ms:.1f} ms, {ratio:.3f}x"
    )
    print(f"bar {BAR}x: {'met' if ratio <= BAR else 'MISSED'}")
    return int(ratio > BAR)
