"""The clock of the link: how long a step takes whose blocks send activations away one by one. No torch.

See NOTE [far apart] in `spaced.py`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from memscale._config import AsyncOffloadConfig
from memscale._decide.step_time import Pace

KEPT_WINDOW_BYTES = AsyncOffloadConfig().window_bytes
"""The largest window that is kept to the end of a step. See NOTE [the window in backward]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What a block sends away in forward, and how long its two passes take if they wait for no transfer."""

    num_bytes: int
    forward_ms: float
    backward_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """A step as stretches, one after the other: each is a block's, or lies between them ("")."""

    owners: Sequence[str]
    first_backward: int
    """The place of the first stretch of backward."""
    stretch_ms: Sequence[float]
    """What each takes by itself."""


def spaced_ms(course: Course, sent: dict[str, Sent], streamed: dict[str, int], pace: Pace, window_bytes: int) -> float:
    """Forward and backward, with the link beside them; `sent` are the blocks that send their activations away, and
    `streamed` are the bytes of the weights that travel.

    What an offloaded block has saved leaves behind its
    forward. Of what is in the window then, the oldest is waited for. The last block's activations are still there when
    backward begins; those of each other block are asked for when the one behind it is done.
    """
    link_ms, turn, stretch_ms = pace.link_ms, course.first_backward, course.stretch_ms
    now = leaves = comes = asked = 0.0
    window: collections.deque[tuple[int, float]] = collections.deque()
    gone: dict[str, float] = {}
    for index, owner in enumerate(course.owners[:turn]):
        now += sent[owner].forward_ms if owner in sent else stretch_ms[index]
        if owner in sent:
            while window and sum(size for size, _ in window) + sent[owner].num_bytes > window_bytes:
                now = max(now, window.popleft()[1])
            gone[owner] = leaves = max(now, leaves) + float(link_ms(sent[owner].num_bytes))
            window.append((sent[owner].num_bytes, leaves))
    is_last = True
    for index, owner in enumerate(course.owners[turn:], start=turn):
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


def held_bytes(owners: Sequence[str], sent: dict[str, Sent], offloaded: Sequence[str], window_bytes: int) -> list[int]:
    """What is held in each stretch, beside what it shows in the trace of all blocks; it may be less.

    NOTE [the window in backward]: the first block that sends fills the window. One of the default size then holds as
    much until the step ends. In wider ones, what was sent last is used from the window, and the next is fetched ahead
    beside it; it is let go of when backward has waited for the first block whose activations had left. From then on as
    much is fetched ahead, until the backward of the first block that sends. In the trace of all blocks these are the
    first, the last, and the one as many before it as the window has room for; in a choice they are others.
    """
    end = len(owners)
    held = [0] * end
    if not offloaded:
        return held
    places: dict[str, tuple[int, int]] = {}
    for index, owner in enumerate(owners):
        if owner in sent:
            places[owner] = (places.get(owner, (index,))[0], index)
    mine, traced = (sorted(places[fqn] for fqn in fqns) for fqns in (offloaded, sent))
    window = min(window_bytes, sum(sent[fqn].num_bytes for fqn in offloaded))
    room = window_bytes // max(one.num_bytes for one in sent.values()) if window_bytes > KEPT_WINDOW_BYTES else 0
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
    return held


def _raise(held: list[int], begin: int, end: int, num_bytes: int) -> None:
    for index in range(begin, end):
        held[index] += num_bytes
