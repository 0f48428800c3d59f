"""Gradient checkpointing (exact): a block's activations are dropped after forward and recomputed in backward.

In full, or selectively: then outputs of matrix products and attention, which are dear to compute, are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memscale._plan import Checkpoint
from memscale._profile import CHECKPOINT, SELECTIVE
from memscale.techniques.technique import Technique, Treated

if TYPE_CHECKING:
    from memscale._execute.attachment import Attachment

KEPT: Checkpoint = Checkpoint("", keep=("matmul", "attention"))


def _attach(actions: Sequence[Checkpoint], to: Attachment) -> None:
    from memscale.techniques.checkpointing.checkpointed_forward import attach

    for action in actions:
        to.recomputed.append(attach(action, to.find_module(action), to.undo, verify=to.settings.verify))


def _traits(action: Checkpoint) -> dict[str, Any]:
    return {"recompute": "selective" if action.keep else "full"}


def _words(action: Checkpoint) -> str:
    return "checkpoint (selective)" if action.keep else "checkpoint"


CHECKPOINTING = Technique(
    name="checkpointing",
    family="checkpointing",
    switch="enable_checkpointing",
    actions=(Checkpoint,),
    scope="block",
    treatments=(Treated(SELECTIVE, (KEPT,)), Treated(CHECKPOINT, (Checkpoint(""),))),
    traits=_traits,
    recomputes=True,
    attach=_attach,
    place=30,
    words=_words,
    begins=("checkpoint (selective)", "checkpoint"),
    outcome=lambda actions: f"{len(actions)} blocks recomputed in backward",
    outcome_rank=10,
)
