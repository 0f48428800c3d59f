"""The lowest peak that any way of treating the blocks has in one run. Times have no say in it. No torch.

A peak is the highest of many points of a step: in each visit to a block, between forward and backward, in the
optimizer's step. Each point is a sum over blocks of what their treatments hold there. So blocks are treated one after
the other, in all ways; a way is dropped when at some point it is already, with the least that the blocks to come can
add, no lower than the best that is known, or when another is no higher at any point that could still be the peak.
Points between which no block is left to be treated are one, so of a plain stack few ways remain at any time. What is
left in the end has the lowest peak there is, unless there were ever more than `MAX_WAYS`; where host or disk are short
there often are, and it is the lowest that was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memscale._decide.choice import RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.partial_choices import (
    HOST,
    MOVABLE,
    RESIDENT,
    SPANS,
    SPLIT,
    STATIC,
    Array,
    Front,
    Visits,
    blocks_of,
    not_dominated,
)

MAX_WAYS, MAX_WAYS_IN_ROOM = 1024, 96
"""Ways that are followed at a time; where what waits elsewhere counts, which sets many more apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Where tensors can wait."""

    host_bytes: int
    disk_bytes: int

    def holds(self, host: Array, movable: Array) -> Array:
        within: Array = (host <= self.host_bytes) & (host + movable <= self.host_bytes + self.disk_bytes)
        return within


class Whole:
    """The whole step in one run, for many ways of treating its blocks at once."""

    def __init__(self, model: CostModel, run: RunOptions, visits: Visits) -> None:
        self.model, self.run, self.visits = model, run, visits
        self.start, self.middle, self.end = visits.around(run)
        self.rest = model.rest_extras(run)
        self.base_bytes = model.base_bytes() + self.rest.static_bytes

    def outcomes(self, front: Front) -> Array:
        """Peak, time, host and movable bytes by way: `CostModel.evaluate` for many at once."""
        model, columns, streamed = self.model, front.columns, -front.columns[:, RESIDENT]
        live = self.base_bytes + columns[:, STATIC] + self.resident_bytes(streamed)
        peak, (forward, backward) = live, self._spans(columns)
        for high, net in (
            (self.start.peak_bytes, self.start.net_bytes),
            (forward[:, 0], forward[:, 1]),
            (self.middle.peak_bytes, self.middle.net_bytes),
            (backward[:, 0], backward[:, 1]),
            (self.end.peak_bytes, self.end.net_bytes),
            (self.step_bytes(streamed), 0),
        ):
            peak, live = np.maximum(peak, live + high), live + net
        around_ms = self.start.ms + self.middle.ms + self.end.ms + self.rest.ms
        first_ms = model.first_fetch_ms(self.run, -columns[:, STATIC])
        ms = model.step_ms(self.run, front.ms + around_ms + first_ms, streamed)
        return np.stack([peak, ms, *self.waiting(front)], axis=1)

    def _spans(self, columns: Array) -> tuple[Array, Array]:
        """The spans of forward and of backward, also where one of them visits no block."""
        nothing = np.zeros((len(columns), 2), np.int64)
        found = [columns[:, at : at + 2] for at in range(SPANS, columns.shape[1], 2)]
        if len(found) == 2:
            return found[0], found[1]
        first = found[0] if found else nothing
        return (nothing, first) if self.visits.turn == 0 else (first, nothing)

    def waiting(self, front: Front) -> tuple[Array, Array]:
        """What waits on the host, and what may wait there or below it."""
        columns = front.columns
        away = self.model.optimizer.bytes_away(self.run, -columns[:, RESIDENT])
        at_home, anywhere = map(_whole_bytes, away)
        return columns[:, HOST] + self.rest.host_bytes + at_home, columns[:, MOVABLE] + anywhere

    def resident_bytes(self, streamed: Array) -> Array:
        return _whole_bytes(self.model.optimizer.resident_bytes(self.run, streamed))

    def step_bytes(self, streamed: Array) -> Array:
        return _whole_bytes(self.model.optimizer.step_bytes(self.run, streamed))


def _whole_bytes(num_bytes: Array) -> Array:
    rounded: Array = np.rint(num_bytes).astype(np.int64)
    return rounded


class _Points:
    """The points of a step, in order: its beginning, visits, the turn, visits, the end, the optimizer's step."""

    def __init__(self, whole: Whole, fronts: Sequence[Front]) -> None:
        visits = whole.visits
        spans = [(span[0], block) for block in range(len(fronts)) for span in visits.spans(block, block + 1)]
        early = [block for visit, block in sorted(spans) if visit < visits.turn]
        late = [block for visit, block in sorted(spans) if visit >= visits.turn]
        self.owners = np.array([-1, *early, -1, *late, -1, -1])
        turn = 1 + len(early)
        self.constant = np.full(len(self.owners), whole.base_bytes, np.int64)
        self.constant[1:] += whole.start.net_bytes
        self.constant[turn + 1 :] += whole.middle.net_bytes
        self.constant[-1] += whole.end.net_bytes
        for point, stretch in ((0, whole.start), (turn, whole.middle), (-2, whole.end)):
            self.constant[point] += max(0, stretch.peak_bytes)
        self.held = [self._held(block, front) for block, front in enumerate(fronts)]
        self.least = self._sums([held.min(axis=0) for held in self.held])
        self.most = self._sums([held.max(axis=0) for held in self.held])
        self.streamed = self._sums([(-front.columns[:, RESIDENT]).max(keepdims=True) for front in fronts])[:, 0]

    def _held(self, block: int, front: Front) -> Array:
        """What each treatment of a block holds at each point of the step."""
        held = np.repeat(front.columns[:, STATIC, None], len(self.owners), axis=1)
        for span, point in enumerate(np.flatnonzero(self.owners == block)):
            held[:, point + 1 :] += front.columns[:, SPANS + 2 * span + 1, None]
            held[:, point] += front.columns[:, SPANS + 2 * span]
        return held

    @staticmethod
    def _sums(rows: list[Array]) -> Array:
        """For each block the sum over it and all that follow."""
        return np.cumsum(np.stack([*rows, np.zeros_like(rows[0])])[::-1], axis=0)[::-1]

    def starts(self, num_treated: int) -> Array:
        """Where points begin that are one when so many blocks are treated. The optimizer's step is for itself."""
        is_open = self.owners >= num_treated
        changes = np.flatnonzero(is_open[1:] != is_open[:-1]) + 1
        return np.unique([0, *changes, len(self.owners) - 1])


def least_peak(whole: Whole, fronts: Sequence[Front]) -> int:
    """The peak that no way of treating the blocks can be below."""
    return int(_Descent(whole, fronts, 0, None).bounds(0)[0])


def lowest_peak(whole: Whole, fronts: Sequence[Front], below: int, room: Room | None) -> Front | None:
    """The way with the lowest peak, if there is one with less than `below`. `fronts` are those of single blocks."""
    return _Descent(whole, fronts, below, room).run() if fronts else None


class _Descent:
    """Ways of treating the first blocks of a model, more and more of them."""

    def __init__(self, whole: Whole, fronts: Sequence[Front], below: int, room: Room | None) -> None:
        self.whole, self.fronts, self.below, self.room = whole, fronts, below, room
        self.points = _Points(whole, fronts)
        self.held = np.zeros((1, len(self.points.owners)), np.int64)
        self.columns = np.zeros((1, SPANS), np.int64)
        self.ms = np.zeros(1)
        self.picks = np.zeros((1, 0), np.int16)
        self.at_least = 0

    def run(self) -> Front | None:
        if self.bounds(0)[0] >= self.below:
            return None
        for block in range(len(self.fronts)):
            self._treat(block)
            self._drop_hopeless(block + 1)
            if not len(self.ms):
                return None
            self._drop_dominated(block + 1)
        found = blocks_of(self.fronts, self.picks, self.whole.visits)
        peaks = self.whole.outcomes(found)[:, 0]
        best = int(np.lexsort((np.round(found.ms, 9), peaks))[0])
        return _faster(self.whole, self.fronts, self.picks[best], self.room) if peaks[best] < self.below else None

    def _treat(self, block: int) -> None:
        """Every way goes on with every treatment of this block."""
        front = self.fronts[block]
        ways = np.repeat(np.arange(len(self.ms)), len(front))
        row = np.tile(np.arange(len(front)), len(self.ms))
        self.held = self.held[ways] + self.points.held[block][row]
        fixed = front.columns[row, :SPANS]
        split = np.maximum(self.columns[ways, SPLIT], fixed[:, SPLIT])
        self.columns = self.columns[ways] + fixed
        self.columns[:, SPLIT] = split
        self.ms = self.ms[ways] + front.ms[row]
        self.picks = np.concatenate([self.picks[ways], row[:, None].astype(np.int16)], axis=1)

    def bounds(self, num_treated: int) -> Array:
        """The least peak of each way, whatever is done to the other blocks."""
        points, whole = self.points, self.whole
        streamed = -self.columns[:, RESIDENT]
        at_most = streamed + points.streamed[num_treated]
        high = self.held + (points.constant + points.least[num_treated])
        high[:, -1] += np.minimum(whole.step_bytes(streamed), whole.step_bytes(at_most))
        bounds: Array = high.max(axis=1) + whole.resident_bytes(at_most)
        return bounds

    def _drop_hopeless(self, num_treated: int) -> None:
        bounds = self.bounds(num_treated)
        keep = bounds < self.below
        if self.room is not None:
            keep &= self.room.holds(*self.whole.waiting(Front(self.columns, self.ms, self.picks)))
        order = np.flatnonzero(keep)
        if len(order):
            self.at_least = max(self.at_least, int(bounds[order].min()))
        # The fastest first, so that of equal ones it stays.
        self._take(order[np.argsort(np.round(self.ms[order], 9), kind="stable")])

    def _drop_dominated(self, num_treated: int) -> None:
        points, whole, nothing = self.points, self.whole, np.zeros(1, np.int64)
        # What stays below what is certain to come is no peak, however high it is.
        highest = self.held + (points.constant + points.most[num_treated])
        highest[:, -1] += int(max(whole.step_bytes(nothing)[0], whole.step_bytes(nothing + 1)[0]))
        certain = self.at_least - int(whole.resident_bytes(nothing)[0])
        needs = np.maximum(np.maximum.reduceat(highest, points.starts(num_treated), axis=1), certain)
        fixed = [RESIDENT, SPLIT] if self.room is None else [RESIDENT, SPLIT, HOST, MOVABLE]
        needs = np.concatenate([needs, self.columns[:, fixed]], axis=1)
        self._take(rows := not_dominated(np.zeros(len(needs)), needs))
        limit = MAX_WAYS if self.room is None else MAX_WAYS_IN_ROOM
        if len(rows) > limit:
            # The most promising, by bytes alone.
            self._take(np.lexsort((*needs[rows].T[::-1], self.bounds(num_treated)))[:limit])

    def _take(self, rows: Array) -> None:
        self.held, self.columns = self.held[rows], self.columns[rows]
        self.ms, self.picks = self.ms[rows], self.picks[rows]


def _faster(whole: Whole, fronts: Sequence[Front], picks: Array, room: Room | None) -> Front:
    """The same peak in less time: blocks get back what they need not give, the dearest first."""
    best = blocks_of(fronts, picks[None], whole.visits)
    saves = [
        (float(front.ms[pick] - front.ms[row]), block, row)
        for block, (front, pick) in enumerate(zip(fronts, picks, strict=True))
        for row in range(len(front))
        if front.ms[row] < front.ms[pick]
    ]
    points = _Points(whole, fronts)
    held = sum(points.held[block][pick] for block, pick in enumerate(picks)) + points.constant
    peak = whole.outcomes(best)[0, 0]
    streamed = -best.columns[:, RESIDENT]
    room_bytes = np.full(len(held), peak - int(whole.resident_bytes(streamed)[0]))
    room_bytes[-1] -= int(whole.step_bytes(streamed)[0])
    picks = picks.copy()
    for _, block, row in sorted(saves, key=lambda entry: (-round(entry[0], 9), *entry[1:])):
        front, pick = fronts[block], picks[block]
        changed = held + points.held[block][row] - points.held[block][pick]
        waits_no_more = (front.columns[row, [HOST, MOVABLE]] <= front.columns[pick, [HOST, MOVABLE]]).all()
        is_alike = front.columns[row, RESIDENT] == front.columns[pick, RESIDENT]
        is_faster = front.ms[row] < front.ms[pick]
        if is_faster and is_alike and (room is None or waits_no_more) and (changed <= room_bytes).all():
            held, picks[block] = changed, row
    return blocks_of(fronts, picks[None], whole.visits)
