"""Offload of kept outputs (exact): what a selective checkpoint keeps of a block waits on the next tier.

A selective checkpoint keeps the outputs of matrix products and attention, and PyTorch keeps them where no saved-tensor
hook sees them, so offloading a block's activations moves its input alone. This technique moves the kept outputs too:
they are fewer bytes than all activations, and nothing expensive is computed again. It is for links that are too slow
for `OffloadActivations` and products that are too expensive to be computed again.

Two contexts take the place of PyTorch's, under the same policy (its notes are in checkpointing). In forward, every kept
output is given to the offloader; the recompute takes the outputs back in the same order. An output that was written to
in between is refused by its version, as autograd does.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memscale._errors import PlanError
from memscale._plan import Checkpoint, LayerAction, OffloadActivations, Reason
from memscale._profile import Treatment
from memscale.techniques.offload.next_tier import no_next_tier, no_tier_for_plan
from memscale.techniques.technique import Technique, Treated

if TYPE_CHECKING:
    from memscale._execute.attachment import Attachment
    from memscale.techniques.offload.activations.offloader import Offloader

SELECTIVE_OFFLOAD = Treatment("selective", offloads=True)
_ASKED_FOR = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadKept(LayerAction):
    """What a selective checkpoint keeps of this layer waits on the next tier until the layer is computed again."""

    module_fqn: str
    reason: Reason = _ASKED_FOR


def _attach(actions: Sequence[OffloadKept], to: Attachment) -> None:
    """Attach after checkpoints and after the offload of activations, whose tier and statistics are shared."""
    from memscale.techniques.offload.activations import offloader

    if "activations" not in to.users:
        to.users["activations"] = offloader.attach((), to.model, to.device, to.undo, transfers=to.open_tier())
    forwards = {forward.module_fqn: forward for forward in to.recomputed}
    for action in actions:
        forward = forwards.get(action.module_fqn)
        if forward is None or not hasattr(forward, "make_contexts"):
            raise PlanError(f"{action.module_fqn} is not checkpointed, so it keeps no outputs that could be offloaded")
        forward.make_contexts = functools.partial(_make_contexts, to.users["activations"])


def _make_contexts(offloader: Offloader, policy: Any) -> tuple[Any, Any]:
    """Return the two contexts of one call of a block: one keeps its outputs, the other reads them again."""
    from memscale._torch.each_operator import EachOperator

    outputs = _KeptOutputs(offloader, policy)
    return EachOperator(outputs.keep), EachOperator(outputs.read)


class _KeptOutputs:
    """The kept outputs of one call of a block, by operator and the number of its earlier calls. Each is read once."""

    def __init__(self, offloader: Offloader, policy: Any) -> None:
        from torch.utils.checkpoint import SAC_IGNORED_OPS

        from memscale._torch.private import run_below_mode

        self._run = run_below_mode
        self.offloader = offloader
        self.policy = policy
        self._ignored = SAC_IGNORED_OPS
        self._packed: dict[tuple[Any, int], Any] = {}
        """What waits, by operator and call; None for an output that is computed again."""
        self._num_kept: collections.Counter[Any] = collections.Counter()
        self._num_read: collections.Counter[Any] = collections.Counter()

    def keep(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In forward."""
        from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

        output = self._run(op, args, kwargs)
        if op not in self._ignored:
            context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
            is_kept = self.policy(context, op, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
            if self.policy.may_keep(op):
                self._packed[op, self._num_kept[op]] = self._pack(output) if is_kept else None
                self._num_kept[op] += 1
        return output

    def read(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the recompute, which calls the operators that may be kept in the same order."""
        if op in self._ignored or not self.policy.may_keep(op):
            return self._run(op, args, kwargs)
        key = op, self._num_read[op]
        self._num_read[op] += 1
        if key not in self._packed:
            raise RuntimeError(f"{self.policy.module_fqn} calls {op} more often in its recompute than in its forward")
        packed, self._packed[key] = self._packed[key], None
        return self._run(op, args, kwargs) if packed is None else self._unpack(packed)

    def _pack(self, output: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, lambda tensor: self.offloader.pack(tensor, frozenset()), output)

    def _unpack(self, packed: Any) -> Any:
        from torch.utils._pytree import tree_map

        return tree_map(self.offloader.unpack, packed)


KEPT_OUTPUTS = Technique(
    name="offload of kept outputs",
    family="offload of kept outputs",
    switch="enable_kept_offload",
    actions=(OffloadKept,),
    scope="block",
    travels=True,
    hindrance=no_next_tier,
    refusal=no_tier_for_plan,
    treatments=(
        Treated(
            SELECTIVE_OFFLOAD,
            (Checkpoint("", keep=("matmul", "attention")), OffloadActivations(""), OffloadKept("")),
        ),
    ),
    traits=lambda action: {"offloads": True},
    attach=_attach,
    place=90,
    words=lambda action: "offload kept outputs",
    beside="kept outputs offloaded",
    begins=("offload kept outputs",),
    outcome=lambda actions: f"what selective checkpoints keep of {len(actions)} blocks",
    outcome_rank=60,
)
