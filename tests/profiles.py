"""Profiles made by hand, so that decisions can be tested as tables, without torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from memscale._hardware import Hardware
from memscale._profile import Layer, OptimizerCost, Profile, Segment, StepTrace, TensorSpec

MB = 10**6


def hardware_of(total_bytes: int = 10_000 * MB, **changes: Any) -> Hardware:
    """A device whose numbers make arithmetic easy: a byte moved costs one nanosecond."""
    hardware = Hardware(
        device_type="cuda",
        device_name="test card",
        device_count=1,
        total_bytes=total_bytes,
        free_bytes=total_bytes,
        architecture="sm_00",
        supports_bf16=True,
        supports_fp16=True,
        has_fast_16bit=True,
        unified_memory=False,
        host_total_bytes=100_000 * MB,
        host_available_bytes=100_000 * MB,
        disk_free_bytes=None,
        fp32_flops=1e12,
        half_flops=2e12,
        memory_bytes_per_s=1e9,
        link_bytes_per_s=1e8,
    )
    return dataclasses.replace(hardware, **changes)


def segment(phase: Any, module_fqn: str, peak: int, net: int, moved: int = 0) -> Segment:
    return Segment(phase, module_fqn, peak * MB, net * MB, flops=0, matmul_bytes=0, other_bytes=moved * MB)


@dataclasses.dataclass(frozen=True)
class Block:
    """One block in megabytes: what its forward keeps, plain, selectively and checkpointed, and its temporaries."""

    keeps: int = 100
    keeps_selective: int = 40
    keeps_checkpointed: int = 10
    temporaries: int = 20
    gradients: int = 5
    time: int = 100


def trace_of(blocks: dict[str, Block], how: str) -> StepTrace:
    """Stem, blocks, head; head, blocks backwards."""
    kept = {
        fqn: {"plain": b.keeps, "selective": b.keeps_selective, "checkpoint": b.keeps_checkpointed}[how]
        for fqn, b in blocks.items()
    }
    extra = {"plain": 0.0, "selective": 0.5, "checkpoint": 1.0}[how]
    segments = [segment("forward", "", 1, 1, 1)]
    for fqn, block in blocks.items():
        segments.append(segment("forward", fqn, kept[fqn] + block.temporaries, kept[fqn], block.time))
        segments.append(segment("forward", "", 0, 0))
    segments.append(segment("forward", "", 50, 30, 50))
    segments.append(segment("backward", "", 60, -30, 50))
    for fqn, block in reversed(blocks.items()):
        recomputed = block.keeps - kept[fqn]
        peak = recomputed + block.temporaries + block.gradients
        moved = int(block.time * (2 + extra))
        segments.append(segment("backward", fqn, peak, block.gradients - kept[fqn], moved))
        segments.append(segment("backward", "", 0, 0))
    segments.append(segment("backward", "", 1, 0, 1))
    return StepTrace(tuple(segments), gradients_at_peak=0, activations_at_peak=0)


def profile_of(
    blocks: dict[str, Block] | int = 8,
    *,
    variants: tuple[str, ...] = ("checkpoint", "selective"),
    optimizer: OptimizerCost | None = None,
    **changes: Any,
) -> Profile:
    if isinstance(blocks, int):
        blocks = {f"blocks.{index}": Block() for index in range(blocks)}
    layers = (
        Layer("stem", "Embedding", 10 * MB, 10 * MB, False, "stem", 1),
        *(Layer(fqn, "Block", 5 * MB, 5 * MB, True, f"{block}", 1) for fqn, block in blocks.items()),
        Layer("head", "Linear", 10 * MB, 10 * MB, False, "head", 1),
    )
    profile = Profile(
        device_type="cuda",
        source="static",
        model_class="Model",
        inputs=(TensorSpec("x", (16, 128), "float32"),),
        parameter_bytes=(20 + 5 * len(blocks)) * MB,
        buffer_bytes=0,
        input_bytes=1 * MB,
        layers=layers,
        optimizer=optimizer or OptimizerCost("adamw", 2 * (20 + 5 * len(blocks)) * MB, 10 * MB, 100 * MB),
        plain=trace_of(blocks, "plain"),
        variants={name: trace_of(blocks, name) for name in variants},
    )
    return dataclasses.replace(profile, **changes)
