"""What a plan may use of the device, the host and the disk; and what the allocator holds for it. No torch."""

from __future__ import annotations

import dataclasses

from memscale._config import Config
from memscale._decide.choice import Outcome
from memscale._hardware import Hardware
from memscale._plan import AllocatorUse, Plan

HOST_MARGIN = 0.1
"""The share of available host memory that offloading leaves alone, unless told how much it may use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int

    def admits(self, outcome: Outcome) -> bool:
        return (
            outcome.peak_bytes <= self.device_bytes
            and outcome.host_bytes <= self.host_bytes
            and outcome.waiting_bytes <= self.host_bytes + self.disk_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a caching allocator hands out and holds for a step, and what that comes to on the card."""

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    """Reserved, the context and what others hold."""
    use: AllocatorUse | None = None
    """What is asked of the allocator for it."""

    @classmethod
    def on(cls, hardware: Hardware, allocated_bytes: int, reserved_bytes: int, use: AllocatorUse | None = None) -> Held:
        return cls(allocated_bytes, reserved_bytes, reserved_bytes + hardware.held_bytes, use)

    def written_in(self, plan: Plan) -> Plan:
        return dataclasses.replace(
            plan,
            predicted_allocated_bytes=self.allocated_bytes,
            predicted_reserved_bytes=self.reserved_bytes,
            predicted_total_bytes=self.total_bytes,
            allocator=self.use,
        )


def budget_bytes(hardware: Hardware, config: Config) -> int:
    """What a plan may fill: the hard budget, else the utilisation's share of what the context and others leave.

    The share is one of what is left, so that a margin stays also on a card that others use. Memory of a CPU is shared
    with everything else on the machine: there it is one of the whole, as long as that is free.
    """
    if config.memory_budget_gb is not None:
        return round(config.memory_budget_gb * 1e9)
    if hardware.device_type == "cpu":
        return min(int(hardware.total_bytes * config.target_gpu_utilization), hardware.free_bytes)
    return int(hardware.free_bytes * config.target_gpu_utilization)


def needed_bytes(plan: Plan) -> int:
    """What a budget is held against: live bytes; on a card what is reserved, where that was recorded."""
    return max(plan.predicted_peak_bytes, plan.predicted_reserved_bytes or 0)


def full_budget(hardware: Hardware, config: Config) -> Budget:
    """Device, host and disk. On a CPU the host is the device, and the next tier is the disk."""
    if hardware.device_type == "cpu":
        host = 0
    elif config.max_cpu_offload_gb is not None:
        host = round(config.max_cpu_offload_gb * 1e9)
    else:
        host = int(hardware.host_available_bytes * (1 - HOST_MARGIN))
    disk = (hardware.disk_free_bytes or 0) if config.offload_dir is not None else 0
    return Budget(budget_bytes(hardware, config), host, disk)
