"""Gradient checkpointing (exact): a block's activations are dropped after forward and recomputed in backward.

How the recompute is kept the same is in `memscale.techniques.recompute`. Here is what it may keep: op-level selective
checkpointing keeps the outputs of matrix products and attention, which are dear to compute, and recomputes the rest.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from memscale._errors import MemScaleError, PlanError
from memscale._plan import Checkpoint
from memscale._torch import private
from memscale.techniques.recompute import RecomputedForward

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
_ALIASES = frozenset(
    {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default},
)
_ATTENTION_MARK = "_scaled_dot_product_"


class CheckpointedForward(RecomputedForward):
    """The forward of a checkpointed block."""

    def __init__(self, module: nn.Module, action: Checkpoint, *, verify: bool = False) -> None:
        super().__init__(module, action.module_fqn, verify=verify)
        if action.keep and private.is_compiled(module):
            raise PlanError(
                f"{action.module_fqn} is compiled, so outputs of its operators cannot be kept one by one: checkpoint "
                "it whole, or plan again"
            )
        if action.keep:
            self.context_fn = functools.partial(self._selective_contexts, frozenset(action.keep))

    make_contexts: Callable[[Policy], tuple[Any, Any]] = staticmethod(
        lambda policy: private.selective_contexts(policy, policy.may_keep)
    )
    """Makes what keeps the outputs that a policy chooses, and what reads them: PyTorch's, or another technique's."""

    def _selective_contexts(self, keep: frozenset[str]) -> tuple[Any, Any]:
        policy = Policy(self.module_fqn, keep)
        keeping, reading = self.make_contexts(policy)
        return keeping, _FirstRecompute(reading, policy)


class _FirstRecompute:
    """Reads what was kept, once: PyTorch gives each tensor away as it is read.

    A second backward through the same graph (`retain_graph=True`) finds nothing kept and computes everything again.
    Kept operators draw no random numbers, so that is the same; see NOTE [kept randomness].
    """

    def __init__(self, reading: contextlib.AbstractContextManager[Any], policy: Policy) -> None:
        self._policy = policy
        self._reading: contextlib.AbstractContextManager[Any] | None = reading
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            self._policy.refuse_later_writes()
        self._entered.append(reading if reading is not None else contextlib.nullcontext())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def attach(
    action: Checkpoint, module: nn.Module, undo: contextlib.ExitStack, *, verify: bool = False
) -> CheckpointedForward:
    """Checkpoint this module until undone."""
    forward = CheckpointedForward(module, action, verify=verify)
    forward.attach(undo)
    return forward


class Policy:
    """What one call of a block keeps: what is dear to compute, but never what draws random numbers.

    NOTE [kept randomness]: a kept operator is not run again, so it would not advance the RNG in the recompute, and
    every later dropout of the block would draw other numbers than in forward.

    NOTE [kept and written to]: what is kept must be as its operator left it, or the recompute would write to it again.
    PyTorch looks at version counters, but `unsafe_split` (every GRU), `_unsafe_view` (a linear layer without bias) and
    `.data` give views with others: a gradient would be wrong without a word. Here storages are looked at.
    """

    def __init__(self, module_fqn: str, keep: frozenset[str]) -> None:
        self.module_fqn = module_fqn
        self.keep = keep
        self._kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages, while they live: a later one may get the same key."""
        self._aliases: list[tuple[torch.Tensor, int]] = []
        """Witnesses of views of kept outputs, which have counters of their own: who uses the block may write to them
        when it is over."""

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute and op._schema.is_mutable:
            self._refuse_writes(op, args, kwargs)
        if not context.is_recompute and op in _ALIASES and self._is_any_kept(args):
            aliases = [private.version_witness(tensor) for tensor in tree_leaves(context.op_output)]
            self._aliases += [(alias, alias._version) for alias in aliases]
        if not self.may_keep(op) or _draws_random_numbers(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            found = _storages(getattr(context, "op_output", None))
            self._kept.update((private.storage_key(storage), weakref.ref(storage)) for storage in found)
        return CheckpointPolicy.MUST_SAVE

    def may_keep(self, op: Any) -> bool:
        """Whether its outputs are kept where it draws no random numbers."""
        return ("matmul" in self.keep and op in _MATMULS) or ("attention" in self.keep and _ATTENTION_MARK in op.name())

    def _is_any_kept(self, tree: Any) -> bool:
        known = ((storage, self._kept.get(private.storage_key(storage))) for storage in _storages(tree))
        return any(kept is not None and kept() is storage for storage, kept in known)

    def _refuse_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See NOTE [kept and written to]."""
        for index, argument in enumerate(op._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if argument.is_write and self._is_any_kept(value):
                raise self._refusal(f"{op} in {self.module_fqn}")

    def refuse_later_writes(self) -> None:
        """See NOTE [kept and written to]."""
        aliases, self._aliases = self._aliases, []
        if any(alias._version != version for alias, version in aliases):
            raise self._refusal(f"what comes after {self.module_fqn}")

    def _refusal(self, who: str) -> MemScaleError:
        return MemScaleError(
            f"{who} changes the output of a matrix product or of attention in place, so that cannot be kept: "
            f"checkpoint {self.module_fqn} whole"
        )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return [tensor.untyped_storage() for tensor in tensors]


def _draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return torch.Tag.nondeterministic_seeded in op.tags
    index = names.index("dropout_p")
    probability = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
    return float(probability) > 0.0
