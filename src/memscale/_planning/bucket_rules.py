"""How an optimizer steps in buckets, by the rules of the techniques that let its state wait: what trials step by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from memscale._plan import OPTIMIZER_BUCKET_BYTES
from memscale.techniques.offload.optimizer.buckets import (
    SMALL_BYTES,
    choose_resident,
    rounded,
    split_into_buckets,
    step_order,
    stretches_of,
)
from memscale.techniques.offload.optimizer.separable import steps_each_element
from memscale.techniques.optimizer8bit.blocks import BlockPacking, table_bytes
from memscale.techniques.optimizer8bit.eight_bit import (
    Chooser,
    moments_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class InBuckets:
    """The rules by which `techniques.offload` and `techniques.optimizer8bit` let state wait."""

    moves: bool
    prefetches: bool
    padding_bytes: int
    eligible: frozenset[int]
    """Parameters whose state waits in 8 bits."""
    block_size: int
    device_type: str
    bucket_bytes: int = OPTIMIZER_BUCKET_BYTES
    window_bytes: int = 0
    resident_shares: tuple[float, ...] = ()
    are_guests: bool = False
    """Their parameters live on the host, and come with their state."""
    cuts: bool = False
    """A large parameter may come a stretch at a time, unless its state waits in 8 bits."""

    def with_share(self, resident_share: float) -> InBuckets:
        """The same where no more than this share, or the next larger one, may stay on the device."""
        larger = [share for share in self.resident_shares if share >= resident_share] or self.resident_shares[-1:]
        return dataclasses.replace(self, resident_shares=tuple(larger[:1]) if resident_share else ())

    def stays(self, sizes: list[int], resident_share: float, *, cuts: bool) -> list[bool]:
        return choose_resident(sizes, resident_share, sum(sizes) if cuts else self.bucket_bytes)

    def order(self, sizes: list[int], travels: list[bool]) -> list[int]:
        return step_order(sizes, travels)

    def cuts_for(self, optimizer: Optimizer) -> bool:
        return self.cuts and steps_each_element(optimizer)

    def split(self, sizes: list[int]) -> list[list[int]]:
        return split_into_buckets(sizes, self.bucket_bytes)

    def stretches(
        self, optimizer: Optimizer, together: Mapping[int, torch.Tensor]
    ) -> list[dict[torch.Tensor, torch.Size | None]]:
        if not together or not self.cuts_for(optimizer) or any(map(self.packs, together)):
            return [dict.fromkeys(together.values())]
        first = next(iter(together.values()))
        if first.nbytes <= self.bucket_bytes:
            return [dict.fromkeys(together.values())]
        sizes = (torch.Size([one.stop - one.start]) for one in stretches_of(first, self.bucket_bytes))
        return [{first: size} for size in sizes]

    def waiting_bytes(self, optimizer: Optimizer, parameter_id: int, name: Any, value: torch.Tensor) -> int | None:
        if value.nbytes <= SMALL_BYTES and not (self.are_guests and value.dim() > 0):
            return None
        packing = self._packing(optimizer, parameter_id, name, value)
        if packing is not None:
            return rounded(packing.waiting_bytes(value.numel()))
        return rounded(value.nbytes) if self.moves else None

    def _packing(self, optimizer: Optimizer, parameter_id: int, name: Any, value: torch.Tensor) -> BlockPacking | None:
        return Chooser(self.eligible, moments_of(optimizer) or {}, self.block_size).packing(parameter_id, name, value)

    def packs(self, parameter_id: int) -> bool:
        return parameter_id in self.eligible

    def scratch_bytes(self, value: torch.Tensor) -> int:
        return BlockPacking(True, self.block_size).scratch_bytes(value.numel(), self.device_type, value.itemsize)

    def tables_bytes(self, optimizer: Optimizer, device_type: str) -> int:
        if not self.eligible:
            return 0
        return len(set((moments_of(optimizer) or {}).values())) * table_bytes(device_type)
