"""Two training steps with the full stack on simgpu: the peak as counted, as predicted and as published."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import nn

import memscale
from benchmarks.full_stack.setups import BATCHES, fresh_model
from memscale import Config
from memscale._execute.executor import executor_of
from memscale.report.tables import table

PUBLISHED_GB = {"bert-base": 0.84, "gpt2-medium": 2.61}


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """One model with the full stack."""

    model: str
    batch: str
    baseline_bytes: int
    predicted_bytes: int
    measured_bytes: int
    state_bytes: int
    """What the optimizer's quantised state would take in 32 bits."""
    packed_bytes: int
    outcomes: tuple[str, ...]
    losses: tuple[float, ...]
    seconds: float

    @property
    def published_bytes(self) -> float:
        return PUBLISHED_GB[self.model] * 1e9


def measure_peak(name: str, steps: int = 2) -> Peak:
    import simgpu

    model, batch = _on_simgpu(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wish = Config(mode=memscale.OptimizationMode.AGGRESSIVE, force_optimize=True, device="simgpu", enable_logging=False)
    _, used = memscale.apply_all_optimizations(model, optimizer, wish, sample_input=batch)
    torch.accelerator.reset_peak_memory_stats()
    start, losses = time.perf_counter(), []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        used.step()
        used.zero_grad()
        losses.append(loss.item())
        del loss
    peak = _write_down(name, model, losses, time.perf_counter() - start)
    memscale.detach(model)
    assert not simgpu.take_reports(), "the device saw races"
    return peak


def _on_simgpu(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, still on the host, and a batch on the device."""
    model, vocabulary = fresh_model(name)
    ids = torch.randint(0, vocabulary, BATCHES[name], generator=torch.Generator().manual_seed(0)).to("simgpu")
    return model, {"input_ids": ids, "labels": ids}


def _write_down(name: str, model: nn.Module, losses: Sequence[float], seconds: float) -> Peak:
    executor = executor_of(model)
    assert executor is not None
    assert executor.plan is not None
    adopted = executor.stats().transfers["optimizer"]
    return Peak(
        model=name,
        batch=" x ".join(map(str, BATCHES[name])),
        baseline_bytes=executor.plan.baseline_peak_bytes,
        predicted_bytes=executor.plan.predicted_peak_bytes,
        measured_bytes=torch.accelerator.max_memory_allocated(),
        state_bytes=adopted.unpacked_bytes,
        packed_bytes=adopted.packed_bytes,
        outcomes=tuple(map(str, executor.outcomes)),
        losses=tuple(losses),
        seconds=seconds,
    )


def show_peaks(peaks: Sequence[Peak]) -> str:
    rows = [
        (
            peak.model,
            peak.batch,
            f"{peak.baseline_bytes / 1e9:.3f}",
            f"{peak.predicted_bytes / 1e9:.3f}",
            f"{peak.measured_bytes / 1e9:.3f}",
            f"{peak.published_bytes / 1e9:.2f}",
            f"{1 - peak.measured_bytes / peak.baseline_bytes:.1%}",
            f"{peak.state_bytes / max(1, peak.packed_bytes):.2f}x",
        )
        for peak in peaks
    ]
    header = ("model", "batch", "unmodified GB", "predicted", "measured", "published", "less", "8-bit state")
    lines = table([header, *rows], left=(0, 1))
    for peak in peaks:
        lines += [f"{peak.model}:", *(f"  {outcome}" for outcome in peak.outcomes)]
    return "\n".join(lines)
