"""The peak model and the time model: what any plan would peak at and cost, from a profile alone. No torch.

The step is a sequence of segments. Each block's segments are taken from the trace of the way it is treated, everything
else from the plain trace or the one with a tiled head; live bytes run through them. The peak is the maximum over the
end of forward, every backward position with its recompute, and the optimizer step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal, get_args

from memscale._hardware import Hardware
from memscale._plan import (
    Action,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._profile import Layer, Profile, Segment, StepTrace

Treatment = Literal["keep", "selective", "offload", "checkpoint", "stream"]
"""What is done to a block: its activations are kept, partly recomputed, sent away or recomputed; or its parameters
visit the device only while it computes (and its activations are recomputed)."""
TREATMENTS: tuple[Treatment, ...] = get_args(Treatment)

INSIDE = "inside:"
"""Marks the traces in which attention and MLPs are tiled."""

_TILED_HEAD_SLOWDOWN = 1.02
"""Tiles cost more launches than the counts show; and what is bit-exact comes first."""
_MATMUL_EFFICIENCY = 0.6
"""The share of nominal throughput that dense matrix products reach."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A plan as the model sees it."""

    blocks: tuple[tuple[str, Treatment], ...] = ()
    """Blocks that are not simply kept."""
    tiles_head: bool = False
    tiles_inside: bool = False
    """Attention and MLPs inside the blocks are tiled."""
    offloads_optimizer: bool = False

    @property
    def num_actions(self) -> int:
        return len(self.blocks) + self.tiles_head + self.tiles_inside + self.offloads_optimizer


def choice_of(actions: Iterable[Action]) -> Choice:
    """The choice behind a plan's actions."""
    blocks: list[tuple[str, Treatment]] = []
    tiles_head = tiles_inside = offloads_optimizer = False
    for action in actions:
        match action:
            case Checkpoint():
                blocks.append((action.module_fqn, "selective" if action.keep else "checkpoint"))
            case OffloadActivations():
                blocks.append((action.module_fqn, "offload"))
            case StreamParameters():
                blocks.append((action.module_fqn, "stream"))
            case TileHead():
                tiles_head = True
            case TileAttention() | TileMlp():
                tiles_inside = True
            case OffloadOptimizer():
                offloads_optimizer = True
    return Choice(tuple(blocks), tiles_head, tiles_inside, offloads_optimizer)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to."""

    peak_bytes: int
    step_ms: float
    host_bytes: int = 0
    """Parameters and gradients that must wait in host memory."""
    movable_bytes: int = 0
    """Activations and optimizer state that wait on the host or below it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Adjacent segments of one owner, as one."""

    peak_bytes: int
    net_bytes: int
    ms: float


class CostModel:
    """Evaluates choices on one profile and one hardware."""

    def __init__(self, profile: Profile, hardware: Hardware, *, overlaps: bool = False) -> None:
        self.profile = profile
        self.hardware = hardware
        self.overlaps = overlaps
        self.blocks: dict[str, Layer] = {layer.module_fqn: layer for layer in profile.layers if layer.is_block}
        self._owners = self._runs(profile.plain)[0]
        self._whole: dict[str, StepTrace] = {}
        self._stretches: dict[str, list[_Stretch]] = {}
        for name, trace in {"keep": profile.plain, **profile.variants}.items():
            owners, stretches = self._runs(trace)
            if owners == self._owners:
                self._stretches[name] = stretches
            else:
                self._whole[name] = trace

    def _runs(self, trace: StepTrace) -> tuple[list[str], list[_Stretch]]:
        """The step as a sequence of blocks and what lies between them, whatever pieces that is made of."""
        runs = [(owner, tuple(group)) for owner, group in itertools.groupby(trace.segments, self._owner)]
        return [owner for owner, _ in runs], [self._merge(segments) for _, segments in runs]

    def _owner(self, segment: Segment) -> str:
        return segment.module_fqn if segment.module_fqn in self.blocks else ""

    def _merge(self, segments: tuple[Segment, ...]) -> _Stretch:
        trace = StepTrace(segments)
        return _Stretch(trace.peak_bytes, trace.end_bytes, sum(self.segment_ms(segment) for segment in segments))

    @property
    def treatments(self) -> tuple[Treatment, ...]:
        """Treatments that single blocks can be given."""
        return tuple(name for name in TREATMENTS if name != "keep" and name in self._stretches)

    @property
    def whole_treatments(self) -> tuple[Treatment, ...]:
        """Treatments that only all blocks together can be given: their step runs in another order."""
        return tuple(name for name in TREATMENTS if name in self._whole)

    def can_tile_inside(self, blocks: tuple[tuple[str, Treatment], ...]) -> bool:
        """Whether attention and MLPs can be tiled inside blocks that are treated so."""
        used = {treatment for _, treatment in blocks} | ({"keep"} if len(blocks) < len(self.blocks) else set())
        return bool(self.profile.inside) and all(f"{INSIDE}{treatment}" in self._stretches for treatment in used)

    @property
    def can_tile_head(self) -> bool:
        return self.profile.head is not None and "tile_head" in self._stretches

    def segment_ms(self, segment: Segment) -> float:
        bytes_per_s = self.hardware.memory_bytes_per_s
        matmul_s = max(
            segment.flops / (self.hardware.fp32_flops * _MATMUL_EFFICIENCY), segment.matmul_bytes / bytes_per_s
        )
        return (matmul_s + segment.other_bytes / bytes_per_s) * 1e3

    def evaluate(self, choice: Choice) -> Outcome:
        """The peak, the time and the waiting bytes of a step under this choice."""
        treated = dict(choice.blocks)
        inside = INSIDE if choice.tiles_inside else ""
        rest = self._stretches["tile_head" if choice.tiles_head else "keep"]
        live = peak = self._static_bytes(choice)
        total_ms = 0.0
        for index, owner in enumerate(self._owners):
            stretch = self._stretches[inside + treated.get(owner, "keep")][index] if owner else rest[index]
            high = live + stretch.peak_bytes
            if high > peak:
                peak = high
            live += stretch.net_bytes
            total_ms += stretch.ms
        peak = max(peak, live + self._step_bytes(choice))
        if choice.tiles_head:
            total_ms *= _TILED_HEAD_SLOWDOWN
        total_ms += self._optimizer_ms(choice) + sum(self.link_ms(fqn, how) for fqn, how in choice.blocks)
        return Outcome(peak, total_ms, self._host_bytes(choice), self._movable_bytes(choice))

    def evaluate_whole(self, treatment: Treatment) -> Outcome:
        """Every block treated so, by a trace that cannot be mixed with others."""
        choice = Choice(tuple((fqn, treatment) for fqn in self.blocks))
        trace = self._whole[treatment]
        total_ms = sum(self.segment_ms(segment) for segment in trace.segments) + self._optimizer_ms(choice)
        return Outcome(self.peak_of(trace, choice), total_ms, self._host_bytes(choice), self._movable_bytes(choice))

    def peak_of(self, trace: StepTrace, choice: Choice) -> int:
        """The peak of a step that was traced as a whole."""
        return self._static_bytes(choice) + max(trace.peak_bytes, trace.end_bytes + self._step_bytes(choice))

    # ---- what is there all the time

    def _streamed(self, choice: Choice) -> list[Layer]:
        return [self.blocks[fqn] for fqn, treatment in choice.blocks if treatment == "stream"]

    def _streamed_share(self, choice: Choice) -> float:
        """The share of the blocks' trainable bytes whose optimizer state is on the host."""
        total = sum(layer.trainable_bytes for layer in self.blocks.values())
        return sum(layer.trainable_bytes for layer in self._streamed(choice)) / total if total else 0.0

    def _between(self, choice: Choice, whole: int, rest: int) -> int:
        """A cost that falls from `whole` to `rest` as blocks are streamed."""
        return round(whole - (whole - rest) * self._streamed_share(choice))

    def _state_bytes(self, choice: Choice) -> int:
        whole = self.profile.optimizer.state_bytes
        rest = self.profile.rest_optimizer.state_bytes if self.profile.rest_optimizer else whole
        return self._between(choice, whole, rest)

    def _static_bytes(self, choice: Choice) -> int:
        profile = self.profile
        streamed = sum(layer.param_bytes for layer in self._streamed(choice))
        state = 0 if choice.offloads_optimizer else self._state_bytes(choice)
        return profile.parameter_bytes + profile.buffer_bytes + profile.input_bytes - streamed + state

    def _step_bytes(self, choice: Choice) -> int:
        optimizer = self.profile.optimizer
        if choice.offloads_optimizer:
            assert optimizer.offloaded_step_bytes is not None
            return min(optimizer.offloaded_step_bytes, self._state_bytes(choice) + optimizer.step_bytes)
        rest = self.profile.rest_optimizer.step_bytes if self.profile.rest_optimizer else optimizer.step_bytes
        return self._between(choice, optimizer.step_bytes, rest)

    # ---- what waits elsewhere

    def _host_bytes(self, choice: Choice) -> int:
        return sum(layer.param_bytes + layer.trainable_bytes for layer in self._streamed(choice))

    def _movable_bytes(self, choice: Choice) -> int:
        away = self.profile.optimizer.state_bytes
        state = away if choice.offloads_optimizer else away - self._state_bytes(choice)
        return state + sum(self.saved_bytes(fqn, "offload") for fqn, how in choice.blocks if how == "offload")

    # ---- time

    def _optimizer_ms(self, choice: Choice) -> float:
        optimizer = self.profile.optimizer
        compute_ms = optimizer.moved_bytes / self.hardware.memory_bytes_per_s * 1e3
        if not choice.offloads_optimizer:
            return compute_ms
        return self._exposed_ms(2 * self._state_bytes(choice), compute_ms) + compute_ms

    def link_ms(self, module_fqn: str, treatment: Treatment) -> float:
        """Time that a block's transfers add to its step: all of it, or what its own compute does not hide."""
        if treatment == "offload":
            return self._exposed_ms(2 * self.saved_bytes(module_fqn, "offload"), self.block_ms(module_fqn, "keep"))
        if treatment == "stream":
            layer = self.blocks[module_fqn]
            moved = 2 * layer.param_bytes + layer.trainable_bytes
            return self._exposed_ms(moved, self.block_ms(module_fqn, "stream"))
        return 0.0

    def _exposed_ms(self, num_bytes: int, compute_ms: float) -> float:
        link_ms = num_bytes / self.hardware.link_bytes_per_s * 1e3
        return max(0.0, link_ms - compute_ms) if self.overlaps else link_ms

    # ---- one block

    def saved_bytes(self, module_fqn: str, treatment: Treatment) -> int:
        """How much less a block's forward leaves behind under this treatment."""
        return self.activation_bytes(module_fqn) - self._forward_net(module_fqn, treatment)

    def extra_ms(self, module_fqn: str, treatment: Treatment) -> float:
        """The time that the treatment adds to a step."""
        slower = self.block_ms(module_fqn, treatment) - self.block_ms(module_fqn, "keep")
        return slower + self.link_ms(module_fqn, treatment)

    def activation_bytes(self, module_fqn: str) -> int:
        """What the layer's forward leaves behind when nothing is done."""
        return self._forward_net(module_fqn, "keep")

    def forward_ms(self, module_fqn: str) -> float:
        return sum((self.segment_ms(segment) for segment in self._segments(module_fqn, "keep", "forward")), 0.0)

    def block_ms(self, module_fqn: str, treatment: Treatment) -> float:
        return sum((self.segment_ms(segment) for segment in self._segments(module_fqn, treatment, None)), 0.0)

    def _forward_net(self, module_fqn: str, treatment: Treatment) -> int:
        return sum(segment.net_bytes for segment in self._segments(module_fqn, treatment, "forward"))

    def _segments(self, module_fqn: str, treatment: Treatment, phase: str | None) -> list[Segment]:
        trace = self.profile.plain if treatment == "keep" else self.profile.variants[treatment]
        return [s for s in trace.segments if s.module_fqn == module_fqn and phase in (None, s.phase)]
