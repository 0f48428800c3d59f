"""Profiles made by hand, so that decisions can be tested as tables, without torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from memscale._hardware import Hardware
from memscale._plan import TileHead
from memscale._profile import (
    CHECKPOINT,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    STREAM,
    Layer,
    OptimizerCost,
    Profile,
    Segment,
    StepTrace,
    TensorSpec,
    TraceKey,
    Treatment,
)

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


def segment(
    phase: Any, module_fqn: str, peak: int, net: int, moved: int = 0, *, sent: int = 0, fetched: int = 0
) -> Segment:
    return Segment(
        phase,
        module_fqn,
        peak * MB,
        net * MB,
        flops=0,
        matmul_bytes=0,
        other_bytes=moved * MB,
        sent_bytes=sent * MB,
        fetched_bytes=fetched * MB,
    )


@dataclasses.dataclass(frozen=True)
class Block:
    """One block in megabytes: what its forward keeps, plain, selectively and checkpointed, and its temporaries."""

    keeps: int = 100
    keeps_selective: int = 40
    keeps_checkpointed: int = 10
    temporaries: int = 20
    gradients: int = 5
    time: int = 100
    keeps_offloaded: int = 2
    parameters: int = 5

    def kept(self, how: Treatment) -> int:
        return {
            KEEP: self.keeps,
            SELECTIVE: self.keeps_selective,
            CHECKPOINT: self.keeps_checkpointed,
            OFFLOAD: self.keeps_offloaded,
            STREAM: self.keeps_checkpointed,
        }[how]


def trace_of(blocks: dict[str, Block], how: Treatment, *, head: int = 50) -> StepTrace:
    """Stem, blocks, head; head, blocks backwards."""
    extra = {"none": 0.0, "selective": 0.5, "full": 1.0}[how.recompute]
    streamed = how.streams
    segments = [segment("forward", "", 1, 1, 1)]
    for fqn, block in blocks.items():
        kept, visits = block.kept(how), block.parameters * streamed
        sent = block.keeps - kept if how.offloads else 0
        peak = kept + block.temporaries + visits
        segments.append(segment("forward", fqn, peak, kept, block.time, sent=sent, fetched=visits))
        segments.append(segment("forward", "", 0, 0))
    segments.append(segment("forward", "", head, head * 3 // 5, 50))
    segments.append(segment("backward", "", head * 6 // 5, -(head * 3 // 5), 50))
    for fqn, block in reversed(blocks.items()):
        kept, visits = block.kept(how), block.parameters * streamed
        peak = max(0, block.keeps - kept) + block.temporaries + block.gradients + visits
        moved = int(block.time * (2 + extra))
        fetched = block.keeps - kept if how.offloads else visits
        net, sent = block.gradients * (not streamed) - kept, block.gradients * streamed
        segments.append(segment("backward", fqn, peak, net, moved, sent=sent, fetched=fetched))
        segments.append(segment("backward", "", 0, 0))
    segments.append(segment("backward", "", 1, 0, 1))
    return StepTrace(tuple(segments), gradients_at_peak=0, activations_at_peak=0)


def profile_of(
    blocks: dict[str, Block] | int = 8,
    *,
    variants: tuple[Treatment, ...] = (CHECKPOINT, SELECTIVE),
    optimizer: OptimizerCost | None = None,
    **changes: Any,
) -> Profile:
    if isinstance(blocks, int):
        blocks = {f"blocks.{index}": Block() for index in range(blocks)}
    layers = (
        Layer("stem", "Embedding", 10 * MB, 10 * MB, False, "stem", 1),
        *(Layer(fqn, "Block", b.parameters * MB, b.gradients * MB, True, f"{b}", 1) for fqn, b in blocks.items()),
        Layer("head", "Linear", 10 * MB, 10 * MB, False, "head", 1),
    )
    num_parameters = 20 + sum(block.parameters for block in blocks.values())
    profile = Profile(
        device_type="cuda",
        source="static",
        model_class="Model",
        inputs=(TensorSpec("x", (16, 128), "float32"),),
        parameter_bytes=num_parameters * MB,
        buffer_bytes=0,
        input_bytes=1 * MB,
        layers=layers,
        optimizer=optimizer or OptimizerCost("adamw", 2 * num_parameters * MB, 10 * MB, 100 * MB),
        plain=trace_of(blocks, KEEP),
        variants={TraceKey(how): trace_of(blocks, how) for how in variants},
    )
    return dataclasses.replace(profile, **changes)


def full_profile(blocks: dict[str, Block] | int, **changes: Any) -> Profile:
    """With every treatment, and an optimizer whose state can wait elsewhere."""
    profile = profile_of(blocks, variants=(SELECTIVE, OFFLOAD, CHECKPOINT, STREAM))
    size = profile.parameter_bytes
    whole = OptimizerCost("adamw", 2 * size, size, 7 * size, offloaded_step_bytes=min(size, 30 * MB))
    rest = OptimizerCost("adamw", 40 * MB, 20 * MB, 140 * MB)
    return dataclasses.replace(profile, optimizer=whole, rest_optimizer=rest, **changes)


def with_tiled_head(profile: Profile, blocks: dict[str, Block], heads: dict[int, int]) -> Profile:
    """Also traced with the head in tiles: by rows, what head and loss then need."""
    traces = {TraceKey(head_rows=rows): trace_of(blocks, KEEP, head=head) for rows, head in heads.items()}
    head = TileHead("head", rows=min(heads))
    return dataclasses.replace(profile, head=head, variants={**profile.variants, **traces})
