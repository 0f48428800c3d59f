"""The books that are kept of a step: live bytes, and what is computed."""

from __future__ import annotations

from typing import Any

from memscale._profile.operator_costs import Work
from memscale._torch import private
from memscale._torch.fake_numbers import ANY_VALUE, reads_fake_number
from memscale._torch.live_bytes import LiveBytes


@private.without_compiler
class Books(LiveBytes):
    """Live bytes, and what is computed, on fake tensors, of which any number is read as `AnyValue` reads it."""

    def __init__(self, device_type: str, rounding_bytes: int) -> None:
        super().__init__(device_type, rounding_bytes, counts_fakes=True)
        self.begin_work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if private.is_device_question(func) and private.is_fake(args[0]):
            return private.device_answer(args[0])
        if reads_fake_number(func, args):
            return ANY_VALUE
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        self.work.add(func, args, kwargs, result, self.device_type, self.known)
        return result

    def begin_work(self) -> None:
        """Count what is computed from here on."""
        self.work = Work()
