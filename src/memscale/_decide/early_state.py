"""Plans whose optimizer finds a part of its state on the device: it came back under the end of backward. No torch.

NOTE [under backward]: in the optimizer's step state comes and goes, and streamed parameters come with their gradients
and leave without, so that more comes than leaves. What comes beside backward instead shortens the step until as much
leaves as comes, and is there from then to the step, where parameters, gradients and temporaries are, too. It is asked
for a little before each of the last blocks of backward: what these blocks wait for themselves is on the same link, and
comes between. So plans that the search has found are tried again with as much of the state early as there is room for
below the peak that they have anyway, and with more, over the last blocks of backward, fewer of them or all. Nothing
here depends on the device's budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.spaced import thinned

_MAX_BASES = 48
"""How many plans that the search has found are tried with state that comes early."""
_PARTS = (0.25, 0.5, 0.75)
"""The parts of backward's blocks beside which it comes, the last ones."""
_SHARES = (0.5, 1.0)
"""How much of what would be of use comes where it raises the peak."""
_LEAST_BYTES = 1 << 20


def early_choices(model: CostModel, bases: Sequence[Choice]) -> Iterator[Choice]:
    """Some of these choices, with state that comes early."""
    order = model.nested_order()
    hardware = model.hardware
    if order is None or not model.pace.overlaps or hardware.link_directions < 2 or not hardware.has_caching_allocator:
        return
    for base in thinned(bases, _MAX_BASES):
        useful_bytes = model.optimizer.arriving_surplus(base.run, model.streamed_bytes(base))
        if useful_bytes < _LEAST_BYTES:
            continue
        for part in _PARTS:
            blocks = order[: max(1, round(part * len(order)))][::-1]  # as backward comes to them
            free_bytes = min(useful_bytes, model.room_for_early(base, blocks))
            for num_bytes in {free_bytes, *(round(share * useful_bytes) for share in _SHARES)}:
                each = num_bytes // len(blocks)
                if num_bytes >= max(_LEAST_BYTES, free_bytes) and each:
                    yield base.with_run(early_state=tuple((fqn, each) for fqn in blocks))
