"""What a recomputed module saves for backward and then changes in place, before it saves something else.

PyTorch's own backward refuses such a tensor by its version. A recompute saves it anew and changes it again, and a
checkpoint does not look at versions: a gradient would be wrong without a word. A change that comes after everything
that is saved does no harm, because the recompute ends before it. Nor is plain training always an error: a checkpoint
inside of the module, which the recompute computes as part of the whole, may have ended before the change.

The first forward in each state of the training flags is watched; where it finds such a change, every later one is.
What was changed is refused when backward asks for it.

Known limit: a forward that changes no saved tensor at first, and does so later on, is not noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale.techniques.recompute.silent_writes import SilentWrites


@dataclasses.dataclass(slots=True)
class _Saved:
    """What autograd keeps for a tensor that is saved while a forward is watched."""

    packed: Any
    is_changed: bool = False


class SavedWrites:
    """Watches one forward of a module, and what its backward asks for."""

    def __init__(self, module_fqn: str, *, ends_early: bool, silent: SilentWrites | None = None) -> None:
        """`ends_early`: whether a recompute ends with the last tensor that is saved. `silent`: who looks for writes
        that autograd is not told of; None: the module's code makes none."""
        self._module_fqn = module_fqn
        self._ends_early = ends_early
        self._silent = silent
        self._open: list[tuple[torch.Tensor, int, _Saved]] = []
        self._nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.found = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the module computes. Its checkpoint goes on deciding what is kept of each saved tensor."""
        hooks = private.saved_tensors_hooks_in_use()
        if hooks is None:
            yield
            return
        pack, unpack = hooks

        def pack_and_note(tensor: torch.Tensor) -> Any:
            self._look()
            saved = _Saved(pack(tensor))
            if self._silent is not None:
                self._silent.saved(tensor)
            if not tensor.is_inference():
                self._open.append((self._witness(tensor), tensor._version, saved))
            return saved

        def look_and_unpack(saved: _Saved) -> Any:
            if saved.is_changed:
                raise MemScaleError(
                    f"{self._module_fqn} changes a tensor in place that it has saved for backward, so it cannot be "
                    "computed again: leave it out of checkpointing and streaming, or let it work on a copy"
                )
            return unpack(saved.packed)

        try:
            with (
                contextlib.nullcontext() if self._silent is None else self._silent.watched(),
                torch.autograd.graph.saved_tensors_hooks(pack_and_note, look_and_unpack),
            ):
                yield
            if not self._ends_early:
                self._look()
            if self._silent is not None:
                self._silent.refuse()
        finally:
            self._open, self._nothing = [], {}

    def _witness(self, tensor: torch.Tensor) -> torch.Tensor:
        """One is made for every tensor that is saved; what they show is the same for many."""
        kind = tensor.dtype, tensor.device
        if kind not in self._nothing:
            self._nothing[kind] = torch.empty(0, dtype=kind[0], device=kind[1])
        return private.version_witness(tensor, self._nothing[kind])

    def _look(self) -> None:
        """Note which of the tensors that were saved so far have changed since."""
        for witness, version, saved in self._open:
            if witness._version != version:
                saved.is_changed = self.found = True
