"""How a step runs bucket by bucket: what a twin asks of whoever will execute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

Prepare = Callable[[Optimizer, Mapping[int, nn.Parameter]], None]
"""Makes a twin fit for steps on its fake parameters, which are given by the ids of those that they stand for."""


class Stepping(Protocol):
    """A step that runs bucket by bucket."""

    @property
    def moves(self) -> bool:
        """Buckets wait on another tier."""

    @property
    def prefetches(self) -> bool:
        """The next bucket arrives while one is stepped."""

    @property
    def padding_bytes(self) -> int:
        """What a bucket's memory is padded with."""

    @property
    def window_bytes(self) -> int:
        """What is on its way out holds no more than this."""

    @property
    def resident_shares(self) -> Sequence[float]:
        """Shares of the state that may stay on the device while the rest moves."""

    def stays(self, sizes: list[int], resident_share: float, *, cuts: bool) -> list[bool]:
        """Which buckets, given the bytes of their parameters, stay on the device for that share of the state; `cuts`:
        large ones would travel in stretches."""

    def order(self, sizes: list[int], travels: list[bool]) -> list[int]:
        """The order in which turns are stepped, given the bytes of their parameters and which of them travel."""

    def cuts_for(self, optimizer: Optimizer) -> bool:
        """Whether parameters that are larger than a bucket travel in stretches."""

    def split(self, sizes: list[int]) -> list[list[int]]:
        """The indices of parameters that are stepped together, given their sizes."""

    def stretches(
        self, optimizer: Optimizer, together: Mapping[int, torch.Tensor]
    ) -> Sequence[Mapping[torch.Tensor, torch.Size | None]]:
        """What of these, given by the ids of the parameters, is stepped together: all of them, None, or a stretch of
        one after another, of these sizes."""

    def waiting_bytes(self, optimizer: Optimizer, parameter_id: int, name: Any, value: torch.Tensor) -> int | None:
        """The bytes in which a state tensor waits in its bucket; None: it stays as it is."""

    def tables_bytes(self, optimizer: Optimizer, device_type: str) -> int:
        """What packing keeps on the device all the time."""

    def packs(self, parameter_id: int) -> bool:
        """Whether state of this parameter may wait in fewer bytes than it has."""

    def scratch_bytes(self, value: torch.Tensor) -> int:
        """The memory that packing this tensor takes."""
