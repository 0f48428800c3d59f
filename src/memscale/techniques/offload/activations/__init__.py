"""Activation offload (exact): what a block keeps for backward waits on the next tier until it is needed.

A block that is recomputed in full keeps its input alone, so only the input waits there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memscale._plan import Checkpoint, OffloadActivations
from memscale._profile import CHECKPOINT_OFFLOAD, OFFLOAD
from memscale.techniques.offload.next_tier import no_next_tier, no_tier_for_plan
from memscale.techniques.technique import Technique, Treated

if TYPE_CHECKING:
    from memscale._execute.attachment import Attachment


def _attach(actions: Sequence[OffloadActivations], to: Attachment) -> None:
    from memscale.techniques.offload.activations.offloader import attach

    to.users["activations"] = attach(
        actions,
        to.model,
        to.device,
        to.undo,
        transfers=to.open_tier(),
        min_tensor_bytes=to.settings.async_config.min_tensor_bytes,
        prefetch_bytes=to.settings.async_config.prefetch_bytes,
    )


ACTIVATIONS = Technique(
    name="activation offload",
    family="offloading",
    switch="enable_offloading",
    actions=(OffloadActivations,),
    scope="block",
    travels=True,
    hindrance=no_next_tier,
    refusal=no_tier_for_plan,
    treatments=(
        Treated(OFFLOAD, (OffloadActivations(""),)),
        Treated(CHECKPOINT_OFFLOAD, (Checkpoint(""), OffloadActivations(""))),
    ),
    traits=lambda action: {"offloads": True},
    attach=_attach,
    place=80,
    words=lambda action: "offload activations",
    beside="input offloaded",
    begins=("offload activations",),
    outcome=lambda actions: f"the activations of {len(actions)} blocks",
    outcome_rank=31,
)
