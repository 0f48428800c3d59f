"""The clock of the link: how long a step takes whose blocks send activations away one by one. No torch.

See NOTE [far apart] in `spaced.py`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from memscale._decide.step_time import Pace


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


def held_bytes(sent: dict[str, Sent], offloaded: Sequence[str], window_bytes: int) -> int:
    """What is in the window and is in no block's stretch: in the trace of all blocks, the first one's shows it."""
    if not offloaded or next(iter(sent), None) in offloaded:
        return 0
    return min(window_bytes, sum(sent[fqn].num_bytes for fqn in offloaded))
