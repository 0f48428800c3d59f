"""What this machine's device reaches: measured once, in about a second, and remembered in the user's cache.

    MEMSCALE_CACHE_DIR=DIR      where it is remembered; else `$XDG_CACHE_HOME/memscale`, else `~/.cache/memscale`
    MEMSCALE_MEASURE=0          do not measure: nominal figures, or the card table's

One JSON file holds the figures of every machine, device, PyTorch and number of threads that shares the cache, so plans
of one machine rest on the same numbers in every process. It is replaced as a whole; one that cannot be read counts as
empty; where nothing can be written, every process measures for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import mmap
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("memscale")

FILE_NAME = "hardware.json"
_DISK_BYTES = 32 * 1024 * 1024
_MAX_S = 0.2
"""Of one measurement, in which it is repeated. Other processes only ever make it slower: the fastest counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """By measurement."""

    fp32_flops: float
    """Of dense matrix products, as the next."""
    half_flops: float
    memory_bytes_per_s: float
    """Read and written by an elementwise operator."""
    launch_s: float
    """Of one that has nothing to do."""
    link_bytes_per_s: float | None = None
    """Between pinned host memory and the device, the slower of both directions; None on a CPU."""
    blocking_link_bytes_per_s: float | None = None
    """The same for memory that is not pinned."""


def is_enabled() -> bool:
    return os.environ.get("MEMSCALE_MEASURE", "1") != "0"


def cache_dir() -> pathlib.Path:
    explicit, shared = os.environ.get("MEMSCALE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if explicit:
        return pathlib.Path(explicit)
    return (pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache") / "memscale"


def device_figures(device: torch.device, device_name: str) -> Figures:
    """Remembered, or measured now."""
    found = _recall(_key(device_name), lambda: dataclasses.asdict(_measure(device)))
    return Figures(**found)


def disk_bytes_per_s(directory: pathlib.Path) -> float:
    """Of writing and reading back there, past the page cache where the file system allows it."""
    key = f"{platform.node()} disk {os.stat(directory).st_dev}"
    found = _recall(key, lambda: {"bytes_per_s": _measure_disk(directory)})
    return float(found["bytes_per_s"])


def _key(device_name: str) -> str:
    import torch

    return f"{platform.node()} {device_name} torch {torch.version.__version__} {torch.get_num_threads()} threads"


# ---- remembering


def _recall(key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    path = cache_dir() / FILE_NAME
    with _alone(path):
        known = _read(path).get(key)
        if isinstance(known, dict) and _is_sound(known):
            return known
        start = time.perf_counter()
        measured = measure()
        logger.debug("measured %s in %.2f s: %s", key, time.perf_counter() - start, measured)
        try:
            _write(path, {**_read(path), key: measured})
        except OSError as error:
            logger.debug("what was measured cannot be kept in %s: %s", path, error)
        return measured


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Of processes that begin at once one measures, and the others wait for its figures."""
    with contextlib.ExitStack() as undo:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = undo.enter_context(path.with_suffix(".lock").open("w"))
        except OSError as error:
            logger.debug("%s cannot be locked: %s", path, error)
        else:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_sound(entry: dict[str, Any]) -> bool:
    """Whether these are figures; anything else is measured again."""
    names = {field.name for field in dataclasses.fields(Figures)}
    optional = {"link_bytes_per_s", "blocking_link_bytes_per_s"}
    return set(entry) in (names, {"bytes_per_s"}) and all(
        (value is None and name in optional) or (isinstance(value, float | int) and 0 < value < 1e18)
        for name, value in entry.items()
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.debug("%s cannot be read and counts as empty: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
    """All or nothing, whoever else writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=FILE_NAME)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# ---- measuring


def _measure(device: torch.device) -> Figures:
    import torch

    on_cpu = device.type == "cpu"
    width, line = (512, 2**22) if on_cpu else (4096, 2**27)
    values = torch.ones(line, device=device)
    target, tiny = torch.empty_like(values), torch.ones(1, device=device)
    fastest = _Stopwatch(device).fastest
    memory_s = fastest(lambda: torch.add(values, 1, out=target))
    launch_s = fastest(lambda: [tiny.add_(0) for _ in range(100)]) / 100
    fp32, half = (_matmul_flops(fastest, device, width, dtype) for dtype in (torch.float32, torch.bfloat16))
    figures = Figures(fp32, half, 2 * values.nbytes / memory_s, launch_s)
    if on_cpu:
        return figures
    pinned, pageable = (_link_bytes_per_s(fastest, values, pin_memory=pinned) for pinned in (True, False))
    return dataclasses.replace(figures, link_bytes_per_s=pinned, blocking_link_bytes_per_s=pageable)


def _matmul_flops(fastest: Any, device: torch.device, width: int, dtype: torch.dtype) -> float:
    import torch

    a = torch.ones(width, width, device=device, dtype=dtype)
    out = torch.empty_like(a)
    return 2 * width**3 / float(fastest(lambda: torch.mm(a, a, out=out)))


def _link_bytes_per_s(fastest: Any, values: torch.Tensor, *, pin_memory: bool) -> float:
    import torch

    part = values[: 2**24]
    host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pin_memory)
    out_s, in_s = fastest(lambda: host.copy_(part)), fastest(lambda: part.copy_(host))
    return float(part.nbytes / max(out_s, in_s))


class _Stopwatch:
    """Times work on one device, to its end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fastest(self, work: Callable[[], Any]) -> float:
        """Seconds; the first time does not count."""
        import torch

        with torch.no_grad():
            self._once(work)
            best, until = self._once(work), time.perf_counter() + _MAX_S
            while time.perf_counter() < until:
                best = min(best, self._once(work))
        return best

    def _once(self, work: Callable[[], Any]) -> float:
        """On a CPU the time of this thread, which others do not take part in: they may have been given its core."""
        import torch

        if self._device.type == "cpu":
            start = time.thread_time()
            work()
            return time.thread_time() - start
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize(self._device)
        return time.perf_counter() - start


def _measure_disk(directory: pathlib.Path) -> float:
    """The mean of both directions: what goes there comes back."""
    memory = mmap.mmap(-1, _DISK_BYTES)  # aligned to pages, as direct access needs it
    handle, name = tempfile.mkstemp(dir=directory, prefix="memscale-speed-")
    os.close(handle)
    try:
        written_s = _timed_access(name, os.O_WRONLY, lambda file: os.writev(file, [memory]))
        read_s = _timed_access(name, os.O_RDONLY, lambda file: os.readv(file, [memory]))
    finally:
        os.unlink(name)
        memory.close()
    return 2 * _DISK_BYTES / (written_s + read_s)


def _timed_access(name: str, flags: int, access: Callable[[int], int]) -> float:
    try:
        file = os.open(name, flags | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without direct access
        file = os.open(name, flags)
    try:
        start = time.perf_counter()
        access(file)
        if flags == os.O_WRONLY:
            os.fsync(file)
        return time.perf_counter() - start
    finally:
        os.close(file)
