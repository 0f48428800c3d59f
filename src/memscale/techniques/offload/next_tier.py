"""Whether there is anywhere for tensors to wait: host memory beside a device, or a directory on disk. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memscale._config import Config
from memscale._hardware import Hardware


def no_next_tier(config: Config, hardware: Hardware) -> str:
    """Say why no tensor can wait on another tier; "" where it can."""
    if hardware.device_type == "cpu":
        return "" if config.offload_dir is not None else "the next tier of a CPU is the disk and no offload_dir is set"
    return "device and host share one memory" if hardware.unified_memory else ""


def no_tier_for_plan(actions: Sequence[Any], config: Config, hardware: Hardware) -> str:
    """Say why a saved plan cannot let tensors wait here; "" where it can."""
    if hardware.device_type == "cpu" and config.offload_dir is None:
        return "the plan lets tensors wait on disk: say where, with Config(offload_dir=...)"
    return ""
