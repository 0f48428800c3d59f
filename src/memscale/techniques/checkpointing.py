"""Gradient checkpointing (exact): a block's activations are dropped after forward and recomputed in backward.

Non-reentrant `torch.utils.checkpoint` around the block's forward. On top of what PyTorch reproduces (its own RNG,
autocast), the recompute sees the block as the forward saw it:

- Python's and NumPy's random state, for blocks that draw from them;
- buffers that the forward changes (BatchNorm statistics, spectral-norm vectors) as they were before it, and on
  stand-ins, so that they are not changed twice;
- arguments: containers that a block changes in place are changed once.

Known limits: other state that a forward changes (a Python counter that steers the computation) is not reproduced;
`Config(verify_correctness=True)` finds that. A block that is given a key-value cache is not checkpointed for that call.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from memscale import _torch_private
from memscale._errors import VerificationError
from memscale._patching import ForwardOverride
from memscale._plan import Checkpoint

aten = torch.ops.aten

_MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
    }
)
_ATTENTION_MARK = "_scaled_dot_product_"

BufferSlot: TypeAlias = tuple[nn.Module, str]


def attach(
    action: Checkpoint, module: nn.Module, undo: contextlib.ExitStack, *, verify: bool = False
) -> CheckpointedForward:
    """Checkpoint this module until undone."""
    forward = CheckpointedForward(module, action, verify=verify)
    forward.attach(undo)
    return forward


class CheckpointedForward(ForwardOverride):
    """The forward of a checkpointed block."""

    def __init__(self, module: nn.Module, action: Checkpoint, *, verify: bool = False) -> None:
        super().__init__(module)
        self.module_fqn = action.module_fqn
        self.verify = verify
        self.num_recomputes = 0
        self.buffers = _BufferKeeper(module)
        self._context_fn = _context_fn(action)
        self._warned = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._holds_cache(args, kwargs):
            return self.inner()(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        region = _Region(self, args, kwargs, spec)
        # Flat, so that checkpoint sees every tensor: it saves the RNG only of devices that it finds among them.
        with set_checkpoint_early_stop(not self.verify):
            return checkpoint(region, *leaves, use_reentrant=False, context_fn=self._context_fn)

    def _holds_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A key-value cache would be filled a second time by the recompute."""
        found = any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values()))
        if found and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.module_fqn} is not checkpointed while it fills a key-value cache; "
                "pass use_cache=False in training",
                stacklevel=2,
            )
        return found


class _Region:
    """One call of a checkpointed block: computed once now, and once more in backward."""

    def __init__(self, owner: CheckpointedForward, args: Any, kwargs: Any, spec: Any) -> None:
        self.owner = owner
        self.spec = spec
        self.original: tuple[Any, Any] | None = (args, kwargs)
        self.host_rng = _HostRng()
        self.buffers: dict[BufferSlot, torch.Tensor] = {}
        self.digest: list[int] | None = None

    def __call__(self, *leaves: Any) -> Any:
        if self.original is not None:
            (args, kwargs), self.original = self.original, None
            return self._compute(args, kwargs)
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self._recompute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        self.host_rng.remember()
        with self.owner.buffers.remembered() as self.buffers:
            output = self.owner.inner()(*args, **kwargs)
        if self.owner.verify:
            self.digest = _digest(output)
        return output

    def _recompute(self, args: Any, kwargs: Any) -> Any:
        self.owner.num_recomputes += 1
        with self.host_rng.repeated(), self.owner.buffers.replayed(self.buffers):
            output = self.owner.inner()(*args, **kwargs)
        if self.digest is not None and self.digest != _digest(output):
            raise VerificationError(
                f"the recompute of {self.owner.module_fqn} differs from its forward: the block depends on state that "
                "changes between the two; leave it out of checkpointing"
            )
        return output


class _HostRng:
    """Python's and NumPy's random state before a forward, for its recompute."""

    def __init__(self) -> None:
        self._python: Any = None
        self._numpy: Any = None

    def remember(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        now = _HostRng()
        now.remember()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class _BufferKeeper:
    """Knows which buffers a block's forward changes, and shows their earlier values to the recompute.

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


def _context_fn(action: Checkpoint) -> Callable[[], Any]:
    if not action.keep:
        return noop_context_fn
    policy = functools.partial(_policy, frozenset(action.keep))
    return functools.partial(create_selective_checkpoint_contexts, policy)


def _policy(keep: frozenset[str], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to compute; never an operator that draws random numbers.

    NOTE [kept randomness]: a kept operator is not run again, so it would not advance the RNG in the recompute, and
    every later dropout of the block would draw other numbers than in forward.
    """
    is_kept = ("matmul" in keep and op in _MATMULS) or ("attention" in keep and _ATTENTION_MARK in op.name())
    if is_kept and not _draws_random_numbers(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return torch.Tag.nondeterministic_seeded in op.tags
    index = names.index("dropout_p")
    probability = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
    return float(probability) > 0.0
