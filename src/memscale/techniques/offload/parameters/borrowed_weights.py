"""A streamed weight outside of its layer: lazy logits hold the head's weight until their loss, and long after it.

Such a weight has its values while it is used and is hollow in between: the tensor, its place in the graph and its shape
stay, its memory is freed. Code that keeps a weight asks for its lender, and uses the weight inside `present()`:

    lender = getattr(weight, "memscale_lender", None)
    with lender.present():
        ...

Other code need not know about this: until the first `present()` has ended, the weight is an ordinary tensor.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from memscale._torch import private
from memscale.techniques.offload.parameters.streamer import Stamp, Streamer

ATTRIBUTE = "memscale_lender"


def hollow_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape, on this device, with the memory of one element."""
    line = torch.empty(1, dtype=tensor.dtype, device=device)
    shape = tuple(tensor.shape)
    return private.tensor_over(line.untyped_storage(), tensor.dtype, device, 0, shape, (0,) * len(shape))


class Lender:
    """Brings one visiting weight back when it is used outside of its layer."""

    def __init__(self, weight: torch.Tensor, parameter: torch.Tensor, streamer: Streamer) -> None:
        self._weight = weakref.ref(weight)  # the weight holds this object
        self._parameter = weakref.ref(parameter)
        self._stamps = Stamp.of([parameter])
        self._streamer = streamer
        self._users = 0
        self._lock = threading.Lock()
        self.is_away = False
        self.is_used = False
        """Whether other code keeps the weight and will ask for it."""

    def attach(self) -> None:
        setattr(self._weight(), ATTRIBUTE, self)

    @staticmethod
    def of(weight: torch.Tensor) -> Lender | None:
        lender = getattr(weight, ATTRIBUTE, None)
        return lender if isinstance(lender, Lender) else None

    def use(self) -> Lender:
        self.is_used = True
        return self

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Give the weight its values inside of this context, and free its memory afterwards."""
        with self._lock:
            self._arrive()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._leave()

    def _arrive(self) -> None:
        weight = self._weight()
        if not self.is_away or weight is None:
            return
        parameter = self._parameter()
        if parameter is None or Stamp.of([parameter]) != self._stamps:
            raise RuntimeError(
                "a streamed parameter was changed between its layer's forward and its next use there: call backward() "
                "before the optimizer steps"
            )
        with torch.no_grad():
            weight.data = self._streamer.bring_one(parameter)
        self.is_away = False

    def _leave(self) -> None:
        weight = self._weight()
        if weight is not None:
            with torch.no_grad():
                weight.data = hollow_like(weight, weight.device)
            self.is_away = True
