"""The clock of the link: how long a step takes whose blocks send activations away one by one. No torch.

See NOTE [far apart] in `spaced.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Sequence

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

    What an offloaded block has saved leaves behind its forward. Of what is in the window then, the oldest is waited
    for. What comes back does so one after the other, in the order in which it is asked for: see `_backward_ms`.
    """
    now, gone = _forward_ms(course, sent, pace, window_bytes)
    back = list(course.owners[course.first_backward :])
    arriving = {fqn: float(pace.link_ms(one.num_bytes)) for fqn, one in sent.items()}
    arriving |= {fqn: float(pace.link_ms(num_bytes)) for fqn, num_bytes in streamed.items()}
    queue = _Queue(arriving, gone, {**_followed(back, sent), **_followed(back, streamed)})
    return max(_backward_ms(course, now, sent, streamed, queue), max(gone.values(), default=0.0))


def _forward_ms(course: Course, sent: dict[str, Sent], pace: Pace, window_bytes: int) -> tuple[float, dict[str, float]]:
    """When forward is over, and when each block's activations have left."""
    now = leaves = 0.0
    window: collections.deque[tuple[int, float]] = collections.deque()
    gone: dict[str, float] = {}
    for index, owner in enumerate(course.owners[: course.first_backward]):
        now += sent[owner].forward_ms if owner in sent else course.stretch_ms[index]
        if owner in sent:
            while window and sum(size for size, _ in window) + sent[owner].num_bytes > window_bytes:
                now = max(now, window.popleft()[1])
            gone[owner] = leaves = max(now, leaves) + float(pace.link_ms(sent[owner].num_bytes))
            window.append((sent[owner].num_bytes, leaves))
    return now, gone


def _backward_ms(course: Course, now: float, sent: dict[str, Sent], streamed: dict[str, int], queue: _Queue) -> float:
    """When backward is over that begins now.

    The activations of the last block that sends are still there, and so are the weights of the last that is streamed.
    Other activations are asked for when the block that sends behind them is done, and those that come back first when
    it begins; weights are asked for when the streamed block behind them begins. A block waits for its own.
    """
    turn, is_first = course.first_backward, True
    for index, owner in enumerate(course.owners[turn:], start=turn):
        now = max(now, queue.here.get(owner, 0.0))
        if owner in sent:
            queue.ask_behind(owner, now if is_first else now + sent[owner].backward_ms)
            now += sent[owner].backward_ms
            is_first = False
            continue
        if owner in streamed:
            queue.ask_behind(owner, now)
        now += course.stretch_ms[index]
    return now


@dataclasses.dataclass(slots=True)
class _Queue:
    """What comes back over the link, one after the other."""

    arriving_ms: dict[str, float]
    """How long that of each block takes."""
    gone: dict[str, float]
    """When it has left, at the earliest."""
    following: dict[str, str]
    """The block that is asked for at each block."""
    here: dict[str, float] = dataclasses.field(default_factory=dict)
    """When that of each block is there, once it is asked for."""
    last: float = 0.0
    """When all that was asked for is there."""

    def ask_behind(self, owner: str, now: float) -> None:
        """Ask for what comes next."""
        found = self.following.get(owner)
        if found is not None:
            self.last = max(self.last, now, self.gone.get(found, 0.0)) + self.arriving_ms[found]
            self.here[found] = self.last


def _followed(owners: Sequence[str], chosen: Collection[str]) -> dict[str, str]:
    """Which of the chosen comes after which."""
    found = [owner for owner in owners if owner in chosen]
    return dict(itertools.pairwise(found))


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
