"""Gradient checkpointing (exact): a block's activations are dropped after forward and recomputed in backward.

How the recompute is kept the same is in `memscale._recompute`. Here is what it may keep: op-level selective
checkpointing keeps the outputs of matrix products and attention, which are dear to compute, and recomputes the rest.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memscale._plan import Checkpoint
from memscale._recompute import RecomputedForward

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


class CheckpointedForward(RecomputedForward):
    """The forward of a checkpointed block."""

    def __init__(self, module: nn.Module, action: Checkpoint, *, verify: bool = False) -> None:
        super().__init__(module, action.module_fqn, verify=verify)
        if action.keep:
            policy = functools.partial(_policy, frozenset(action.keep))
            self.context_fn = functools.partial(_selective_contexts, policy)


def _selective_contexts(policy: Any) -> tuple[Any, Any]:
    keeping, reading = create_selective_checkpoint_contexts(policy)
    return keeping, _FirstRecompute(reading)


class _FirstRecompute:
    """Reads what was kept, once: PyTorch gives each tensor away as it is read.

    A second backward through the same graph (`retain_graph=True`) finds nothing kept and computes everything again.
    Kept operators draw no random numbers, so that is the same; see NOTE [kept randomness].
    """

    def __init__(self, reading: contextlib.AbstractContextManager[Any]) -> None:
        self._reading: contextlib.AbstractContextManager[Any] | None = reading
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        reading, self._reading = self._reading, None
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
