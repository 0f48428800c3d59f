"""Parameters that come to share memory while they are trained: `head.weight.data = embed.weight.data`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memscale._torch import private
from memscale.techniques.offload.parameters.parameter_homes import overlapping


class SharedMemory:
    """Remembers where the parameters of an optimizer lie. Asking takes about a microsecond a parameter."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []

    def new_groups(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Those that share memory with one another, if any parameter lies elsewhere than it did when last asked."""
        places = [_place_of(parameter) for parameter in parameters]
        if places == self._places:
            return []
        self._places = places
        return [group for group in overlapping(parameters) if len(group) > 1]


def _place_of(parameter: torch.Tensor) -> tuple[int, int]:
    if parameter.layout is not torch.strided:
        return id(parameter), 0
    return private.storage_key(parameter.untyped_storage()), int(parameter.storage_offset())
