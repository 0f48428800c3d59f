"""Reserved bytes by a model of a caching allocator, in the place of the ideal one that simgpu has.

NOTE [who drives whom]: simgpu knows no model, and whoever has one hands it over. What the device is asked for is
written down as it happens and played on the model when somebody reads what is reserved:
`torch.accelerator.memory_reserved()`, its maximum, `memory_stats()` or `get_memory_info()`.
"""

import threading
from typing import Any, Protocol

from simgpu._native import native


class AllocatorModel(Protocol):
    """A model of a caching allocator. Its blocks are its own; they are handed back as they came."""

    @property
    def reserved_bytes(self) -> int:
        """What it holds of the device."""

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that it held since `reset_peaks()`."""

    def allocate(self, num_bytes: int, stream: int) -> Any:
        """A block of at least so many bytes, for this stream."""

    def free(self, block: Any) -> None:
        """Take a block back, with which all streams are done."""

    def empty_cache(self) -> None:
        """Give back what is free as a whole."""

    def reset_peaks(self) -> None:
        """Peaks begin with what is there now."""


class _Played:
    """A model, and the blocks that it has handed out for what is alive on the device."""

    def __init__(self, model: AllocatorModel) -> None:
        self._model = model
        self._blocks: dict[int, Any] = {}
        self._lock = threading.Lock()

    def figures(self, device: int) -> tuple[int, int]:
        """Reserved bytes now, and at most since this was asked before."""
        with self._lock:
            self._model.reset_peaks()
            for event in native.take_allocator_events(device):
                self._play(event)
            return self._model.reserved_bytes, self._model.peak_reserved_bytes

    def _play(self, event: Any) -> None:
        if event.kind == native.AllocatorEventKind.allocate:
            self._blocks[event.serial] = self._model.allocate(event.bytes, event.stream)
        elif event.kind == native.AllocatorEventKind.free:
            self._model.free(self._blocks.pop(event.serial))
        else:
            self._model.empty_cache()


_played: dict[int, _Played] = {}


def set_allocator(model: AllocatorModel | None, device: int = 0) -> None:
    """Reserved bytes are this model's from here on; None: those of the ideal allocator again.

        simgpu.set_allocator(CachingAllocator())        # e.g. memscale's, which follows PyTorch's rules for CUDA
        model.to("simgpu")
        torch.accelerator.max_memory_reserved()         # with rounding, segments and what cannot be reused

    The model begins with what is on the device, in the order in which it came; give it one that is new. The capacity
    (`set_cap`) stays one of bytes that are in use: a model that has a capacity of its own, and runs out of it, raises
    where reserved bytes are read.
    """
    if model is None:
        _played.pop(device, None)
    else:
        _played[device] = _Played(model)
    native.model_reserved(device, model is not None)


def _figures(device: int) -> tuple[int, int]:
    return _played[device].figures(device)


native.set_reserved_model(_figures)
