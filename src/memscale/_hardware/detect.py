"""Reading this machine: the device, the host beside it, the disk, and what they were measured to reach."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
from typing import Any

import torch

from memscale._errors import ConfigError, quoted, shown
from memscale._hardware import (
    HALF_MATMUL_EFFICIENCY,
    LAUNCH_S,
    MEMORY_EFFICIENCY,
    PAGEABLE_BYTES_PER_S,
    Hardware,
    benchmark,
)
from memscale._hardware.cards import Card, find_card
from memscale._hardware.footprints import footprint_of
from memscale._hardware.host import (
    cpu_flags,
    cpu_name,
    disk_free,
    host_memory,
    local_ranks,
    nearest_existing,
    resident_bytes,
)

logger = logging.getLogger("memscale")

_CPU_FLOPS_PER_CORE = 3.0e10
"""Nominal fp32 throughput of one core. Only ratios of predicted times rest on it."""
_CPU_BYTES_PER_S = 1.2e10
_CPU_DISK_BYTES_PER_S = 5.0e8
_UNKNOWN_CARD = Card(
    name="unknown",
    total_bytes=0,
    memory_bytes_per_s=6.0e11,
    fp32_flops=2.0e13,
    half_flops=4.0e13,
    link_bytes_per_s=1.2e10,
    architecture="unknown",
    num_multiprocessors=80,
)
"""What is taken for the speeds of a card that is not in the table, until they are measured."""


def detect_hardware(device: str | torch.device | None = None, offload_dir: str | None = None) -> Hardware:
    """What `Hardware.detect` returns."""
    chosen = _choose_device(device)
    host_total, host_available = (num_bytes // local_ranks() for num_bytes in host_memory())
    disk = None if offload_dir is None else disk_free(offload_dir)
    if chosen.type == "cpu":
        hardware = _measured(_cpu_hardware(host_total, host_available, disk), chosen)
        return hardware if offload_dir is None else _with_disk_measured(hardware, offload_dir)
    if _current_type() != chosen.type:
        raise ConfigError(f"device={str(chosen)!r} is not available on this machine")
    index = chosen.index if chosen.index is not None else torch.accelerator.current_device_index()
    if index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise ConfigError(f"device={str(chosen)!r} is not available: this machine has {count} of that type")
    hardware = _accelerator_hardware(chosen.type, index, host_total, host_available, disk)
    clock = getattr(_properties(chosen.type, index), "clock", None)
    return _by_clock(hardware, clock) if clock is not None else _measured(hardware, torch.device(chosen.type, index))


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"device={shown(device)} is not a device: {quoted(error)}") from error
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None else torch.device("cpu")


def _cpu_hardware(host_total: int, host_available: int, disk: int | None) -> Hardware:
    cores = os.cpu_count() or 1
    flags = cpu_flags()
    fast = bool(flags & {"amx_bf16", "avx512_bf16"})
    return Hardware(
        device_type="cpu",
        device_name=cpu_name(),
        device_count=1,
        total_bytes=host_total,
        free_bytes=min(host_total, host_available + resident_bytes()),
        architecture=platform.machine(),
        supports_bf16=True,
        supports_fp16="avx512_fp16" in flags,
        has_fast_16bit=fast,
        unified_memory=False,  # the next tier of a CPU is the disk
        host_total_bytes=host_total,
        host_available_bytes=host_available,
        disk_free_bytes=disk,
        fp32_flops=_CPU_FLOPS_PER_CORE * cores,
        half_flops=_CPU_FLOPS_PER_CORE * cores * (4.0 if fast else 0.25),
        memory_bytes_per_s=_CPU_BYTES_PER_S,
        link_bytes_per_s=_CPU_DISK_BYTES_PER_S,
    )


def _accelerator_hardware(
    device_type: str, index: int, host_total: int, host_available: int, disk: int | None
) -> Hardware:
    free, total = torch.accelerator.get_memory_info(index)
    properties = _properties(device_type, index)
    name = str(getattr(properties, "name", device_type))
    card = find_card(name, loosely=True) or _UNKNOWN_CARD
    bf16, fast = _half_abilities(device_type, properties)
    architecture = _architecture(properties, device_type)
    caches = device_type == "cuda"
    footprint = footprint_of(architecture)
    return Hardware(
        device_type=device_type,
        device_name=name,
        device_count=torch.accelerator.device_count(),
        total_bytes=int(total),
        free_bytes=min(int(total), int(free) + torch.accelerator.memory_reserved(index)),
        architecture=architecture,
        supports_bf16=bf16,
        supports_fp16=True,
        has_fast_16bit=fast,
        unified_memory=bool(getattr(properties, "is_integrated", device_type == "mps")),
        host_total_bytes=host_total,
        host_available_bytes=host_available,
        disk_free_bytes=disk,
        fp32_flops=card.fp32_flops,
        half_flops=card.half_flops,
        memory_bytes_per_s=card.memory_bytes_per_s,
        link_bytes_per_s=card.link_bytes_per_s,
        blocking_link_bytes_per_s=PAGEABLE_BYTES_PER_S,
        launch_s=LAUNCH_S,
        half_matmul_efficiency=HALF_MATMUL_EFFICIENCY,
        memory_efficiency=MEMORY_EFFICIENCY,
        has_caching_allocator=caches,
        context_bytes=footprint.context_bytes if caches else 0,
        num_multiprocessors=int(getattr(properties, "multi_processor_count", _UNKNOWN_CARD.num_multiprocessors)),
        workspace_bytes=footprint.workspace_bytes if caches else 0,
    )


def _measured(hardware: Hardware, device: torch.device) -> Hardware:
    """What the device reaches, in the place of what is said of it; unless measuring is switched off."""
    if not benchmark.is_enabled():
        return hardware
    try:
        found = benchmark.device_figures(device, hardware.device_name)
    except benchmark.NotMeasuredError as error:
        logger.info(
            "%s is not measured (%s): times are predicted from published figures. They will be measured when MemScale "
            "is used while more of its memory is free.",
            hardware.device_name,
            str(error),
        )
        return hardware
    hardware = dataclasses.replace(
        hardware,
        fp32_flops=found.fp32_flops,
        half_flops=found.half_flops,
        memory_bytes_per_s=found.memory_bytes_per_s,
        matmul_efficiency=1.0,
        half_matmul_efficiency=None,
        memory_efficiency=None,
    )
    if found.link_bytes_per_s is None:
        return hardware
    return dataclasses.replace(
        hardware,
        link_bytes_per_s=found.link_bytes_per_s,
        blocking_link_bytes_per_s=found.blocking_link_bytes_per_s,
        launch_s=found.launch_s,
    )


def _with_disk_measured(hardware: Hardware, offload_dir: str) -> Hardware:
    if not benchmark.is_enabled():
        return hardware
    try:
        return dataclasses.replace(hardware, link_bytes_per_s=benchmark.disk_bytes_per_s(nearest_existing(offload_dir)))
    except OSError as error:  # full, or not ours: the executor will say so when it matters
        logger.debug("the disk below %s cannot be measured: %s", offload_dir, str(error))
        return hardware


def _by_clock(hardware: Hardware, clock: Any) -> Hardware:
    """A simulated device says itself what its clock counts: throughput, launches, the link; not the host's work."""
    return dataclasses.replace(
        hardware,
        fp32_flops=clock.fp32_tflops * 1e12,
        half_flops=clock.bf16_tflops * 1e12,
        memory_bytes_per_s=clock.memory_gbps * 1e9,
        link_bytes_per_s=clock.link_gbps * 1e9,
        blocking_link_bytes_per_s=clock.pageable_link_gbps * 1e9,
        link_directions=clock.copy_engines,
        launch_s=clock.launch_us * 1e-6,
        matmul_efficiency=1.0,
        half_matmul_efficiency=None,
        memory_efficiency=None,
        host_bytes_per_s=None,
        has_one_host_thread=True,
    )


def _current_type() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else None


def _properties(device_type: str, index: int) -> Any:
    """Device properties where the backend has them; not every one does."""
    module = torch.get_device_module(device_type)
    return module.get_device_properties(index) if hasattr(module, "get_device_properties") else None


def _architecture(properties: Any, device_type: str) -> str:
    # PyTorch gives every card a `gcnArchName`; only AMD's are architectures, an NVIDIA card has its name there.
    amd = str(getattr(properties, "gcnArchName", ""))
    if amd.startswith("gfx"):
        return amd
    if hasattr(properties, "major") and hasattr(properties, "minor"):
        return f"sm_{properties.major}{properties.minor}"
    return str(getattr(properties, "architecture", device_type))


def _half_abilities(device_type: str, properties: Any) -> tuple[bool, bool]:
    """(bf16 is supported, 16-bit math is fast)."""
    module = torch.get_device_module(device_type)
    bf16 = bool(module.is_bf16_supported()) if hasattr(module, "is_bf16_supported") else device_type != "mps"
    major = getattr(properties, "major", None)
    return bf16, bf16 or major is None or major >= 7
