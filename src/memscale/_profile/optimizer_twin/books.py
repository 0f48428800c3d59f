"""The books that are kept of a step: live bytes, and what is computed."""

from __future__ import annotations

from memscale._profile.operator_costs import Work
from memscale._torch import private
from memscale._torch.live_bytes import LiveBytes


@private.without_compiler
class Books(LiveBytes):
    """Live bytes, and what is computed, on fake tensors."""

    def __init__(self, device_type: str, rounding_bytes: int) -> None:
        super().__init__(device_type, rounding_bytes, counts_fakes=True)
        self.begin_work()

    def begin_work(self) -> None:
        """Count what is computed from here on."""
        self.work = self.counter = Work()
