"""The second round of odd programs: a step in their middle fails, and is repeated bit for bit or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests._planning.recovery.later_programs import PROGRAMS
from tests._planning.recovery.sessions import is_same, ran

FAILING = {"forward": 9, "backward": 9}
"""Which allocation of the third step fails: some gradients have come by then."""
REPEATED = {
    ("gpt2_under_autocast", "forward"),
    ("gpt2_with_dropout", "backward"),
    ("gpt2_with_low_rank_parts", "backward"),
    ("llama", "backward"),
    ("recurrent_layers", "backward"),
    ("attention_with_norms", "forward"),
    ("convolutions_in_place", "backward"),
    ("twice_in_one_step", "forward"),
    ("batches_of_several_sizes", "backward"),
    ("refused_batch_in_halves", "forward"),
    ("gradients_set_to_zero", "backward"),
}
"""Those that many train like, and those in which the repetition once broke something else."""
QUICK = {
    ("flat_gradients", "backward"),
    ("unfrozen_between", "backward"),
    ("twice_under_one_autocast", "forward"),
    ("twice_in_one_step", "forward"),
    ("refused_batch_in_halves", "forward"),
    ("products_seen_in_the_backward", "backward"),
    ("one_class_body_with_two_closures", "forward"),
    ("list_on_a_layer", "backward"),
    ("list_on_a_parameter", "backward"),
    ("gradients_set_to_zero", "backward"),
}
"""What `make test` runs: those that were wrong once, or whose rule stands alone."""
UNSEEN = {"evaluated_between_forward_and_backward", "forward_ahead_of_the_backward"}
"""Another forward ran before their backward, which is not that of the latest step: the error is PyTorch's own."""


def _cases() -> list[Any]:
    pairs = [(name, where) for name in sorted(PROGRAMS) for where in sorted(FAILING)]
    return [pytest.param(*pair, marks=() if pair in QUICK else (pytest.mark.full,)) for pair in pairs]


@pytest.mark.parametrize(("name", "fails_in"), _cases())
def test_no_later_program_is_trained_wrongly_in_silence(name: str, fails_in: str, simgpu_device: Any) -> None:
    expected, weights, _, _ = ran(PROGRAMS[name], None, 0)
    found, weights_now, said, _ = ran(PROGRAMS[name], fails_in, FAILING[fails_in], failing_step=2)
    if said is None:
        assert is_same(found, expected)
        assert is_same(weights_now, weights)
    else:
        assert name in UNSEEN or f"is not run again after this failure in {fails_in}: " in said
        assert (name, fails_in) not in REPEATED, said
