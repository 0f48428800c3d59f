"""What a layer's forward writes past autograd (`.data`): to its inputs, or to what it has saved for backward.

PyTorch's own backward then uses what was written, without a word. A recompute would read inputs that are written to
already, and write to them once more; and neither a recompute nor an offload has what was written to a saved tensor. So
a layer whose code names `.data` is watched in its first forward in each state of the training flags, and refused where
it does this. Buffers and tensors beside the model are not looked at here: they are put back (module_state.py), as are
parameters.

Known limits: a write from outside of the layer, or between forward and backward, leaves no trace that could be found
without reading all saved tensors again; nor is one seen that comes in a later forward for the first time, or from code
that does not name `.data`. docs/design/how_exact.md says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale._torch.bit_sums import has_plain_memory, sums_of_bits
from memscale._torch.named_in_code import code_names_any


def may_write_silently(module: nn.Module) -> bool:
    """Whether the code of the module, or of its parts, may write past autograd."""
    return code_names_any(module, ("data",), once_made=True)


def is_watched_here() -> bool:
    """Whether tensors have values that can be compared: in a rehearsal they have none."""
    return private.active_fake_mode() is None


class SilentWrites:
    """Watches one forward of a layer. What it saves is held meanwhile."""

    def __init__(self, module_fqn: str, inputs: Iterable[Any] = (), apart: Collection[int] = ()) -> None:
        """`inputs`: the tensors that a recompute reads; `apart`: the storages that are not looked at."""
        self._module_fqn = module_fqn
        self._apart = apart
        inputs = [each for each in inputs if _can_be_summed(each)]
        self._inputs = [_Noted(each, bits, None) for each, bits in zip(inputs, sums_of_bits(inputs), strict=True)]
        self._saved: list[_Noted] = []

    def saved(self, tensor: torch.Tensor, packed: Any = None) -> None:
        """Autograd saves this tensor, and keeps `packed` for it."""
        if _can_be_summed(tensor) and private.storage_key(tensor.untyped_storage()) not in self._apart:
            held = private.detach_with_version(tensor)
            self._saved.append(_Noted(held, sums_of_bits([held])[0], packed))

    def refuse(self) -> None:
        """Raise if the forward, which is over, has written past autograd to what its recompute needs."""
        inputs, self._inputs = self._inputs, []
        if _written(inputs):
            raise MemScaleError(self._refusal("to its input, so it cannot be computed again"))
        if self.overwritten():
            raise MemScaleError(self.refusal_of_saved())

    def overwritten(self) -> list[Any]:
        """What autograd keeps for the tensors that the forward, which is over, has saved and written to."""
        saved, self._saved = self._saved, []
        return [noted.packed for noted in _written(saved)]

    def refusal_of_saved(self) -> str:
        return self._refusal(
            "to a tensor that it has saved for backward, where plain PyTorch would use what was written"
        )

    def _refusal(self, where: str) -> str:
        return (
            f"{self._module_fqn} writes past autograd (.data) {where}: leave it out of checkpointing, offloading and "
            "streaming, or let it work on a copy"
        )


class _Noted:
    """A tensor as it was at one moment."""

    def __init__(self, tensor: torch.Tensor, bits: int, packed: Any) -> None:
        self.tensor, self.bits, self.packed = tensor, bits, packed
        self.version = tensor._version
        self.storage = private.storage_key(tensor.untyped_storage())


def _can_be_summed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_plain_memory(value) and value.numel() > 0 and not value.is_neg()


def _written(noted: list[_Noted]) -> list[_Noted]:
    """Where autograd was told, plain PyTorch raises, and whoever keeps the tensor looks for that himself."""
    silent = [each for each in noted if each.tensor._version == each.version]
    now = sums_of_bits([each.tensor for each in silent])
    return [
        each
        for each, bits in zip(silent, now, strict=True)
        if bits != each.bits or private.storage_key(each.tensor.untyped_storage()) != each.storage
    ]
