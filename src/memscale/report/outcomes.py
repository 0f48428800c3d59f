"""What the full stack did to a model, and what it did not do, with reasons."""

from __future__ import annotations

import collections
import dataclasses

from memscale._config import Config
from memscale._hardware import Hardware
from memscale._plan import (
    Checkpoint,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    QuantizeOptimizer,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._units import show_bytes

NO_GAIN = "it would not lower the peak"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One technique."""

    technique: str
    applied: bool
    detail: str
    """What was done, or why it was not."""

    def __str__(self) -> str:
        return f"{self.technique}: {self.detail if self.applied else f'skipped, {self.detail}'}"


def outcomes(plan: Plan, config: Config, hardware: Hardware, optimizer_detail: str | None) -> tuple[Outcome, ...]:
    """Every technique of the stack. `optimizer_detail` says what 8 bits came to where that is known already."""
    count = collections.Counter(type(action) for action in plan.actions)
    return (
        _checkpointing(plan, config),
        _tiling(count, config),
        _offloading(count, config, hardware),
        _precision(plan, config, hardware),
        _eight_bit(count, config, optimizer_detail),
    )


def describe(plan: Plan, found: tuple[Outcome, ...]) -> str:
    lines = [
        f"the full stack on {plan.model_class}: {show_bytes(plan.baseline_peak_bytes)} -> "
        f"{show_bytes(plan.predicted_peak_bytes)} predicted peak ({plan.reduction:.1%} less)"
    ]
    return "\n  ".join([*lines, *map(str, found)])


def _checkpointing(plan: Plan, config: Config) -> Outcome:
    actions = [action for action in plan.actions if isinstance(action, Checkpoint)]
    streamed = sum(isinstance(action, StreamParameters) for action in plan.actions)
    if actions:
        return Outcome("checkpointing", True, f"{len(actions)} blocks recomputed in backward")
    if streamed:
        return Outcome("checkpointing", True, f"{streamed} streamed blocks are recomputed in backward")
    return Outcome("checkpointing", False, _why(config.enable_checkpointing, "enable_checkpointing", NO_GAIN))


def _tiling(count: dict[type, int], config: Config) -> Outcome:
    parts = [
        f"{count[kind]} {name}{'s' if count[kind] > 1 else ''}"
        for kind, name in ((TileHead, "head"), (TileAttention, "attention"), (TileMlp, "MLP"))
        if count[kind]
    ]
    if parts:
        return Outcome("tiling", True, ", ".join(parts))
    return Outcome("tiling", False, _why(config.enable_tiling, "enable_tiling", NO_GAIN))


def _offloading(count: dict[type, int], config: Config, hardware: Hardware) -> Outcome:
    parts = []
    if count[StreamParameters]:
        parts.append(f"the parameters of {count[StreamParameters]} blocks")
    if count[OffloadActivations]:
        parts.append(f"the activations of {count[OffloadActivations]} blocks")
    if count[OffloadOptimizer]:
        parts.append("optimizer state")
    if parts:
        return Outcome("offloading", True, ", ".join(parts))
    missing = NO_GAIN
    if hardware.device_type == "cpu" and config.offload_dir is None:
        missing = "the next tier of a CPU is the disk and no offload_dir is set"
    elif hardware.unified_memory:
        missing = "device and host share one memory"
    return Outcome("offloading", False, _why(config.enable_offloading, "enable_offloading", missing))


def _precision(plan: Plan, config: Config, hardware: Hardware) -> Outcome:
    for action in plan.actions:
        if isinstance(action, MixedPrecision):
            return Outcome("mixed precision", True, f"computes in {action.dtype}")
    if not hardware.has_fast_16bit and not config.asks_for("use_mixed_precision"):
        return Outcome("mixed precision", False, f"{hardware.device_name} has no fast 16-bit math")
    return Outcome("mixed precision", False, _why(config.use_mixed_precision, "use_mixed_precision", NO_GAIN))


def _eight_bit(count: dict[type, int], config: Config, detail: str | None) -> Outcome:
    if detail is not None:
        return Outcome("8-bit optimizer", True, detail)
    if count[QuantizeOptimizer]:
        return Outcome("8-bit optimizer", True, "the optimizer's waiting state, in place")
    return Outcome("8-bit optimizer", False, _why(config.use_8bit_optimizer, "use_8bit_optimizer", NO_GAIN))


def _why(enabled: bool | None, name: str, otherwise: str) -> str:
    return otherwise if enabled else f"{name}=False"
