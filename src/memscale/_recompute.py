"""A module whose forward is computed once now and once more in backward: the base of checkpointing and streaming.

Non-reentrant `torch.utils.checkpoint` around the module's forward. On top of what PyTorch reproduces (its own RNG,
autocast), the recompute sees the module as the forward saw it:

- Python's and NumPy's random state, and that of generators which the module holds;
- buffers that the forward changes (BatchNorm statistics, spectral-norm vectors) and attributes (a counter, a list
  that grows) as they were before it, and on stand-ins, so that they are not changed twice;
- the very parameters, also when `torch.func.functional_call` had put others in their place;
- arguments: containers that a module changes in place are changed once.

Known limits: state that a forward changes elsewhere (a global, an object that an attribute holds), or not at its
first run, is not reproduced; `Config(verify_correctness=True)` finds that. Forward hooks on parts of the module run
again in the recompute. A module that changes its input tensors in place is refused. A module that is given a key-value
cache is not recomputed for that call, nor is any inside `torch.func` transforms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from memscale import _torch_private
from memscale._errors import VerificationError
from memscale._host_rng import HostRng
from memscale._module_state import Memory, ModuleState
from memscale._patching import ForwardOverride


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
        self.draws_from_numpy: bool | None = None
        """Learned at the first forward; see `HostRng`."""
        self.state = ModuleState(module)
        self._warned = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _torch_private.inside_functional_transform():
            return self.compute(args, kwargs, None)
        if self._holds_cache(args, kwargs):
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
        self.memory = Memory()
        self.digest: list[int] | None = None
        self.notes: Any = None
        """What the owner wants to find again in the recompute. Lives as long as the graph may need it."""

    def __call__(self, anchor: Any, *leaves: Any) -> Any:
        if self.original is not None:
            (args, kwargs), self.original = self.original, None
            versions = _versions(leaves)
            output = self._compute(args, kwargs)
            self._refuse_surprises(leaves, versions)
            return output
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self._recompute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        self.host_rng = HostRng(draws_from_numpy=self.owner.draws_from_numpy is not False)
        self.memory = self.owner.state.before()
        output = self.owner.compute(args, kwargs, self)
        self.owner.state.after(self.memory)
        if self.owner.verify:
            self.digest = _digest(output)
        return output

    def _refuse_surprises(self, leaves: tuple[Any, ...], versions: list[int]) -> None:
        assert self.host_rng is not None
        owner, draws = self.owner, self.host_rng.numpy_moved()
        is_surprise = draws and owner.draws_from_numpy is False
        owner.draws_from_numpy = draws or owner.draws_from_numpy is True
        if _versions(leaves) != versions:
            raise RuntimeError(
                f"{owner.module_fqn} changes its input in place, so it cannot be computed again; leave it out of "
                "checkpointing, or let it work on a copy"
            )
        if is_surprise:
            raise RuntimeError(
                f"{owner.module_fqn} drew from NumPy's random numbers, which earlier forwards did not: its recompute "
                "would not be the same. Run the step again: MemScale remembers it from now on."
            )

    def _recompute(self, args: Any, kwargs: Any) -> Any:
        assert self.host_rng is not None
        self.owner.num_recomputes += 1
        shown = self.owner.state.show(self.memory)
        try:
            with self.host_rng.repeated():
                output = self.owner.recompute(args, kwargs, self)
        finally:
            self.owner.state.hide(shown)
        if self.digest is not None and self.digest != _digest(output):
            raise VerificationError(
                f"the recompute of {self.owner.module_fqn} differs from its forward: the module depends on state that "
                "changes between the two; leave it out of checkpointing"
            )
        return output


def _versions(leaves: tuple[Any, ...]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _digest(output: Any) -> list[int]:
    """A fingerprint of every bit of the output's tensors, without keeping them."""
    return [_bits(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _bits(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
        positions = torch.arange(1, raw.numel() + 1, device=raw.device)
        return int((raw * (positions % 65521)).sum().item()) if raw.numel() else 0
