"""The search: every way of treating the blocks that is worth considering, for every way of running the rest.

A stretch of neighbouring blocks is known by a *front*: ways of treating it, none of which is worse than another in
everything. Of equal blocks in a plain stack only the number that gets each treatment matters, and their best order is
known; fronts of other neighbours are merged pairwise, up to the whole model, in whatever order a step visits its blocks
(`partial_choices`). Short models are searched exactly; on long ones fronts are thinned, by a grid on bytes that keeps
the fastest of each cell. What thinning could lose is looked at apart: blocks that are treated alike, all or up to one
of them, and the lowest peak that there is, which no time has a say in (`lowest_peak`).

Nothing here depends on the device's budget, so a larger one can never give a slower plan. Whole bytes and a fixed
order: the same inputs give the same front everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from memscale._decide.choice import Choice, Outcome, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.lowest_peak import Room, Whole, least_peak, lowest_peak
from memscale._decide.partial_choices import (
    SPANS,
    Array,
    Front,
    Visits,
    blocks_of,
    merged,
    needs_of,
    not_dominated,
    on_grid,
    paired,
)
from memscale._decide.timeline import Stretch
from memscale._profile import KEEP, Treatment

MIN_FRONT = 64
"""The least number of ways that are kept of a stretch of unequal blocks."""
EXACT_BLOCKS = 8
"""Up to so many blocks nothing is thinned, unless every block is another and has many treatments."""
_MAX_COUNTS = 21_000
"""Ways of treating equal blocks: all of them for up to 24 blocks under five treatments."""
_MAX_WAYS = 400_000
"""The most ways of treating stretches of a model, all stretches together."""
_MAX_EXACT = 24_000
"""The most ways of treating a short model that are compared with one another."""
_MAX_ROWS = 4_000_000
"""Ways of treating a short model, all runs together, that are evaluated without comparing them first."""
_MAX_EACH = 1024
"""Ways of treating a whole model that are tried with every run, where the host is tight."""
_MAX_RUNS_IN_ROOM = 6
"""The most run options that are searched for the lowest peak where host memory is short."""

FORWARD_PEAK, FORWARD_NET, BACKWARD_PEAK, BACKWARD_NET = range(SPANS, SPANS + 4)
"""Columns of blocks that are visited once each way, and of a whole model."""
Stretches = tuple[tuple[int, int], ...]
"""Runs of equal blocks: which, and how many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A choice, and what it comes to."""

    choice: Choice
    outcome: Outcome


def search(
    model: CostModel,
    runs: Iterable[RunOptions],
    allowed: Sequence[Treatment],
    *,
    counts_waiting: bool,
    room: Room | None = None,
) -> list[Candidate]:
    """Candidates for each run, with the lowest peak of all exact ones and of all others among them.

    `counts_waiting` where host or disk may be what a plan fails on; `room` is what they have.
    """
    runs, room = tuple(runs), room if counts_waiting else None
    key = runs, tuple(allowed), counts_waiting, room
    if key not in model.searched:
        model.searched[key] = _search(model, runs, allowed, counts_waiting, room)
    found: list[Candidate] = model.searched[key]
    return list(found)


def _search(
    model: CostModel,
    runs: Sequence[RunOptions],
    allowed: Sequence[Treatment],
    counts_waiting: bool,
    room: Room | None,
) -> list[Candidate]:
    searcher = _Searcher(model, allowed, counts_waiting, len(runs), room)
    found = [candidate for run in runs for candidate in searcher.candidates(run)]
    for is_exact in (True, False):
        found += searcher.lower([run for run in runs if run.is_exact == is_exact], found)
    return found


class _Searcher:
    """Fronts of one model, remembered by what they are made of."""

    def __init__(
        self,
        model: CostModel,
        allowed: Sequence[Treatment],
        counts_waiting: bool,
        num_runs: int,
        room: Room | None,
    ) -> None:
        self.model = model
        self.visits = Visits(model)
        self.order = self.visits.order
        self.is_stack = model.nested_order() is not None
        self.allowed: tuple[Treatment, ...] = (KEEP, *allowed)
        self.counts_waiting = counts_waiting
        self.room = room
        self.is_exact = len(self.order) <= EXACT_BLOCKS
        self.most_ways = 0 if counts_waiting or not self.is_exact else _MAX_ROWS // max(1, num_runs)
        self._every: list[Front] = []
        self._blocks: list[Front] = []
        self._block_of: dict[Any, int] = {}
        self._in_run: dict[RunOptions, list[int] | None] = {}
        self._merged: dict[tuple[Stretches, int], Front] = {}
        self._whole: dict[tuple[int, ...], Front] = {}
        self._max_product = MIN_FRONT**2
        self.is_complete = self.is_exact
        """Whether nothing was thinned so far."""

    def candidates(self, run: RunOptions) -> list[Candidate]:
        """The ways that no other beats in peak and time (and waiting bytes), with this run around the blocks."""
        blocks = self._blocks_in(run)
        if blocks is None:
            return []
        return self._candidates(run, self._front(blocks), self._best)

    def lower(self, runs: Sequence[RunOptions], found: Sequence[Candidate]) -> list[Candidate]:
        """The lowest peak in any of these runs, where it is lower than all that was found."""
        mine = set(runs)
        placed = [c.outcome for c in found if c.choice.run in mine and self._has_room(c.outcome)]
        below, lower = min((outcome.peak_bytes for outcome in placed), default=2**62), []
        for whole, fronts, least in self._most_promising(runs):
            front = lowest_peak(whole, fronts, below, self.room) if least < below else None
            if front is not None:
                lower += self._candidates(whole.run, front, lambda front, outcomes: [0])
                below = lower[-1].outcome.peak_bytes
        return lower

    def _most_promising(self, runs: Sequence[RunOptions]) -> list[tuple[Whole, list[Front], int]]:
        """Runs with their blocks, and what no way can be below; the lowest of these first. None where all is known."""
        if self.is_complete:
            return []
        found = []
        for run in runs:
            fronts = [self._every[block] for block in self._blocks_in(run) or ()]
            if fronts:
                whole = Whole(self.model, run, self.visits)
                found.append((whole, fronts, least_peak(whole, fronts)))
        found.sort(key=lambda entry: entry[2])
        return found if self.room is None else found[:_MAX_RUNS_IN_ROOM]

    def _has_room(self, outcome: Outcome) -> bool:
        host, movable = np.array([outcome.host_bytes]), np.array([outcome.movable_bytes])
        return self.room is None or bool(self.room.holds(host, movable)[0])

    def _candidates(
        self, run: RunOptions, front: Front, choose: Callable[[Front, Array], list[int]]
    ) -> list[Candidate]:
        outcomes = Whole(self.model, run, self.visits).outcomes(front)
        return [self._candidate(run, front.picks[row], *outcomes[row]) for row in choose(front, outcomes)]

    def _candidate(
        self, run: RunOptions, picks: Array, peak: float, ms: float, host: float, movable: float
    ) -> Candidate:
        blocks = tuple((fqn, self.allowed[pick]) for fqn, pick in zip(self.order, picks, strict=True) if pick)
        return Candidate(Choice(blocks, run), Outcome(int(peak), float(ms), int(host), int(movable)))

    # ---- blocks, and stretches of them

    def _blocks_in(self, run: RunOptions) -> list[int] | None:
        """The fronts of the single blocks, by number; None where this run cannot be."""
        if run not in self._in_run:
            can_run = self.model.can_run(run)
            treatments = [t for t in self.allowed if can_run and self.model.can_treat(run, t)]
            blocks = [self._block(run, block, treatments) for block in range(len(self.order)) if treatments]
            self._in_run[run] = blocks if treatments else None
        return self._in_run[run]

    def _block(self, run: RunOptions, block: int, treatments: Sequence[Treatment]) -> int:
        """The front of one block: its treatments, with the gaps around it. Equal blocks have the same number."""
        rows, times = [], []
        spans = self.visits.spans(block, block + 1)
        for treatment in treatments:
            visits = dict(self.visits.of_block(run, block, treatment))
            stretches = [functools.reduce(Stretch.then, (visits[visit] for visit in span)) for span in spans]
            extra = self.model.extras(run, self.order[block], treatment)
            waits = (extra.host_bytes, extra.movable_bytes)
            always = (extra.static_bytes, -extra.streamed_bytes, int(extra.streamed_bytes > 0))
            by_span = itertools.chain(*((stretch.peak_bytes, stretch.net_bytes) for stretch in stretches))
            rows.append((*waits, *always, *by_span))
            times.append(sum((stretch.ms for stretch in stretches), extra.ms))
        key = (*rows, *times, *treatments)
        if key not in self._block_of:
            picks = np.array([self.allowed.index(treatment) for treatment in treatments], np.int8)
            front = Front(np.array(rows, np.int64), np.array(times), picks[:, None])
            self._block_of[key] = len(self._blocks)
            self._every.append(front)
            self._blocks.append(front.take(not_dominated(front.ms, self._needs(front))))
        return self._block_of[key]

    def _front(self, blocks: Sequence[int]) -> Front:
        """The whole model's front, thinned once for all runs; and simple ways, which are not thinned."""
        if not blocks:
            return Front(np.zeros((1, SPANS), np.int64), np.zeros(1), np.zeros((1, 0), np.int8))
        if tuple(blocks) not in self._whole:
            stretches = self._stretches(blocks)
            self._max_product = min(60_000, max(MIN_FRONT**2, _MAX_WAYS // len(stretches)))
            whole = self._merge_all(stretches, 0)
            if len(whole) > self.most_ways:
                whole = self._thinned(whole)
            if self.counts_waiting and not self.is_exact:
                # Every run looks at all of it, and host bytes set few ways apart from the others.
                whole = self._on_grid(whole, _MAX_EACH)
            self._whole[tuple(blocks)] = whole.plus(self._simple(blocks))
        return self._whole[tuple(blocks)]

    def _stretches(self, blocks: Sequence[int]) -> Stretches:
        """Runs of equal blocks where these are a stack; else one by one, and so on short models."""
        stretches: list[tuple[int, int]] = []
        position = 0
        for block, group in itertools.groupby(blocks):
            length = len(list(group))
            is_run = not self.is_exact and self.visits.is_stack(position, position + length)
            stretches += [(block, length)] if is_run else [(block, 1)] * length
            position += length
        return tuple(stretches)

    def _simple(self, blocks: Sequence[int]) -> Front:
        """Every block treated alike; and on long models the first so many one way and the others another."""
        fronts = [self._every[block] for block in blocks]
        kinds, length = range(len(fronts[0])), len(blocks)
        alike = [[kind] * length for kind in kinds]
        split = [] if self.is_exact else range(1, length)
        mixed = [[a] * first + [b] * (length - first) for a, b in itertools.permutations(kinds, 2) for first in split]
        ways = blocks_of(fronts, np.array(alike + mixed), self.visits)
        best = not_dominated(ways.ms, self._needs(ways))
        return ways.take(np.unique([*range(len(alike)), *best]))

    def _merge_all(self, stretches: Stretches, position: int) -> Front:
        """The front of these stretches, of which the first block has this position in the model."""
        key = (stretches, -1 if self.is_stack else position)
        if key not in self._merged:
            if len(stretches) == 1:
                self._merged[key] = self._alike(*stretches[0])
            else:
                half = len(stretches) // 2
                between, end = (position + sum(n for _, n in part) for part in (stretches[:half], stretches))
                parts = ((stretches[:half], position), (stretches[half:], between))
                halves = self._limited(*(self._thinned(self._merge_all(*part)) for part in parts))
                self._merged[key] = merged(*halves, self.visits.joins(position, between, end))
        return self._merged[key]

    def _limited(self, earlier: Front, later: Front) -> tuple[Front, Front]:
        """So much of each that they can all be combined."""
        if len(earlier) * len(later) <= (max(4 * _MAX_EXACT, self.most_ways) if self.is_exact else self._max_product):
            return earlier, later
        limit = max(MIN_FRONT, math.isqrt(self._max_product), self._max_product // min(len(earlier), len(later)))
        return self._on_grid(earlier, limit), self._on_grid(later, limit)

    def _alike(self, block: int, length: int) -> Front:
        """Equal blocks: how many get which treatment, in the order of treatments with the lowest peak in backward."""
        front = self._blocks[block]
        if length == 1:
            return front
        front = front.take(_lowest_order(front))
        counts = _counts(length, len(front))
        powers = _Powers(front, length)
        whole = powers.take(0, counts[:, 0])
        for position in range(1, len(front)):
            whole = paired(whole, powers.take(position, counts[:, position]))
        picks = np.repeat(np.tile(front.picks[:, 0], len(counts)), counts.ravel())
        return Front(whole.columns, whole.ms, picks.reshape(len(counts), length))

    def _thinned(self, front: Front) -> Front:
        # More than these take long to compare with one another.
        limit = _MAX_EXACT if self.is_exact else max(4 * MIN_FRONT, self._max_product // 16)
        front = self._on_grid(front, limit)
        return front.take(not_dominated(front.ms, self._needs(front)))

    def _on_grid(self, front: Front, limit: int) -> Front:
        self.is_complete &= len(front) <= limit
        return on_grid(front, self._needs(front), limit)

    def _needs(self, front: Front) -> Array:
        return needs_of(front, counts_waiting=self.counts_waiting)

    # ---- the best of them

    def _best(self, front: Front, outcomes: Array) -> list[int]:
        """Rows that no other beats; among equals the one with the fewest actions."""
        rows = np.arange(len(outcomes)) if self.counts_waiting else _falling(outcomes)
        peak, ms, host, movable = outcomes.T
        keys = (rows, (front.picks[rows] > 0).sum(axis=1), movable[rows], host[rows], peak[rows], np.round(ms[rows], 9))
        order = rows[np.lexsort(keys)]
        if not self.counts_waiting:
            falls = peak[order] < np.minimum.accumulate(np.concatenate([[np.inf], peak[order]]))[:-1]
            return [int(row) for row in order[falls]]
        return [int(order[row]) for row in not_dominated(ms[order], np.stack([peak, host, movable], axis=1)[order])]


def _falling(outcomes: Array) -> Array:
    """Rows that peak no higher than any faster one: few of many, and all that are worth sorting."""
    peak, ms = outcomes[:, 0], np.round(outcomes[:, 1], 9)
    order = np.lexsort((peak, ms))
    return np.sort(order[peak[order] <= np.minimum.accumulate(peak[order])])


# ---- arithmetic of fronts


def _lowest_order(block: Front) -> list[int]:
    """Treatments in the order of blocks that gives the lowest peak in backward, which runs from the last to the first.

    A classic of scheduling: first those that leave more than they free, the lowest rise first; then the others, the
    highest rise first, whose turn is last, when the others' activations are gone.
    """

    def key(row: int) -> tuple[int, int]:
        frees, rise = -int(block.columns[row, BACKWARD_NET]), int(block.columns[row, BACKWARD_PEAK])
        return (0, frees + rise) if frees < 0 else (1, -rise)

    return sorted(range(len(block)), key=key)


class _Powers:
    """The same block again and again, under each of its treatments."""

    def __init__(self, block: Front, length: int) -> None:
        block = dataclasses.replace(block, picks=block.picks[:, :0])
        fronts = [Front(np.zeros_like(block.columns), np.zeros_like(block.ms), block.picks)]
        for _ in range(length):
            fronts.append(paired(fronts[-1], block))
        self.columns = np.stack([front.columns for front in fronts])
        self.ms = np.stack([front.ms for front in fronts])

    def take(self, position: int, counts: Array) -> Front:
        """This treatment, so many times, by row."""
        return Front(self.columns[counts, position], self.ms[counts, position], np.zeros((len(counts), 0), np.int8))


@functools.lru_cache(maxsize=16)
def _counts(length: int, num_kinds: int) -> Array:
    """How many of `length` equal blocks get which treatment: all ways, or where those are too many, a selection.

    The selection has every mixture of two, those with one more block of a third, and all others in strides.
    """
    stride = 1
    while math.comb(length // stride + num_kinds - 1, num_kinds - 1) > _MAX_COUNTS:
        stride += 1
    found = set()
    for parts in itertools.combinations_with_replacement(range(length // stride + 1), num_kinds - 1):
        ends = [0, *(stride * part for part in parts), length]
        found.add(tuple(b - a for a, b in itertools.pairwise(ends)))
    if stride > 1:
        for first, second, odd in itertools.product(range(num_kinds), repeat=3):
            for count in range(length):
                row = [0] * num_kinds
                row[first] += count
                row[second] += length - count - 1
                row[odd] += 1
                found.add(tuple(row))
    return np.array(sorted(found))
