"""`Moment`: what decides the numbers of a computation beside its inputs, so that it can be done again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memscale._torch.host_rng import Fingerprint, HostRng


def is_recorded(device: torch.device) -> bool:
    """Whether the device's work is recorded now, to be replayed as a graph: random states cannot be read then."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


class Draws:
    """Tells whether somebody has drawn a random number since it was made, for some microseconds."""

    __slots__ = ("_device", "_host", "_states")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = Fingerprint()
        self._states = self._torch_states()

    def _torch_states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def moved(self) -> bool:
        return self._host.moved() or not all(map(torch.equal, self._states, self._torch_states()))


class Moment:
    """The random state of this thread's CPU generators and of one device, and the state of autocast."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = HostRng()
        self._cpu = torch.get_rng_state()
        self._of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        kinds = {"cpu", device.type}
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        """Draw again what was drawn after that moment."""
        self._host.restore()
        torch.set_rng_state(self._cpu)
        if self._of_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._of_device, self._device)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Inside, the random state and autocast are those of that moment; afterwards the random state is as before."""
        now = Moment(self._device)
        self.restore()
        try:
            with contextlib.ExitStack() as states:
                for kind, is_enabled, dtype in self._autocast:
                    states.enter_context(torch.autocast(kind, dtype, is_enabled, self._caches))
                yield
        finally:
            now.restore()
