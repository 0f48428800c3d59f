"""`torch.simgpu`: the device module that `torch.get_device_module("simgpu")` gives, with the usual names.

NOTE [_initialized]: torch.utils.checkpoint saves and restores a device's random state only if its module says that it
is initialised; without that, dropout under checkpoint silently draws other numbers in the recomputation.

NOTE [exit]: torch's thread for the backward pass lets go of its last Python objects after backward() has returned. If
the interpreter is being finalised by then, Python ends that thread in the middle of a C++ destructor and the process
aborts ("terminate called without an active exception"). This is torch's, with any device, and rare. Here everything is
so fast that a short script often meets it, so the end of the process waits for torch's threads: until two looks in a
row, with the interpreter's lock released between them, find none that is running or runnable.
"""

import atexit
import contextlib
import glob
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from simgpu import _control
from simgpu._native import native

DeviceLike = torch.device | int | str | None


def _index(device: DeviceLike) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else int(index)


class device:
    """Makes another device current for a while."""

    def __init__(self, device: DeviceLike) -> None:
        self._index = _index(device)
        self._previous = -1

    def __enter__(self) -> None:
        self._previous = int(torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_device_index(self._previous)


class device_of(device):
    """Makes the device of a tensor current for a while."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "simgpu" else None)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do: importing simgpu has done it."""


def _is_in_bad_fork() -> bool:
    return bool(native.in_forked_child())


def device_count() -> int:
    return int(native.DEVICE_COUNT)


def current_device() -> int:
    return int(torch.accelerator.current_device_index())


def set_device(device: DeviceLike) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: DeviceLike = None) -> str:
    return f"simgpu ({_control.get_card(_index(device)).name})"


def get_device_properties(device: DeviceLike = None) -> types.SimpleNamespace:
    """`clock`: the figures by which the virtual clock counts."""
    index = _index(device)
    card = _control.get_card(index)
    return types.SimpleNamespace(name=get_device_name(device), total_memory=_control.get_cap(index), clock=card)


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_index(device))


# ---------------------------------------------------------------------------------------------------------- streams


def Stream(device: DeviceLike = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("simgpu", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(device="simgpu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """For `with torch.simgpu.stream(s):`; a torch.Stream is a context manager itself."""
    return stream


# ----------------------------------------------------------------------------------------------------------- memory


def memory_allocated(device: DeviceLike = None) -> int:
    return int(torch.accelerator.memory_allocated(_index(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    return int(torch.accelerator.max_memory_allocated(_index(device)))


def memory_reserved(device: DeviceLike = None) -> int:
    return int(torch.accelerator.memory_reserved(_index(device)))


def max_memory_reserved(device: DeviceLike = None) -> int:
    return int(torch.accelerator.max_memory_reserved(_index(device)))


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    free, total = torch.accelerator.get_memory_info(_index(device))
    return int(free), int(total)


def empty_cache() -> None:
    torch.accelerator.empty_cache()


# ---------------------------------------------------------------------------------------------------- random numbers


def manual_seed(seed: int) -> None:
    torch.ops.simgpu.manual_seed(_index(None), _as_int64(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.simgpu.manual_seed(index, _as_int64(seed))


def _as_int64(seed: int) -> int:
    seed %= 1 << 64
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def initial_seed() -> int:
    return int(torch.ops.simgpu.initial_seed(_index(None)))


def get_rng_state(device: DeviceLike = "simgpu") -> torch.Tensor:
    state: torch.Tensor = torch.ops.simgpu.get_rng_state(_index(device))
    return state


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "simgpu") -> None:
    torch.ops.simgpu.set_rng_state(_index(device), new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# --------------------------------------------------------------------------------------------------- mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    card = _control.get_card(_index(None))
    return including_emulation or card.bf16_tflops > card.fp32_tflops


_NAMES: tuple[Callable[..., Any] | type, ...] = (
    device,
    device_of,
    is_available,
    is_initialized,
    init,
    _is_in_bad_fork,
    device_count,
    current_device,
    set_device,
    get_device_name,
    get_device_properties,
    synchronize,
    Stream,
    Event,
    current_stream,
    default_stream,
    set_stream,
    stream,
    memory_allocated,
    max_memory_allocated,
    memory_reserved,
    max_memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    reset_accumulated_memory_stats,
    mem_get_info,
    empty_cache,
    manual_seed,
    manual_seed_all,
    initial_seed,
    get_rng_state,
    set_rng_state,
    get_rng_state_all,
    set_rng_state_all,
    get_amp_supported_dtype,
    is_bf16_supported,
)


def _let_backward_threads_finish() -> None:
    """See NOTE [exit]. The limit is for a thread that hangs."""
    deadline, num_quiet = time.monotonic() + 10.0, 0
    while num_quiet < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # lets go of the interpreter's lock
        num_quiet = 0 if _is_a_torch_thread_busy() else num_quiet + 1


def _is_a_torch_thread_busy() -> bool:
    for stat in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(stat) as file:  # it may have ended
            before, _, after = file.read().rpartition(")")
            if before.partition("(")[2].startswith("pt_") and after.split()[0] in "RD":
                return True
    return False


def register() -> None:
    """Makes `torch.simgpu`, and the tensor and module methods `.simgpu()` and `.is_simgpu`."""
    module = types.ModuleType("torch.simgpu", __doc__)
    for member in _NAMES:
        setattr(module, member.__name__, member)
    module._initialized = True  # type: ignore[attr-defined]  # See NOTE [_initialized].
    module._lazy_init = init  # type: ignore[attr-defined]
    torch._register_device_module("simgpu", module)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    atexit.register(_let_backward_threads_finish)
