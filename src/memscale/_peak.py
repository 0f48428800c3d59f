"""The peak model and the time model: what any plan would peak at and cost, from a profile alone. No torch.

The step is a sequence of segments. Each block's segments are taken from the trace of the way it is treated (plain,
checkpointed, selective), everything else from the plain trace; live bytes run through them. The peak is the maximum
over the end of forward, every backward position with its recompute, and the optimizer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from memscale._hardware import Hardware
from memscale._profile import Profile, Segment, StepTrace

Treatment = Literal["keep", "selective", "checkpoint"]
"""What is done to a block's activations, from the fastest to the smallest."""

_MATMUL_EFFICIENCY = 0.6
"""The share of nominal throughput that dense matrix products reach."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to."""

    peak_bytes: int
    step_ms: float


class CostModel:
    """Evaluates assignments of treatments to blocks."""

    def __init__(self, profile: Profile, hardware: Hardware, *, half_precision: bool = False) -> None:
        self.profile = profile
        self.hardware = hardware
        self._flops = hardware.half_flops if half_precision else hardware.fp32_flops
        self._traces: dict[Treatment, StepTrace] = {"keep": profile.plain}
        if profile.checkpointed is not None:
            self._traces["checkpoint"] = profile.checkpointed
        if profile.selective is not None:
            self._traces["selective"] = profile.selective
        self._aligned = {name: _shape(trace) == _shape(profile.plain) for name, trace in self._traces.items()}
        self._ms = {
            name: tuple(self.segment_ms(segment) for segment in trace.segments) for name, trace in self._traces.items()
        }
        self._step_ms = profile.optimizer.moved_bytes / hardware.memory_bytes_per_s * 1e3

    @property
    def treatments(self) -> tuple[Treatment, ...]:
        """What this profile knows the cost of, beside keeping everything."""
        return tuple(name for name in self._traces if name != "keep")

    def can_mix(self, treatment: Treatment) -> bool:
        """Whether single blocks can be treated so, or only all of them."""
        return self._aligned[treatment]

    def segment_ms(self, segment: Segment) -> float:
        matmul_s = max(
            segment.flops / (self._flops * _MATMUL_EFFICIENCY),
            segment.matmul_bytes / self.hardware.memory_bytes_per_s,
        )
        return (matmul_s + segment.other_bytes / self.hardware.memory_bytes_per_s) * 1e3

    def evaluate(self, treatments: Mapping[str, Treatment]) -> Outcome:
        """The peak and the time of a step with these blocks treated so, all others kept."""
        used = set(treatments.values()) - {"keep"}
        if len(used) == 1 and not self._aligned[next(iter(used))]:
            return self._whole(next(iter(used)))
        static_bytes = self.profile.static_bytes
        live = peak = static_bytes
        total_ms = self._step_ms
        for index, plain in enumerate(self.profile.plain.segments):
            name = treatments.get(plain.module_fqn, "keep")
            segment = self._traces[name].segments[index]
            peak = max(peak, live + segment.peak_bytes)
            live += segment.net_bytes
            total_ms += self._ms[name][index]
        return Outcome(max(peak, live + self.profile.optimizer.step_bytes), total_ms)

    def _whole(self, treatment: Treatment) -> Outcome:
        return Outcome(self.peak_of(self._traces[treatment]), self._step_ms + sum(self._ms[treatment]))

    def peak_of(self, trace: StepTrace) -> int:
        """The peak of a step that was traced as a whole."""
        static_bytes = self.profile.static_bytes
        step_bytes = trace.end_bytes + self.profile.optimizer.step_bytes
        return static_bytes + max(trace.peak_bytes, step_bytes)

    def saved_bytes(self, module_fqn: str, treatment: Treatment) -> int:
        """How much less a block's forward leaves behind under this treatment."""
        return self.activation_bytes(module_fqn) - self._forward_net(module_fqn, treatment)

    def extra_ms(self, module_fqn: str, treatment: Treatment) -> float:
        """The time that recomputing the block adds to a step."""
        return self._block_ms(module_fqn, treatment) - self._block_ms(module_fqn, "keep")

    def activation_bytes(self, module_fqn: str) -> int:
        """What the block's forward leaves behind when nothing is done."""
        return self._forward_net(module_fqn, "keep")

    def forward_ms(self, module_fqn: str) -> float:
        segments = self.profile.plain.segments
        return sum(
            ms
            for segment, ms in zip(segments, self._ms["keep"], strict=True)
            if segment.module_fqn == module_fqn and segment.phase == "forward"
        )

    def _forward_net(self, module_fqn: str, treatment: Treatment) -> int:
        return sum(
            segment.net_bytes
            for segment in self._traces[treatment].segments
            if segment.module_fqn == module_fqn and segment.phase == "forward"
        )

    def _block_ms(self, module_fqn: str, treatment: Treatment) -> float:
        trace = self._traces[treatment]
        return sum(
            ms
            for segment, ms in zip(trace.segments, self._ms[treatment], strict=True)
            if segment.module_fqn == module_fqn
        )


def _shape(trace: StepTrace) -> list[tuple[str, str]]:
    return [(segment.phase, segment.module_fqn) for segment in trace.segments]
