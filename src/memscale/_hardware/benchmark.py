"""What this machine's device reaches: measured once, in about a second, and remembered in the user's cache.

    MEMSCALE_MEASURE=0          do not measure: nominal figures, or the card table's

One JSON file of the user's cache (`user_cache.py`) holds the figures of every machine, device, PyTorch and number of
threads that shares it, so plans of one machine rest on the same numbers in every process. Processes that measure take
turns by a lock file, for which none of them waits longer than a few seconds.

An accelerator is measured with buffers that fit into a part of its free memory (0.27 GB at most), and they are given
back; its peak statistics are as before. On a card that is too full, or whose earlier peak the measurement would raise,
nothing is measured and nothing is remembered. What stays is the workspace of matrix products, which the first forward
would take as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memscale._errors import quoted
from memscale._hardware.user_cache import cache_dir, make_own_dir, open_own, read_json, write_json
from memscale._progress import stage
from memscale._units import show_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("memscale")

FILE_NAME = "hardware.json"
_LOCK_WAIT_S = 5.0
"""How long a lock is waited for. Measuring takes about a second; a process that holds it longer is stopped or hangs."""
_LOCK_POLL_S = 0.05
_DISK_BYTES = 32 * 1024 * 1024
_MAX_S = 0.2
"""How long one measurement is repeated. Other processes only ever make it slower, so the fastest run counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one machine, all of them measured."""

    fp32_flops: float
    """The throughput of dense matrix products in fp32; `half_flops` is that in 16 bits."""
    half_flops: float
    memory_bytes_per_s: float
    """The bytes that an elementwise operator reads and writes in a second."""
    launch_s: float
    """The time of an operator that has nothing to do."""
    link_bytes_per_s: float | None = None
    """The bandwidth between pinned host memory and the device, the slower of both directions; None on a CPU."""
    blocking_link_bytes_per_s: float | None = None
    """The same for memory that is not pinned."""


def is_enabled() -> bool:
    return os.environ.get("MEMSCALE_MEASURE", "1") != "0"


def device_figures(device: torch.device, device_name: str) -> Figures:
    """Remembered, or measured now. `NotMeasuredError` where neither is possible."""
    found = _recall(_key(device_name), lambda: dataclasses.asdict(_measure(device)))
    return Figures(**found)


def disk_bytes_per_s(directory: pathlib.Path) -> float:
    """The speed of writing and reading back there, past the page cache where the file system allows it."""
    key = f"{platform.node()} disk {os.stat(directory).st_dev}"
    found = _recall(key, lambda: {"bytes_per_s": _measure_disk(directory)})
    return float(found["bytes_per_s"])


def _key(device_name: str) -> str:
    import torch

    return f"{platform.node()} {device_name} torch {torch.version.__version__} {torch.get_num_threads()} threads"


# ---- remembering


def _recall(key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    path = _cache_file()
    if path is None:
        with stage("measuring how fast this machine is"):
            return measure()
    known = _known(path, key)
    if known is not None:
        return known
    with stage("measuring how fast this machine is, which is remembered"), _alone(path):
        known = _known(path, key)  # another process may have measured while this one waited
        if known is not None:
            return known
        start = time.perf_counter()
        measured = measure()
        logger.debug("measured %s in %.2f s: %s", key, time.perf_counter() - start, measured)
        known = _known(path, key)  # who did not get the lock in time measures too; what was kept first is kept
        if known is not None:
            return known
        try:
            write_json(path, {**read_json(path), key: measured})
        except OSError as error:
            logger.debug("what was measured cannot be kept in %s: %s", path, str(error))
        return measured


def _cache_file() -> pathlib.Path | None:
    """None for a user without a home directory, as in some containers."""
    try:
        return cache_dir() / FILE_NAME
    except RuntimeError as error:
        logger.debug("figures are not remembered: %s", str(error))
        return None


def _known(path: pathlib.Path, key: str) -> dict[str, Any] | None:
    entry = read_json(path).get(key)
    return entry if isinstance(entry, dict) and _is_sound(entry) else None


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Let one of several processes measure at a time. The others wait for its figures, but not for long."""
    with contextlib.ExitStack() as undo:
        try:
            make_own_dir(path.parent)
            lock = open_own(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, lock)
            if fcntl is not None and not _locks(lock):
                logger.info(
                    "Another process has held %s for %.0f s; MemScale measures this machine without waiting for it.",
                    path.with_suffix(".lock"),
                    _LOCK_WAIT_S,
                )
        except OSError as error:
            logger.debug("%s cannot be locked: %s", path, str(error))
        yield


def _locks(file: int) -> bool:
    """Whether the lock was given to us in time; it is released when the file is closed."""
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(_LOCK_POLL_S)


def _is_sound(entry: dict[str, Any]) -> bool:
    """Whether these are figures; anything else is measured again."""
    names = {field.name for field in dataclasses.fields(Figures)}
    optional = {"link_bytes_per_s", "blocking_link_bytes_per_s"}
    return set(entry) in (names, {"bytes_per_s"}) and all(
        (value is None and name in optional) or (isinstance(value, float | int) and 0 < value < 1e18)
        for name, value in entry.items()
    )


# ---- measuring


class NotMeasuredError(Exception):
    """The device could not be measured, most often because it has too little free memory; says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """How large the tensors are that a device is measured with."""

    line: int
    """Elements of each of the two buffers that are read and written."""
    width: int
    """The width of the square matrices that are multiplied."""

    @property
    def num_bytes(self) -> int:
        """Two buffers in fp32, or two matrices: there are never both."""
        return 4 * 2 * max(self.line, self.width**2)


_ON_CPU = _Sizes(2**22, 512)
_ON_ACCELERATOR = (_Sizes(2**25, 4096), _Sizes(2**24, 4096), _Sizes(2**24, 2048))
"""The largest that leaves half of the free memory alone is taken. Smaller ones would measure a cache."""
_WORKSPACE_BYTES = 40 * 1024 * 1024
"""What a library may take beside the matrices that it multiplies, with the segment that it lies in."""


def _measure(device: torch.device) -> Figures:
    if device.type == "cpu":
        return _figures(device, _ON_CPU)
    import torch

    free_bytes, _ = torch.accelerator.get_memory_info(device)
    if 2 * _ON_ACCELERATOR[-1].num_bytes > free_bytes:
        needed_bytes = 2 * _ON_ACCELERATOR[-1].num_bytes
        raise NotMeasuredError(f"{show_bytes(free_bytes)} of it are free and {show_bytes(needed_bytes)} are needed")
    room_bytes = _room_below_peaks(device)
    fitting = (sizes for sizes in _ON_ACCELERATOR if 2 * sizes.num_bytes <= free_bytes)
    sizes = next((s for s in fitting if room_bytes is None or s.num_bytes + _WORKSPACE_BYTES <= room_bytes), None)
    if sizes is None:
        raise NotMeasuredError("its peak statistics would change, which count what the program did before")
    with _given_back(device, resets_peaks=room_bytes is None):
        found = _figures_or_refusal(device, sizes)
    if isinstance(found, str):
        raise NotMeasuredError(found)
    return found


def _figures_or_refusal(device: torch.device, sizes: _Sizes) -> Figures | str:
    """The error itself goes no further: its traceback would hold the buffers that are to be given back."""
    try:
        return _figures(device, sizes)
    except RuntimeError as error:  # out of memory, as another process was faster; pinned memory that is refused
        logger.debug("%s cannot be measured", device, exc_info=True)
        return quoted(error)


def _figures(device: torch.device, sizes: _Sizes) -> Figures:
    import torch

    if device.type != "cpu":
        tiny = torch.ones(8, 8, device=device)
        tiny @ tiny  # the workspace stays, and would keep the segment of a large buffer
        del tiny
    fastest = _Stopwatch(device).fastest
    memory, launch_s, links = _memory_figures(fastest, device, sizes.line)
    fp32, half = (_matmul_flops(fastest, device, sizes.width, dtype) for dtype in (torch.float32, torch.bfloat16))
    return Figures(fp32, half, memory, launch_s, *links)


def _memory_figures(fastest: Any, device: torch.device, line: int) -> tuple[float, float, tuple[float, ...]]:
    """Bytes a second of the memory, seconds of a launch, and the links of an accelerator. Its buffers end with it."""
    import torch

    values = torch.ones(line, device=device)
    target, tiny = torch.empty_like(values), torch.ones(1, device=device)
    memory_s = fastest(lambda: torch.add(values, 1, out=target))
    launch_s = fastest(lambda: [tiny.add_(0) for _ in range(100)]) / 100
    kinds = () if device.type == "cpu" else (True, False)
    links = tuple(_link_bytes_per_s(fastest, values, pin_memory=pinned) for pinned in kinds)
    return 2 * values.nbytes / memory_s, launch_s, links


def _room_below_peaks(device: torch.device) -> int | None:
    """What can be taken without raising a peak; None: all peaks are of now, and can be set to now again."""
    import torch

    accelerator = torch.accelerator
    accelerator.empty_cache()  # so that what is taken does not depend on how the cache is cut up
    rooms = (
        accelerator.max_memory_allocated(device) - accelerator.memory_allocated(device),
        accelerator.max_memory_reserved(device) - accelerator.memory_reserved(device),
    )
    return min(rooms) if any(rooms) else None


@contextlib.contextmanager
def _given_back(device: torch.device, *, resets_peaks: bool) -> Iterator[None]:
    """What the measurement took goes back to the device, not into the allocator's cache.

    Peaks cannot be written back by public API, only be set to what there is now: so that is done where they were that,
    and elsewhere the measurement stays below them.
    """
    import torch

    try:
        yield
    finally:
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
        if resets_peaks:
            torch.accelerator.reset_peak_memory_stats(device)


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
    file = _open_nameless(directory)
    try:
        start = time.perf_counter()
        os.pwritev(file, [memory], 0)
        os.fsync(file)
        os.preadv(file, [memory], 0)
        return 2 * _DISK_BYTES / (time.perf_counter() - start)
    finally:
        os.close(file)
        memory.close()


def _open_nameless(directory: pathlib.Path) -> int:
    """A file that the kernel removes with the process, however that ends. A kill in between leaves the empty file of a
    name that the disk tier's next start removes."""
    handle, name = tempfile.mkstemp(dir=directory, prefix="memscale-offload-")
    os.close(handle)
    try:
        try:
            return os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        except OSError:  # a file system without direct access
            return os.open(name, os.O_RDWR)
    finally:
        os.unlink(name)
