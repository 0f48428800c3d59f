"""`Moment`: what decides the numbers of a computation beside its inputs, so that it can be done again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memscale._torch.host_rng import HostRng


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
