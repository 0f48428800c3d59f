"""The machine around the device, as its system tells: memory under the limits of control groups, disks, the CPU.

Read anew at every call; needs no torch.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil

from memscale._errors import ConfigError, is_system_name, shortened, shown


def host_memory() -> tuple[int, int]:
    """Total and available bytes of host RAM, the control group's limit included."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit = _cgroup_limit()
    if limit is not None and limit[0] < total:
        total, available = limit[0], min(available, max(0, limit[0] - limit[1]))
    return total, available


def local_ranks() -> int:
    """How many processes of this machine train together and share its memory, as `torchrun` says it; else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


def _cgroup_limit(
    root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"), own: pathlib.Path = pathlib.Path("/proc/self/cgroup")
) -> tuple[int, int] | None:
    """Limit and use of this process's memory control group (v2, then v1); None where there is none."""
    v2, v1 = _cgroup_paths(own)
    for directories, limit_name, use_name in (
        (_with_parents(root, v2), "memory.max", "memory.current"),
        (_with_parents(root / "memory", v1), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limits = [
            (limit, _read_int(directory / use_name) or 0)
            for directory in directories
            if (limit := _read_int(directory / limit_name)) is not None
        ]
        if limits:
            return min(limits, key=lambda pair: pair[0] - pair[1])
    return None


def _cgroup_paths(own: pathlib.Path) -> tuple[str, str]:
    """The process's group in the unified hierarchy, and in that of the v1 memory controller."""
    v2 = v1 = ""
    lines = own.read_text().splitlines() if own.is_file() else []
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0":
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    return v2, v1


def _with_parents(root: pathlib.Path, path: str) -> list[pathlib.Path]:
    """A group and every group above it: the tightest of them binds."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _read_int(path: pathlib.Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 2**60 else None  # "max", or v1's huge number: no limit


def disk_free(offload_dir: str) -> int:
    """Free bytes where `offload_dir` is, or will be."""
    return shutil.disk_usage(nearest_existing(offload_dir)).free


def nearest_existing(path: str) -> pathlib.Path:
    """The directory for offloading itself, or the one in which it would be made."""
    if not isinstance(path, str | os.PathLike) or not is_system_name(os.fspath(path)):
        raise ConfigError(f"offload_dir={shown(path)} cannot be the name of a directory")
    try:
        absolute = pathlib.Path(path).absolute()
        return next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    except OSError as error:  # a name that is too long, for example
        raise ConfigError(f"offload_dir={shown(path)} is not a directory: {shortened(str(error))}") from error


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def cpu_flags() -> set[str]:
    return set(_cpuinfo("flags").split())


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or "CPU"


def _cpuinfo(key: str) -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":", 1)[0].strip() == key), "")
