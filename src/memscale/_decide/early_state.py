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

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel, Walk
from memscale._decide.search import Candidate
from memscale._decide.spaced import thinned

_MAX_BASES = 256
"""How many plans that the search has found are tried with state that comes early."""
_PARTS = (0.25, 0.5, 0.75)
"""The parts of backward's blocks beside which it comes, the last ones."""
_SHARES = (0.5, 1.0)
"""How much of what would be of use comes where it raises the peak."""
_LEAST_BYTES = 1 << 20


def early_candidates(model: CostModel, bases: Sequence[Choice]) -> Iterator[Candidate]:
    """Some of these choices, with state that comes early."""
    order, hardware = model.nested_order(), model.hardware
    can_travel = model.pace.overlaps and hardware.link_directions > 1 and hardware.has_caching_allocator
    if order is None or not can_travel or model.is_compiled:
        return
    for base in thinned(bases, _MAX_BASES):
        useful_bytes = model.optimizer.arriving_surplus(base.run, model.streamed_bytes(base))
        if useful_bytes < _LEAST_BYTES:
            continue
        walk = model.walk(base)
        for part in _PARTS:
            blocks = order[: max(1, round(part * len(order)))][::-1]  # as backward comes to them
            free_bytes = min(useful_bytes, room_for_early(model, base, walk, blocks))
            for num_bytes in sorted({free_bytes, *(round(share * useful_bytes) for share in _SHARES)}):
                each = num_bytes // len(blocks)
                if num_bytes >= max(_LEAST_BYTES, free_bytes) and each:
                    choice = base.with_run(early_state=tuple((fqn, each) for fqn in blocks))
                    yield Candidate(choice, model.with_early(walk, choice, base.run))


def room_for_early(model: CostModel, base: Choice, walk: Walk, module_fqns: Sequence[str]) -> int:
    """How much state can come early, as much before each of these blocks, without a higher peak than the base has."""
    in_step = walk.live_bytes + model.optimizer.costs_of(base.run, walk.extras.streamed_bytes).step_bytes
    peak_bytes = max(walk.peak_bytes, in_step)
    room_bytes = peak_bytes - in_step
    run = dataclasses.replace(base.run, early_state=tuple((fqn, 1) for fqn in module_fqns))
    for height, num_asked in zip(walk.heights, itertools.accumulate(model.early_bytes_by_stretch(run)), strict=True):
        if num_asked:
            room_bytes = min(room_bytes, (peak_bytes - height) * len(module_fqns) // num_asked)
    return max(0, room_bytes)
