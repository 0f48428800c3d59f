"""Plans whose optimizer finds a part of its state on the device, and leaves a part of it there. No torch.

State comes back under the end of backward, and leaves under the beginning of the next forward.

NOTE [under backward]: in the optimizer's step state comes and goes, and streamed parameters come with their gradients
and leave without, so that more comes than leaves. What comes beside backward instead shortens the step until as much
leaves as comes, and is there from then to the step, where parameters, gradients and temporaries are, too. It is asked
for a little before each of the last blocks of backward: what these blocks wait for themselves is on the same link, and
comes between. So plans that the search has found are tried again with as much of the state early as there is room for
below the peak that they have anyway, and with more, over the last blocks of backward, fewer of them or all. Nothing
here depends on the device's budget.

NOTE [under the next forward]: where as much leaves in the step as comes, which is so wherever state alone travels, both
must be shortened: state that came early saves nothing unless as much leaves when the step is over. It is there until
the first blocks of the next forward let go of it, one by one, where gradients are gone and activations are not made
yet; what these blocks send themselves is on the same link. State of streamed parameters does not leave late: their
values must be at home when the step ends. In the step, what came early is gone before the last is late, so the larger
of the two is there.
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
_MAX_LATE_BASES = 48
"""How many are tried with state that comes early and leaves late."""
_LATE_PARTS = (0.25, 0.5, 1.0)
"""The parts of the blocks beside which it does: the last of backward, and the first of the next forward."""
_LEAST_BYTES = 1 << 20


def early_candidates(model: CostModel, bases: Sequence[Choice]) -> Iterator[Candidate]:
    """Some of these choices, with state that comes early."""
    order = _order_of(model)
    if order is None:
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
                    yield Candidate(choice, model.with_state_beside(walk, choice, base.run))


def _order_of(model: CostModel) -> tuple[str, ...] | None:
    """The blocks in the order of forward, where there are some, and state can travel beside the passes; else None."""
    hardware = model.hardware
    can_travel = model.pace.overlaps and hardware.link_directions > 1 and hardware.has_caching_allocator
    return model.nested_order() or None if can_travel and not model.is_compiled else None


def late_candidates(model: CostModel, bases: Sequence[Choice]) -> Iterator[Candidate]:
    """Some of these choices, with state that comes early and state that leaves late: as much as there is room for below
    the peak that they have anyway, and half and all of it. See NOTE [under the next forward]."""
    order = _order_of(model)
    if order is None:
        return
    travelling = [base for base in bases if base.run.offloads_optimizer]
    in_time = model.time_for_late, model.time_for_early
    for base in thinned(travelling, _MAX_LATE_BASES):
        streamed_bytes = model.streamed_bytes(base)
        surplus_bytes = model.optimizer.arriving_surplus(base.run, streamed_bytes)
        most_bytes, turn_bytes = model.optimizer.may_be_late(base.run, streamed_bytes)
        if not turn_bytes:
            continue
        walk = model.walk(base)
        found = dict[tuple[int, int, int], None]()
        for part in _LATE_PARTS:
            num_blocks = max(1, round(part * len(order)))
            first = order[:num_blocks]
            early_room = room_for_early(model, base, walk, first) - num_blocks
            late_room = min(room_for_late(model, base, walk, first) - num_blocks, most_bytes)
            late_time, early_time = (hidden(walk, base, frozenset(first)) for hidden in in_time)
            for room_bytes in (late_room, most_bytes // 2, most_bytes):
                late_bytes = min(room_bytes, late_time) // turn_bytes * turn_bytes
                early_bytes = max(0, min(surplus_bytes + late_bytes, early_time))
                found[num_blocks, early_bytes, late_bytes] = None
                held_bytes = max(0, min(early_room, early_bytes))
                less_bytes = min(late_bytes, held_bytes - surplus_bytes) // turn_bytes * turn_bytes
                found[num_blocks, held_bytes, less_bytes] = None
        for num_blocks, early_bytes, late_bytes in found:
            choice = _with_both(base, order[:num_blocks], early_bytes, late_bytes)
            if choice is not None:
                yield Candidate(choice, model.with_state_beside(walk, choice, base.run))


def _with_both(base: Choice, blocks: Sequence[str], early_bytes: int, late_bytes: int) -> Choice | None:
    """The choice with so much early and late, as much at each of these blocks; None where nothing is late."""
    early, late = -(-early_bytes // len(blocks)), -(-late_bytes // len(blocks))
    if late <= 0:
        return None
    return base.with_run(
        early_state=tuple((fqn, early) for fqn in reversed(blocks)) if early else (),
        late_state=tuple((fqn, late) for fqn in blocks),
    )


def room_for_late(model: CostModel, base: Choice, walk: Walk, module_fqns: Sequence[str]) -> int:
    """How much state can leave late, let go of alike before each of these blocks, without a higher peak than the base
    has."""
    in_step = walk.live_bytes + model.optimizer.costs_of(base.run, walk.extras.streamed_bytes).step_bytes
    peak_bytes = max(walk.peak_bytes, in_step)
    room_bytes, num_blocks = peak_bytes - in_step, len(module_fqns)
    run = dataclasses.replace(base.run, late_state=tuple((fqn, 1) for fqn in module_fqns))
    for height, num_left in zip(walk.heights, model.late_bytes_by_stretch(run), strict=True):
        if num_left:
            room_bytes = min(room_bytes, (peak_bytes - height) * num_blocks // num_left)
    return max(0, room_bytes)


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
