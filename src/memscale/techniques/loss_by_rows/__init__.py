"""The backward of a large cross-entropy by rows (exact): its gradients never exist whole beside the log-probabilities.

Three tensors as large as the logits live at once in autograd's backward of a cross-entropy: log-probabilities, their
gradient, and the gradient of the logits. Here there is one, and two chunks of some rows (`cross_entropy.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memscale._plan import Action, Reason, check_count
from memscale._profile import Profile, TraceKey
from memscale.techniques.technique import RunOption, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials

CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes of rows whose gradients are made at once. PyTorch's allocator finds room for two such chunks in one segment."""
_ASKED_FOR = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class LossByRows(Action):
    """The gradients of a cross-entropy are made some rows at a time."""

    chunk_bytes: int
    """Bytes of rows at once, and at least sixteen rows; a smaller cross-entropy is left as it is."""
    reason: Reason = _ASKED_FOR

    def __post_init__(self) -> None:
        check_count(self, "chunk_bytes", minimum=1)


def _attach(actions: Sequence[LossByRows], to: Attachment) -> None:
    from memscale.techniques.loss_by_rows.attaching import attach_rows

    to.begun.append(attach_rows(to.model, actions[-1].chunk_bytes, to.undo))


def _values(traced: Traced, eligible: Eligible) -> tuple[bool, ...]:
    return (True,) if TraceKey(loss_by_rows=True) in traced.sizes else ()


def _actions(is_by_rows: bool, profile: Profile) -> Iterator[LossByRows]:
    yield LossByRows(CHUNK_BYTES)


def _value(actions: Sequence[LossByRows], profile: Profile) -> bool:
    return True


def _reason(chosen: Chosen) -> Reason:
    rule = "the loss by rows: two of three tensors as large as the logits are not made in its backward"
    return Reason(rule, chosen.part(loss_by_rows=False))


def _rehearse(trials: Trials, eligible: Eligible) -> None:
    """Where the loss gains nothing, the step is as it was, and nothing else is tried."""
    if trials.is_compiled:  # the compiler would trace through what must run at every step
        return
    by_rows = (LossByRows(CHUNK_BYTES),)
    if not trials.gains(TraceKey(loss_by_rows=True), by_rows, eligible):
        return
    rest = trials.rest_actions()
    if rest:
        trials.try_variants({TraceKey(streams_rest=True, loss_by_rows=True): (*by_rows, *rest)}, eligible)


LOSS_BY_ROWS = Technique(
    name="loss by rows",
    family="loss by rows",
    switch="enable_loss_by_rows",
    actions=(LossByRows,),
    scope="run",
    option=RunOption(field="loss_by_rows", values=_values, actions=_actions, value=_value),
    rehearse=_rehearse,
    attach=_attach,
    place=22,
    words=lambda action: "loss by rows",
    outcome=lambda actions: "gradients of the loss are made some rows at a time",
    outcome_rank=22,
    reason=_reason,
)
