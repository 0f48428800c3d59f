"""The third round of odd programs: what leads out of plain code through PyTorch, and what loops keep beside a model."""

from __future__ import annotations

from typing import Any

import pytest

from tests._planning.recovery.fresh_programs import PROGRAMS
from tests._planning.recovery.sessions import cases, is_explained, refusal_unless_exact

FAILING = {"forward": 9, "backward": 5}
"""Which allocation of the last step fails."""
REPEATED = {
    ("average_over_all_batches", "backward"),
    ("copy_made_in_every_step", "backward"),
    ("draws_in_the_forward_and_in_the_loop", "backward"),
    ("frozen_layers", "backward"),
    ("loss_asked_after_its_backward", "backward"),
    ("mixed_batches", "forward"),
    ("output_doubled_in_place", "forward"),
    ("scaler_of_the_loop", "forward"),
}
"""Those that many train like."""
QUICK = {
    ("dropout_toggled_by_the_forward", "backward"),
    ("environment_through_pytorch", "forward"),
    ("gradients_dropped_by_the_forward", "backward"),
    ("operator_that_is_a_method_of_a_list", "backward"),
    ("scaler_of_the_loop", "forward"),
}
"""What `make test` runs: one for each rule that is held by nothing else."""
UNSEEN = {"output_that_is_a_view_changed_in_place"}
"""Its loss does not lead to what the model returned: the error is PyTorch's own."""


@pytest.mark.parametrize(("name", "fails_in"), cases(PROGRAMS, QUICK))
def test_no_fresh_program_is_trained_wrongly_in_silence(name: str, fails_in: str, simgpu_device: Any) -> None:
    said = refusal_unless_exact(PROGRAMS[name], fails_in, FAILING[fails_in])
    if said is not None:
        assert name in UNSEEN or is_explained(said), said
        assert (name, fails_in) not in REPEATED, said
