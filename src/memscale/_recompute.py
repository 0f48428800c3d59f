"""A module whose forward is computed once now and once more in backward: the base of checkpointing and streaming.

Non-reentrant `torch.utils.checkpoint` around the module's forward. On top of what PyTorch reproduces (its own RNG,
autocast), the recompute sees the module as the forward saw it:

- Python's and NumPy's random state, for modules that draw from them;
- buffers that the forward changes (BatchNorm statistics, spectral-norm vectors) as they were before it, and on
  stand-ins, so that they are not changed twice;
- arguments: containers that a module changes in place are changed once.

Known limits: other state that a forward changes (a Python counter that steers the computation) is not reproduced;
`Config(verify_correctness=True)` finds that. A module that is given a key-value cache is not recomputed for that call.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from memscale import _torch_private
from memscale._errors import VerificationError
from memscale._host_rng import HostRng
from memscale._patching import ForwardOverride

BufferSlot: TypeAlias = tuple[nn.Module, str]


class RecomputedForward(ForwardOverride):
    """The forward of a module that is computed again in backward."""

    context_fn: Callable[[], Any] = staticmethod(noop_context_fn)
    """What `torch.utils.checkpoint` calls for its pair of contexts."""
    anchor: torch.Tensor | None = None
    """A tensor on the device that the forward computes on, where its arguments need not show it."""

    def __init__(self, module: nn.Module, module_fqn: str, *, verify: bool = False) -> None:
        super().__init__(module)
        self.module_fqn = module_fqn
        self.verify = verify
        self.num_recomputes = 0
        self.buffers = BufferKeeper(module)
        self._warned = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._holds_cache(args, kwargs):
            return self.compute(args, kwargs, None)
        leaves, spec = tree_flatten((args, kwargs))
        region = Region(self, args, kwargs, spec)
        # Flat, so that checkpoint sees every tensor: it saves the RNG only of devices that it finds among them.
        with set_checkpoint_early_stop(not self.verify):
            return checkpoint(region, self.anchor, *leaves, use_reentrant=False, context_fn=self.context_fn)

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region | None) -> Any:
        """The module's forward, the first time; without a region if there will be no recompute."""
        return self.inner()(*args, **kwargs)

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The same in backward."""
        return self.inner()(*args, **kwargs)

    def _holds_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A key-value cache would be filled a second time by the recompute."""
        found = any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values()))
        if found and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.module_fqn} keeps its activations while it fills a key-value cache; "
                "pass use_cache=False in training",
                stacklevel=2,
            )
        return found


class Region:
    """One call of such a module."""

    def __init__(self, owner: RecomputedForward, args: Any, kwargs: Any, spec: Any) -> None:
        self.owner = owner
        self.spec = spec
        self.original: tuple[Any, Any] | None = (args, kwargs)
        self.host_rng: HostRng | None = None
        self.buffers: dict[BufferSlot, torch.Tensor] = {}
        self.digest: list[int] | None = None
        self.notes: Any = None
        """What the owner wants to find again in the recompute. Lives as long as the graph may need it."""

    def __call__(self, anchor: Any, *leaves: Any) -> Any:
        if self.original is not None:
            (args, kwargs), self.original = self.original, None
            return self._compute(args, kwargs)
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self._recompute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        self.host_rng = HostRng()
        with self.owner.buffers.remembered() as self.buffers:
            output = self.owner.compute(args, kwargs, self)
        if self.owner.verify:
            self.digest = _digest(output)
        return output

    def _recompute(self, args: Any, kwargs: Any) -> Any:
        assert self.host_rng is not None
        self.owner.num_recomputes += 1
        with self.host_rng.repeated(), self.owner.buffers.replayed(self.buffers):
            output = self.owner.recompute(args, kwargs, self)
        if self.digest is not None and self.digest != _digest(output):
            raise VerificationError(
                f"the recompute of {self.owner.module_fqn} differs from its forward: the module depends on state that "
                "changes between the two; leave it out of checkpointing"
            )
        return output


class BufferKeeper:
    """Knows which buffers a module's forward changes, and shows their earlier values to the recompute.

    NOTE [changing buffers]: which buffers change is learned at the first forward in each state of the training flags,
    by value: some kernels write to buffers without telling autograd. From then on only those are remembered.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots: list[BufferSlot] = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._changing: dict[tuple[bool, ...], set[BufferSlot]] = {}

    def _flags(self) -> tuple[bool, ...]:
        return tuple(owner.training for owner, _ in self._slots)

    def _values(self) -> dict[BufferSlot, torch.Tensor]:
        return {slot: value for slot in self._slots if (value := slot[0]._buffers.get(slot[1])) is not None}

    @contextlib.contextmanager
    def remembered(self) -> Iterator[dict[BufferSlot, torch.Tensor]]:
        """The values, before the forward, of the buffers that it changes."""
        if not self._slots:
            yield {}
            return
        flags, values = self._flags(), self._values()
        known = self._changing.get(flags)
        versions = {slot: value._version for slot, value in values.items()}
        before = {slot: value.clone() for slot, value in values.items() if known is None or slot in known}
        yield before
        after = self._values()
        if known is None:
            known = {slot for slot, value in before.items() if not _same(value, after.get(slot))}
            self._changing[flags] = known
        for slot in [slot for slot in before if slot not in known]:
            del before[slot]
        self._refuse_surprises(known, versions, after)

    def _refuse_surprises(
        self, known: set[BufferSlot], versions: dict[BufferSlot, int], after: dict[BufferSlot, torch.Tensor]
    ) -> None:
        for slot, version in versions.items():
            if slot not in known and slot in after and after[slot]._version != version:
                known.add(slot)
                raise RuntimeError(
                    f"buffer {slot[1]!r} of {type(slot[0]).__name__} was changed by this forward, not by earlier ones: "
                    "its recompute would not be the same. Run the step again: MemScale remembers it from now on."
                )

    @contextlib.contextmanager
    def replayed(self, before: dict[BufferSlot, torch.Tensor]) -> Iterator[None]:
        """The buffers as they were, on stand-ins; afterwards the real ones, untouched."""
        real = {slot: slot[0]._buffers[slot[1]] for slot in before}
        for (owner, name), value in before.items():
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (owner, name), buffer in real.items():
                owner._buffers[name] = buffer


def _same(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.device.type == "meta" or _torch_private.is_fake(before):
        return False  # no values to compare: take it as changing
    return torch.equal(before, after)


def _digest(output: Any) -> list[int]:
    """A fingerprint of every bit of the output's tensors, without keeping them."""
    return [_bits(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _bits(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
        positions = torch.arange(1, raw.numel() + 1, device=raw.device)
        return int((raw * (positions % 65521)).sum().item()) if raw.numel() else 0
