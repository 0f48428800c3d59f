"""Ways of treating a stretch of blocks, as rows of numbers that can be put together and compared. No torch.

The step is a sequence of *visits* to blocks: of forward, and of backward. Blocks of a plain stack are visited once each
way, in opposite order; others are visited more often, or in another order (shared blocks, blocks that are called
twice). Some blocks out of many own *spans* of the step: visits without one of another block between them. In a span,
only its highest point and what it leaves behind matter to the others, so a way of treating these blocks is two numbers
a span, whatever the order of the visits is. Live bytes are sums, so two ways are put together by adding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from memscale._decide.choice import RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.timeline import Stretch
from memscale._profile import Treatment

Array = np.ndarray[Any, Any]

HOST, MOVABLE, STATIC, RESIDENT, SPLIT, SPANS = range(6)
"""Columns: what waits elsewhere; what the blocks change all the time; then by span its peak and what it leaves.
RESIDENT: less the trainable bytes that are streamed. SPLIT: whether there are any, which slows optimizers down."""
Joins = tuple[tuple[tuple[int, int], ...], ...]
"""The spans that each span of two groups of blocks is made of, as (group, span)."""
STACKED: Joins = (((0, 0), (1, 0)), ((1, 1), (0, 1)))
"""How neighbours are joined that are visited once each way, in opposite order."""
_CHUNK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """Ways of treating some blocks, one a row."""

    columns: Array
    ms: Array
    picks: Array
    """The position of the treatment, by way and block."""

    def __len__(self) -> int:
        return len(self.ms)

    def take(self, rows: Any) -> Front:
        return Front(self.columns[rows], self.ms[rows], self.picks[rows])

    def plus(self, other: Front) -> Front:
        """The ways of both."""
        return Front(
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.ms, other.ms]),
            np.concatenate([self.picks, other.picks]),
        )


class Visits:
    """The order in which a step visits the blocks of a model."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.order: tuple[str, ...] = tuple(dict.fromkeys(owner for owner in model.owners if owner))
        self.places: list[int | None]
        if model.nested_order() is not None:
            # What has no backward is visited there all the same, for nothing: all blocks have the same spans.
            places = [model.places(fqn) for fqn in self.order]
            back = [found[1] if len(found) > 1 else None for found in reversed(places)]
            self.places = [*(found[0] for found in places), *back]
            self.owners = [*range(len(places)), *reversed(range(len(places)))]
            self.turn, self._middle = len(places), places[-1][0] + 1 if places else 0
        else:
            position = {fqn: index for index, fqn in enumerate(self.order)}
            self.places = [place for place, owner in enumerate(model.owners) if owner]
            self.owners = [position[owner] for owner in model.owners if owner]
            self._middle = model.first_backward
            self.turn = sum(bool(owner) for owner in model.owners[: self._middle])
        self._of_block: list[list[int]] = [[] for _ in self.order]
        for visit, owner in enumerate(self.owners):
            self._of_block[owner].append(visit)
        self._joins: dict[tuple[int, int, int], Joins] = {}

    def of_block(self, run: RunOptions, block: int, treatment: Treatment) -> list[tuple[int, Stretch]]:
        """A block's visits with the gaps around them: which, and what each is."""
        treated, rest = self.model.treated(run, treatment), self.model.rest(run)
        return [(visit, self._visit(treated, rest, self.places[visit])) for visit in self._of_block[block]]

    def _visit(self, treated: Sequence[Stretch], rest: Sequence[Stretch], place: int | None) -> Stretch:
        """The part, with what comes before it in forward, or after it in backward."""
        if place is None:
            return Stretch()
        stretch = treated[place]
        if place - 1 < self._middle:
            stretch = self._gap(rest, place - 1).then(stretch)
        return stretch.then(self._gap(rest, place + 1)) if place + 1 > self._middle else stretch

    def _gap(self, rest: Sequence[Stretch], place: int) -> Stretch:
        """Between two blocks. The model's own beginning, middle and end are no part of that: they differ by run."""
        owners = self.model.owners
        is_inside = 0 < place < len(owners) - 1 and place != self._middle
        return rest[place] if is_inside and not owners[place] else Stretch()

    def around(self, run: RunOptions) -> tuple[Stretch, Stretch, Stretch]:
        """The beginning of the step, what lies between forward and backward, and the end."""
        owners, last = self.model.owners, len(self.model.owners) - 1
        if not self.order:
            return Stretch(), self.model.middle(run, ()), Stretch()

        rest = self.model.rest(run)

        def outside(place: int) -> Stretch:
            return rest[place] if place <= last and not owners[place] else Stretch()

        start = outside(0)
        middle = outside(self._middle) if self._middle > 0 else Stretch()
        return start, middle, outside(last) if last not in (0, self._middle) else Stretch()

    def spans(self, low: int, high: int) -> list[list[int]]:
        """Visits of the blocks from `low` up to `high`, as long as no other block and no turn comes between them."""
        spans: list[list[int]] = []
        last = -2
        for visit, owner in enumerate(self.owners):
            if low <= owner < high:
                if visit != last + 1 or visit == self.turn:
                    spans.append([])
                spans[-1].append(visit)
                last = visit
        return spans

    def joins(self, low: int, middle: int, high: int) -> Joins:
        """How the spans of two neighbouring groups of blocks make up those of both."""
        key = (low, middle, high)
        if key not in self._joins:
            counts, found = [0, 0], []
            for span in self.spans(low, high):
                parts = []
                for is_later, _ in itertools.groupby(span, lambda visit: self.owners[visit] >= middle):
                    parts.append((int(is_later), counts[is_later]))
                    counts[is_later] += 1
                found.append(tuple(parts))
            self._joins[key] = tuple(found)
        return self._joins[key]

    def is_stack(self, low: int, high: int) -> bool:
        """Whether these blocks are visited once each way, in opposite order, with no other between them."""
        spans = [[self.owners[visit] for visit in span] for span in self.spans(low, high)]
        return spans == [[*range(low, high)], [*reversed(range(low, high))]]


def paired(earlier: Front, later: Front, joins: Joins = STACKED) -> Front:
    """Row by row: some blocks, and the blocks behind them."""
    pair = (earlier.columns, later.columns)
    columns = np.empty((len(earlier), SPANS + 2 * len(joins)), np.int64)
    columns[:, :SPANS] = pair[0][:, :SPANS] + pair[1][:, :SPANS]
    columns[:, SPLIT] = np.maximum(pair[0][:, SPLIT], pair[1][:, SPLIT])
    for number, parts in enumerate(joins):
        (group, span), *others = parts
        peak, net = (pair[group][:, SPANS + 2 * span + part] for part in (0, 1))
        for group, span in others:
            peak = np.maximum(peak, net + pair[group][:, SPANS + 2 * span])
            net = net + pair[group][:, SPANS + 2 * span + 1]
        columns[:, SPANS + 2 * number], columns[:, SPANS + 2 * number + 1] = peak, net
    return Front(columns, earlier.ms + later.ms, np.concatenate([earlier.picks, later.picks], axis=1))


def merged(earlier: Front, later: Front, joins: Joins = STACKED) -> Front:
    """Each way of one with each way of the other."""
    first = np.repeat(np.arange(len(earlier)), len(later))
    second = np.tile(np.arange(len(later)), len(earlier))
    return paired(earlier.take(first), later.take(second), joins)


def needs_of(front: Front, *, counts_waiting: bool) -> Array:
    """What a way needs, and less of which is better, whatever is done to the other blocks.

    That is how high live bytes are before, in and after each span. What a treatment takes early and gives back later
    counts only in between.
    """
    columns = front.columns
    peaks, nets = columns[:, SPANS::2], columns[:, SPANS + 1 :: 2]
    after = columns[:, STATIC : STATIC + 1] + np.cumsum(nets, axis=1)
    fixed = columns[:, (0 if counts_waiting else STATIC) : SPANS]
    return np.concatenate([fixed, after - nets + peaks, after], axis=1)


def not_dominated(ms: Array, needs: Array) -> Array:
    """Fastest first; a way is dropped when a faster one needs no more of anything."""
    order = np.lexsort((*needs.T[::-1], np.round(ms, 9)))
    kept = np.empty(0, np.int64)
    for start in range(0, len(order), _CHUNK):
        rows = order[start : start + _CHUNK]
        if len(kept):
            rows = rows[~_covers(needs[kept], needs[rows]).any(axis=0)]
        inside = np.triu(_covers(needs[rows], needs[rows]), 1)
        kept = np.concatenate([kept, rows[~inside.any(axis=0)]])
    return kept


def _covers(these: Array, those: Array) -> Array:
    """Whether the first of each pair needs no more of anything than the second."""
    covers = these[:, None, 0] <= those[None, :, 0]
    for column in range(1, these.shape[1]):
        covers &= these[:, None, column] <= those[None, :, column]
    return covers


def on_grid(front: Front, needs: Array, limit: int) -> Front:
    """At most about `limit` ways: the fastest of each cell of a grid on bytes, as fine as that allows; and extremes."""
    if len(front) <= limit:
        return front
    order = np.lexsort((*needs.T[::-1], np.round(front.ms, 9)))
    low = needs.min(axis=0)
    # One measure for all columns: what hardly differs takes no cells.
    shares = ((needs - low) / max(1, int((needs.max(axis=0) - low).max())))[order]
    fewest, most = 1, 1023
    chosen = order[:limit]
    while fewest <= most:
        num_cells = (fewest + most) // 2
        fastest = _first_of_each((shares * num_cells).astype(np.uint64))
        if len(fastest) <= limit:
            chosen, fewest = order[fastest], num_cells + 1
        else:
            most = num_cells - 1
    extremes = [order[int(np.argmin(values[order]))] for values in needs.T]
    return front.take(np.unique([*chosen, *extremes]))


def _first_of_each(cells: Array) -> Array:
    """Where each cell is first met. Many columns make numbers too large, which wrap: hardly two cells become one."""
    digits = np.cumprod(np.full(cells.shape[1], 0x9E3779B97F4A7C15, np.uint64))
    found: Array = np.unique(cells @ digits, return_index=True)[1]
    return found


def blocks_of(fronts: Sequence[Front], picks: Array, visits: Visits) -> Front:
    """The ways that give each block these treatments, one a row; `fronts` are those of single blocks."""
    whole = fronts[0].take(picks[:, 0])
    for block in range(1, len(fronts)):
        whole = paired(whole, fronts[block].take(picks[:, block]), visits.joins(0, block, block + 1))
    return whole
