"""What a program that runs on the card can ask of it, through ctypes: counters, kernels, races."""

import ctypes
import dataclasses
import functools
import os


class NotOnTheCard(RuntimeError):
    """This process was not started on the emulated card."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What has happened since the process began; bytes in use are of now, peaks since `reset_peaks()`."""

    launches: int
    copies: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    device_to_device_bytes: int
    allocations: int
    """Of the driver: PyTorch's caching allocator makes few."""
    frees: int
    out_of_memory: int
    """How often the driver said so; PyTorch frees its cache and asks again."""
    records: int
    waits: int
    """Of a stream for an event."""
    host_waits: int
    """Of the host for an event, a stream or the device."""
    missing: int
    """Calls of functions that are not emulated."""
    races: int
    used_bytes: int
    peak_bytes: int
    host_bytes: int
    """Pinned and managed memory."""
    host_peak_bytes: int


def is_active() -> bool:
    """Whether this process runs on the emulated card."""
    return "EMUCUDA_CARD" in os.environ and "libcuda.so.1" in os.environ.get("LD_PRELOAD", "")


@functools.cache
def native() -> ctypes.CDLL:
    """The stand-in for the driver, which holds the card's state."""
    if not is_active():
        raise NotOnTheCard(
            "This process was not started on the emulated card. Start it with `python -m emucuda program.py` or "
            "`emucuda.run([...])`."
        )
    library = ctypes.CDLL("libcuda.so.1")
    library.emucuda_counter.restype = ctypes.c_uint64
    library.emucuda_take_kernels.restype = ctypes.c_char_p
    library.emucuda_take_reports.restype = ctypes.c_char_p
    address, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    library.emucuda_device_access.argtypes = [address, size, ctypes.c_int, address, text]
    library.emucuda_host_access.argtypes = [address, size, ctypes.c_int, text]
    return library


def counters() -> Counters:
    """What has happened on the card so far."""
    names = [field.name for field in dataclasses.fields(Counters)]
    return Counters(**{name: native().emucuda_counter(name.encode()) for name in names})


def reset_peaks() -> None:
    """Set the peaks of device and host memory to what is in use now."""
    native().emucuda_reset_peaks()


def take_kernels() -> dict[str, int]:
    """Launches by kernel since the last call. Empty without the setting `kernels`."""
    lines = native().emucuda_take_kernels().decode().splitlines()
    return {name: int(count) for count, name in (line.split(" ", 1) for line in lines)}


def take_reports() -> list[str]:
    """The races found since the last call, a sentence each. Empty without the setting `races`."""
    return native().emucuda_take_reports().decode().splitlines()  # type: ignore[no-any-return]
