"""The fourth round of odd programs: what is odd in them shows in gradients alone, and no output tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests._planning.recovery.gated_programs import PROGRAMS
from tests._planning.recovery.sessions import cases, is_explained, refusal_unless_exact

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""Of torch.compile."""
FAILING = {"forward": 9, "backward": 9}
"""Which allocation of the third step fails."""
REPEATED = {
    ("average_of_activations", "backward"),
    ("averages_swapped_in_between_and_out_again", "backward"),
    ("checkpointed_part_behind_the_gate", "backward"),
    ("hooks_of_an_optimizer", "backward"),
    ("low_rank_parts_at_first", "forward"),
    ("noise_of_every_kind", "backward"),
    ("random_depth", "backward"),
    ("random_numbers_between", "backward"),
    ("spectral_norm_behind_the_gate", "backward"),
}
"""Those that many train like."""
QUICK = {
    ("attention_chosen_around_the_forward", "backward"),
    ("averages_swapped_in_between", "backward"),
    ("device_of_checkpoints_as_a_memory", "forward"),
    ("host_batch_that_is_filled_again", "backward"),
    ("noise_of_every_kind", "backward"),
    ("output_written_past_autograd", "backward"),
    ("text_of_a_part_by_a_method_of_c", "backward"),
}
"""What `make test` runs: one for each rule that is held by nothing else."""


@pytest.mark.parametrize(("name", "fails_in"), cases(PROGRAMS, QUICK))
def test_what_no_output_tells_is_trained_as_it_was(name: str, fails_in: str, simgpu_device: Any) -> None:
    said = refusal_unless_exact(PROGRAMS[name], fails_in, FAILING[fails_in], failing_step=2)
    if said is not None:
        assert is_explained(said), said
        assert (name, fails_in) not in REPEATED, said
