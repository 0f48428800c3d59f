"""Blocks whose activations wait elsewhere, so far apart that the link has time for each of them. No torch.

NOTE [far apart]: what a block saves may take longer to leave than the block computes. If the blocks behind it send
nothing, it leaves beside their compute, and comes back beside their backward: then it costs no time, where computing it
again would. That takes windows as large as what one block saves, which stays in the window until the next block's
activations take its place, and a way of treating the blocks that the search does not find: it puts equal treatments
side by side, and counts with each block what that block sends. So plans that the search has found are tried again with
some of their blocks replaced, every so many, and timed by walking through the step with the clock of the link
(`spaced_ms`). Nothing here depends on the device's budget.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memscale._config import AsyncOffloadConfig
from memscale._decide.choice import Choice, RunOptions
from memscale._profile import OFFLOAD

if TYPE_CHECKING:
    from memscale._decide.cost_model import CostModel

MAX_BASES, MAX_FULL_BASES = 16, 96
"""How many plans that the search has found are tried with blocks replaced in all numbers; and how many with as
many as the link has time for."""
_KEPT_BYTES = AsyncOffloadConfig().window_bytes
"""The largest window that is kept to the end of a step. See NOTE [the window in backward]."""
_MAX_NUMBERS = 6
"""How many numbers of blocks are tried with each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What a block sends away in forward, and how long its two passes take if they wait for no transfer."""

    num_bytes: int
    forward_ms: float
    backward_ms: float


def spaced_ms(model: CostModel, choice: Choice, sent: dict[str, Sent], stretch_ms: Sequence[float]) -> float:
    """Forward and backward, with the link beside them; `sent` are the blocks that send their activations away.

    `stretch_ms` is what each stretch of the step takes by itself. What an offloaded block has saved leaves behind its
    forward. Of what is in the window then, the oldest is waited for. The last block's activations are still there when
    backward begins; those of each other block are asked for when the one behind it is done.
    """
    streamed = {fqn: model.blocks[fqn].param_bytes for fqn, treatment in choice.blocks if treatment.streams}
    link_ms, turn = model.pace.link_ms, model.first_backward()
    now = leaves = comes = asked = 0.0
    window: collections.deque[tuple[int, float]] = collections.deque()
    gone: dict[str, float] = {}
    for index, owner in enumerate(model.owners[:turn]):
        now += sent[owner].forward_ms if owner in sent else stretch_ms[index]
        if owner in sent:
            while window and sum(size for size, _ in window) + sent[owner].num_bytes > model.window_bytes:
                now = max(now, window.popleft()[1])
            gone[owner] = leaves = max(now, leaves) + float(link_ms(sent[owner].num_bytes))
            window.append((sent[owner].num_bytes, leaves))
    is_last = True
    for index, owner in enumerate(model.owners[turn:], start=turn):
        if owner not in sent:
            now += stretch_ms[index]
            comes = max(comes, now) + float(link_ms(streamed[owner])) if owner in streamed else comes
            continue
        if not is_last:
            comes = max(comes, asked, gone[owner]) + float(link_ms(sent[owner].num_bytes))
            now = max(now, comes)
        asked = now if is_last else now + sent[owner].backward_ms
        now += sent[owner].backward_ms
        is_last = False
    return max(now, leaves)


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
        patterns = _patterns(len(free), _distance(model, [sent[fqn] for fqn in free]))
        for places in patterns if id(base) in few else patterns[:2]:
            replaced = {**treated, **{free[place]: OFFLOAD for place in places}}
            yield Choice(tuple((fqn, replaced[fqn]) for fqn in model.blocks if fqn in replaced), base.run)


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


def held_bytes(model: CostModel, run: RunOptions, offloaded: Sequence[str]) -> dict[int, int]:
    """What is held by stretch, beside what the stretches of blocks in the trace of all blocks show; it may be less.

    NOTE [the window in backward]: the first block that sends fills the window. One of the default size then holds as
    much until the step ends. In wider ones, what was sent last is used from the window, and the next is fetched ahead
    beside it; it is let go of when backward has waited for the first block whose activations had left. From then on as
    much is fetched ahead, until the backward of the first block that sends. In the trace of all blocks these are the
    first, the last, and the one as many before it as the window has room for; in a choice they are others.
    """
    if not offloaded:
        return {}
    sent, end = model.sent_by_blocks(run), len(model.owners)
    window = min(model.window_bytes, sum(sent[fqn].num_bytes for fqn in offloaded))
    mine, traced = (sorted(model.places(fqn) for fqn in fqns) for fqns in (offloaded, sent))
    room = model.window_bytes // max(one.num_bytes for one in sent.values()) if model.window_bytes > _KEPT_BYTES else 0
    held = [0] * end
    if mine[0] != traced[0]:
        _raise(held, mine[0][0], mine[0][1] + 1 if room else end, window)
    if 0 < room < len(traced):
        last, leaver = traced[-1], traced[-1 - room]
        _raise(held, last[1] + 1, end, -window if last in mine else 0)
        _raise(held, leaver[1] + 1, end, window if leaver in mine else 0)
        if len(mine) > room:
            _raise(held, mine[-1][1] + (mine[-1] == last), mine[-1 - room][1] + 1, window)
        else:  # nothing has left, so nothing is waited for
            _raise(held, mine[0][1] + 1, end, window)
    return {index: num_bytes for index, num_bytes in enumerate(held) if num_bytes}


def _raise(held: list[int], begin: int, end: int, num_bytes: int) -> None:
    for index in range(begin, end):
        held[index] += num_bytes
