"""Wishes and abilities: what a config asks for, as far as one hardware can follow it. No torch.

    eligible = resolve(config, hardware)       # the one place where the two meet

`plan`, `estimate`, `fit`, the front of peak against time and the policies all go by its result, so none of them offers
what another would refuse. The hardware is the one that is planned for, which need not be this machine's.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from memscale._config import Config
from memscale._decide.budget import Budget, full_budget
from memscale._hardware import Hardware
from memscale._plan import MixedPrecision
from memscale._profile import Treatment

HalfType: TypeAlias = Literal["bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, slots=True)
class Eligible:
    """What a plan may use, and what it must."""

    checkpoints: bool
    offloads: bool
    """Tensors may wait on the next tier, and there is one."""
    streams: bool
    """Parameters may live on the next tier. A streamed block is recomputed, so this needs checkpointing, too."""
    steps_in_buckets: bool
    """The optimizer may be stepped a few parameters at a time, its state where it is."""
    tiles: bool
    half_type: HalfType | None
    """The 16-bit type that may be computed in: the user's wish, or the mode's where 16 bits are faster."""
    must_halve: bool
    """The user has asked for 16 bits by name."""
    quantizes: bool
    """Optimizer state may be kept in 8 bits."""
    must_quantize: bool
    overlaps: bool
    """Transfers run beside compute."""
    budget: Budget

    def allows(self, treatment: Treatment) -> bool:
        """Whether a block may be treated so."""
        return (
            (treatment.recompute == "none" or self.checkpoints)
            and (not treatment.offloads or self.offloads)
            and (not treatment.streams or self.streams)
        )


def resolve(config: Config, hardware: Hardware) -> Eligible:
    """What this config makes eligible on this hardware."""
    checkpoints = bool(config.enable_checkpointing)
    offloads = bool(config.enable_offloading) and has_next_tier(config, hardware)
    return Eligible(
        checkpoints=checkpoints,
        offloads=offloads,
        streams=offloads and checkpoints and hardware.device_type != "cpu",
        steps_in_buckets=bool(config.enable_bucketed_step),
        tiles=bool(config.enable_tiling),
        half_type=_half_type(config, hardware),
        must_halve=config.asks_for("use_mixed_precision"),
        quantizes=bool(config.use_8bit_optimizer),
        must_quantize=config.asks_for("use_8bit_optimizer"),
        overlaps=config.async_offload,
        budget=full_budget(hardware, config),
    )


def has_next_tier(config: Config, hardware: Hardware) -> bool:
    """Whether there is anywhere for tensors to wait: host memory beside a device, or a directory on disk."""
    if hardware.device_type == "cpu":
        return config.offload_dir is not None
    return not hardware.unified_memory


def _half_type(config: Config, hardware: Hardware) -> HalfType | None:
    is_wanted = hardware.has_fast_16bit or config.asks_for("use_mixed_precision")
    if not (config.use_mixed_precision and is_wanted):
        return None
    return MixedPrecision.choose_dtype(
        hardware.device_type,
        supports_bf16=hardware.supports_bf16,
        supports_fp16=hardware.supports_fp16,
        has_fast_16bit=hardware.has_fast_16bit,
    )
