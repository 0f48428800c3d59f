"""Blocks whose activations wait elsewhere, so far apart that the link has time for each of them. No torch.

NOTE [far apart]: what a block saves may take longer to leave than the block computes. If the blocks behind it send
nothing, it leaves beside their compute, and comes back beside their backward: then it costs no time, where computing it
again would. That takes windows as large as what one block saves, which stays in the window until the next block's
activations take its place, and a way of treating the blocks that the search does not find: it puts equal treatments
side by side, and counts with each block what that block sends. So plans that the search has found are tried again with
some of their blocks replaced, every so many, and timed by walking through the step with the clock of the link
(`link_clock.py`). Where blocks are streamed, both are tried: blocks that send theirs away among those that are not
streamed, and among all (NOTE [among streamed blocks]). Nothing here depends on the device's budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.link_clock import Sent
from memscale._profile import KEEP, OFFLOAD, Treatment

MAX_BASES, MAX_FULL_BASES = 16, 96
"""How many plans that the search has found are tried with blocks replaced in all numbers; and how many with as
many as the link has time for."""
_MAX_NUMBERS = 6
"""How many numbers of blocks are tried with each."""


def spaced_choices(model: CostModel, bases: Sequence[Choice]) -> Iterator[Choice]:
    """Some of these choices with blocks replaced, as far apart as the link needs, and twice that; early ones, or late
    ones. Late ones come back before most gradients are there."""
    few = {id(base) for base in thinned(bases, MAX_BASES)}
    for base in thinned(bases, MAX_FULL_BASES):
        sent = model.sent_by_blocks(base.run)
        treated = dict(base.blocks)
        free = [fqn for fqn in sent if not (fqn in treated and (treated[fqn].streams or treated[fqn].offloads))]
        if len(free) < 2 or max(one.num_bytes for one in sent.values()) > model.window_bytes:
            continue
        is_full = id(base) in few
        distance = _distance(model, [sent[fqn] for fqn in free])
        patterns = _patterns(len(free), distance)
        for places in patterns if is_full else patterns[:2]:
            yield _in_order(model, {**treated, **{free[place]: OFFLOAD for place in places}}, base.run)
        if len(free) < len(sent):
            patterns = [places for places in _patterns(len(sent), distance) if len(places) <= len(free)]
            for places in patterns if is_full else patterns[:2]:
                yield _in_order(model, {**treated, **_among_others(list(sent), free, treated, places)}, base.run)


def _in_order(model: CostModel, treated: Mapping[str, Treatment], run: RunOptions) -> Choice:
    return Choice(tuple((fqn, treated[fqn]) for fqn in model.blocks if treated.get(fqn, KEEP) != KEEP), run)


def _among_others(
    blocks: Sequence[str], free: Sequence[str], treated: Mapping[str, Treatment], places: Sequence[int]
) -> dict[str, Treatment]:
    """The blocks in these places send theirs away, in place of as many free ones; the other treatments move up.

    NOTE [among streamed blocks]: the search puts those that are streamed side by side. Nothing leaves in their forward,
    so what blocks between them send has time to leave there, too. Of the free blocks those that are computed again
    make way first: they are what takes time.
    """
    dearest = sorted(free, key=lambda fqn: treated.get(fqn, KEEP).recompute == "none")
    dropped, chosen = set(dearest[: len(places)]), set(places)
    others = iter([treated.get(fqn, KEEP) for fqn in blocks if fqn not in dropped])
    return {fqn: OFFLOAD if place in chosen else next(others) for place, fqn in enumerate(blocks)}


def _distance(model: CostModel, sent: Sequence[Sent]) -> int:
    """The number of blocks whose forward takes as long as what one of them sends."""
    link_ms = float(model.pace.link_ms(sum(one.num_bytes for one in sent)))
    return max(1, math.ceil(link_ms / max(1e-9, sum(one.forward_ms for one in sent))))


def _patterns(length: int, distance: int) -> list[tuple[int, ...]]:
    """Places of blocks, the most first; at least two of them: one alone would be in the window all the time."""
    found = []
    for step in (distance, 2 * distance):
        early = range(0, length, step)
        late = [length - 1 - place for place in early]
        numbers = range(len(early), 1, -1)
        for number in numbers[:: max(1, math.ceil(len(numbers) / _MAX_NUMBERS))]:
            found += [tuple(early[:number]), tuple(sorted(late[:number]))]
    return list(dict.fromkeys(found))


def thinned(choices: Sequence[Choice], most: int) -> list[Choice]:
    """At most so many of them, evenly, with both ends."""
    last = len(choices) - 1
    places = range(last + 1) if last < most else sorted({round(last * number / (most - 1)) for number in range(most)})
    return [choices[place] for place in places]
