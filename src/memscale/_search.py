"""The search: every way of treating the blocks that is worth considering, for every way of running the rest.

A stretch of neighbouring blocks is known by a *front*: ways of treating it, none of which is worse than another in
everything. Of equal blocks only the number that gets each treatment matters, and their best order is known; fronts of
unequal neighbours are merged pairwise, up to the whole model. Short models are searched exactly; on long ones fronts
are thinned, by a grid on bytes that keeps the fastest of each cell. Nothing here depends on the device's budget, so a
larger one can never give a slower plan. Whole bytes and a fixed order: the same inputs give the same front everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from memscale._choice import Choice, Outcome, Run, Treatment
from memscale._peak import CostModel
from memscale._stretch import Stretch

MIN_FRONT = 64
"""Ways that are kept of a stretch of unequal blocks, at least."""
EXACT_BLOCKS = 8
"""Up to so many blocks nothing is thinned, unless every block is another and has many treatments."""
_MAX_COUNTS = 21_000
"""Ways of treating equal blocks: all of them for up to 24 blocks under five treatments."""
_MAX_WAYS = 400_000
"""Ways of treating stretches of a model, all stretches together."""
_MAX_EXACT = 24_000
"""Ways of treating a short model that are compared with one another."""
_MAX_ROWS = 4_000_000
"""Ways of treating a short model, all runs together, that are evaluated without comparing them first."""
_MAX_EACH = 1024
"""Ways of treating a whole model that are tried with every run, where the host is tight."""
_CHUNK = 128

# Columns of a front: bytes of the forward and backward of a stretch of blocks, and what it changes elsewhere.
FORWARD_PEAK, FORWARD_NET, BACKWARD_PEAK, BACKWARD_NET, STATIC, RESIDENT, SPLIT, HOST, MOVABLE = range(9)
"""RESIDENT: less the trainable bytes that are streamed. SPLIT: whether there are any, which slows optimizers down."""

Array = np.ndarray[Any, Any]
Stretches = tuple[tuple[int, int], ...]
"""Runs of equal blocks: which, and how many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A choice, and what it comes to."""

    choice: Choice
    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """Ways of treating a stretch of blocks, one a row."""

    columns: Array
    ms: Array
    picks: Array
    """By way and block: the position of its treatment."""

    def __len__(self) -> int:
        return len(self.ms)

    def take(self, rows: Any) -> Front:
        return Front(self.columns[rows], self.ms[rows], self.picks[rows])


def search(
    model: CostModel, runs: Iterable[Run], allowed: Sequence[Treatment], *, counts_waiting: bool
) -> list[Candidate]:
    """Candidates for each run; `counts_waiting` where host or disk may be what a plan fails on."""
    order = model.nested_order()
    found: list[Candidate] = []
    if order is None:
        for run in runs:
            choices = _prefix_choices(model, run, allowed) if model.can_run(run) else ()
            found += [Candidate(choice, model.evaluate(choice)) for choice in choices]
        return found
    runs = list(runs)
    searcher = _Searcher(model, order, allowed, counts_waiting, len(runs))
    for run in runs:
        found += searcher.candidates(run)
    return found


class _Searcher:
    """Fronts of one model, remembered by what they are made of."""

    def __init__(
        self,
        model: CostModel,
        order: tuple[str, ...],
        allowed: Sequence[Treatment],
        counts_waiting: bool,
        num_runs: int,
    ) -> None:
        self.model = model
        self.order = order
        self.allowed: tuple[Treatment, ...] = ("keep", *allowed)
        self.counts_waiting = counts_waiting
        self.is_exact = len(order) <= EXACT_BLOCKS
        self.most_ways = 0 if counts_waiting or not self.is_exact else _MAX_ROWS // max(1, num_runs)
        self._blocks: list[Front] = []
        self._block_of: dict[Any, int] = {}
        self._merged: dict[Stretches, Front] = {}
        self._whole: dict[Stretches, Front] = {}
        self._max_product = MIN_FRONT**2

    def candidates(self, run: Run) -> list[Candidate]:
        """The ways that no other beats in peak and time (and waiting bytes), with this run around the blocks."""
        treatments = [treatment for treatment in self.allowed if self.model.can_treat(run, treatment)]
        if not treatments or not self.model.can_run(run):
            return []
        front = self._front([self._block(run, fqn, treatments) for fqn in self.order])
        outcomes = self._outcomes(run, front)
        return [self._candidate(run, front.picks[row], *outcomes[row]) for row in self._best(front, outcomes)]

    def _candidate(self, run: Run, picks: Array, peak: float, ms: float, host: float, movable: float) -> Candidate:
        blocks = tuple((fqn, self.allowed[pick]) for fqn, pick in zip(self.order, picks, strict=True) if pick)
        return Candidate(Choice(blocks, run), Outcome(int(peak), float(ms), int(host), int(movable)))

    # ---- blocks, and stretches of them

    def _block(self, run: Run, module_fqn: str, treatments: Sequence[Treatment]) -> int:
        """The front of one block: its treatments, with the gaps around it. Equal blocks have the same number."""
        # The model's own beginning and end are no part of it: they differ between runs.
        gaps = self.model.gaps(run, module_fqn) if module_fqn != self.order[0] else (Stretch(), Stretch())
        rows, times = [], []
        for treatment in treatments:
            forward, backward = self.model.block(run, module_fqn, treatment)
            forward, backward = gaps[0].then(forward), backward.then(gaps[1])
            extra = self.model.extras(run, module_fqn, treatment)
            of_its_own = (forward.peak_bytes, forward.net_bytes, backward.peak_bytes, backward.net_bytes)
            streamed = (extra.static_bytes, -extra.streamed_bytes, extra.streamed_bytes > 0)
            rows.append((*of_its_own, *streamed, extra.host_bytes, extra.movable_bytes))
            times.append(forward.ms + backward.ms + extra.ms)
        key = (*rows, *times, *treatments)
        if key not in self._block_of:
            picks = np.array([self.allowed.index(treatment) for treatment in treatments], np.int8)
            front = Front(np.array(rows, np.int64), np.array(times), picks[:, None])
            self._block_of[key] = len(self._blocks)
            self._blocks.append(front.take(_not_dominated(front.ms, self._needs(front))))
        return self._block_of[key]

    def _front(self, blocks: Sequence[int]) -> Front:
        """The whole model's front, thinned once for all runs."""
        if not blocks:
            return Front(np.zeros((1, MOVABLE + 1), np.int64), np.zeros(1), np.zeros((1, 0), np.int8))
        runs = [(block, len(list(group))) for block, group in itertools.groupby(blocks)]
        stretches = tuple((block, 1) for block in blocks) if self.is_exact else tuple(runs)
        self._max_product = min(60_000, max(MIN_FRONT**2, _MAX_WAYS // len(stretches)))
        if stretches not in self._whole:
            whole = self._merge_all(stretches)
            if len(whole) > self.most_ways:
                whole = self._thinned(whole)
            # Every run looks at all of it, and host bytes set few ways apart from the others.
            is_long = self.counts_waiting and not self.is_exact
            self._whole[stretches] = _on_grid(whole, self._needs(whole), _MAX_EACH) if is_long else whole
        return self._whole[stretches]

    def _merge_all(self, stretches: Stretches) -> Front:
        if stretches not in self._merged:
            if len(stretches) == 1:
                self._merged[stretches] = self._alike(*stretches[0])
            else:
                middle = len(stretches) // 2
                halves = [self._thinned(self._merge_all(part)) for part in (stretches[:middle], stretches[middle:])]
                self._merged[stretches] = _merge(*self._limited(*halves))
        return self._merged[stretches]

    def _limited(self, earlier: Front, later: Front) -> tuple[Front, Front]:
        """So much of each that they can all be combined."""
        if len(earlier) * len(later) <= (max(4 * _MAX_EXACT, self.most_ways) if self.is_exact else self._max_product):
            return earlier, later
        limit = max(MIN_FRONT, math.isqrt(self._max_product), self._max_product // min(len(earlier), len(later)))
        return _on_grid(earlier, self._needs(earlier), limit), _on_grid(later, self._needs(later), limit)

    def _alike(self, block: int, length: int) -> Front:
        """Equal blocks: how many get which treatment, in the order of treatments with the lowest peak in backward."""
        front = self._blocks[block]
        if length == 1:
            return front
        front = front.take(_lowest_order(front))
        counts = np.array(sorted(_counts(length, len(front))))
        powers = _Powers(front, length)
        whole = powers.take(0, counts[:, 0])
        for position in range(1, len(front)):
            whole = _paired(whole, powers.take(position, counts[:, position]))
        picks = np.repeat(np.tile(front.picks[:, 0], len(counts)), counts.ravel())
        return Front(whole.columns, whole.ms, picks.reshape(len(counts), length))

    def _thinned(self, front: Front) -> Front:
        # More than these take long to compare with one another.
        limit = _MAX_EXACT if self.is_exact else max(4 * MIN_FRONT, self._max_product // 16)
        front = _on_grid(front, self._needs(front), limit)
        return front.take(_not_dominated(front.ms, self._needs(front)))

    def _needs(self, front: Front) -> Array:
        """The columns in which less is better."""
        return front.columns if self.counts_waiting else front.columns[:, :HOST]

    # ---- the whole step

    def _outcomes(self, run: Run, front: Front) -> Array:
        """Peak, time, host and movable bytes of the whole step by way: `CostModel.evaluate` for many at once."""
        model, columns = self.model, front.columns
        start, end = model.gaps(run, self.order[0]) if self.order else (Stretch(), Stretch())
        middle = model.middle(run, self.order)
        streamed, rest = -columns[:, RESIDENT], model.rest_extras(run)
        live = model.base_bytes() + rest.static_bytes + columns[:, STATIC]
        live = live + np.rint(model.optimizer.resident_bytes(run, streamed)).astype(np.int64)
        peak = live
        for high, net in (
            (start.peak_bytes, start.net_bytes),
            (columns[:, FORWARD_PEAK], columns[:, FORWARD_NET]),
            (middle.peak_bytes, middle.net_bytes),
            (columns[:, BACKWARD_PEAK], columns[:, BACKWARD_NET]),
            (end.peak_bytes, end.net_bytes),
            (np.rint(model.optimizer.step_bytes(run, streamed)).astype(np.int64), 0),
        ):
            peak, live = np.maximum(peak, live + high), live + net
        ms = model.step_ms(run, front.ms + (start.ms + middle.ms + end.ms + rest.ms), streamed)
        at_home, anywhere = (np.rint(away).astype(np.int64) for away in model.optimizer.bytes_away(run, streamed))
        host = columns[:, HOST] + rest.host_bytes + at_home
        return np.stack([peak, ms, host, columns[:, MOVABLE] + anywhere], axis=1)

    def _best(self, front: Front, outcomes: Array) -> list[int]:
        """Rows that no other beats; among equals the one with the fewest actions."""
        rows = np.arange(len(outcomes)) if self.counts_waiting else _falling(outcomes)
        peak, ms, host, movable = outcomes.T
        keys = (rows, (front.picks[rows] > 0).sum(axis=1), movable[rows], host[rows], peak[rows], np.round(ms[rows], 9))
        order = rows[np.lexsort(keys)]
        if not self.counts_waiting:
            falls = peak[order] < np.minimum.accumulate(np.concatenate([[np.inf], peak[order]]))[:-1]
            return [int(row) for row in order[falls]]
        return [int(order[row]) for row in _not_dominated(ms[order], np.stack([peak, host, movable], axis=1)[order])]


def _falling(outcomes: Array) -> Array:
    """Rows that peak no higher than any faster one: few of many, and all that are worth sorting."""
    peak, ms = outcomes[:, 0], np.round(outcomes[:, 1], 9)
    order = np.lexsort((peak, ms))
    return np.sort(order[peak[order] <= np.minimum.accumulate(peak[order])])


# ---- arithmetic of fronts


def _merge(earlier: Front, later: Front) -> Front:
    """Each way of one with each way of the other."""
    first = np.repeat(np.arange(len(earlier)), len(later))
    second = np.tile(np.arange(len(later)), len(earlier))
    return _paired(earlier.take(first), later.take(second))


def _paired(earlier: Front, later: Front) -> Front:
    """Row by row: one stretch of blocks, then the other."""
    a, b = earlier.columns, later.columns
    columns = a + b
    columns[:, FORWARD_PEAK] = np.maximum(a[:, FORWARD_PEAK], a[:, FORWARD_NET] + b[:, FORWARD_PEAK])
    columns[:, BACKWARD_PEAK] = np.maximum(b[:, BACKWARD_PEAK], b[:, BACKWARD_NET] + a[:, BACKWARD_PEAK])
    columns[:, SPLIT] = np.maximum(a[:, SPLIT], b[:, SPLIT])
    return Front(columns, earlier.ms + later.ms, np.concatenate([earlier.picks, later.picks], axis=1))


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
            fronts.append(_paired(fronts[-1], block))
        self.columns = np.stack([front.columns for front in fronts])
        self.ms = np.stack([front.ms for front in fronts])

    def take(self, position: int, counts: Array) -> Front:
        """By row: this treatment, so many times."""
        return Front(self.columns[counts, position], self.ms[counts, position], np.zeros((len(counts), 0), np.int8))


def _counts(length: int, num_kinds: int) -> set[tuple[int, ...]]:
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
    return found


def _not_dominated(ms: Array, needs: Array) -> Array:
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
    """By pair: whether the first needs no more of anything than the second."""
    covers = these[:, None, 0] <= those[None, :, 0]
    for column in range(1, these.shape[1]):
        covers &= these[:, None, column] <= those[None, :, column]
    return covers


def _on_grid(front: Front, needs: Array, limit: int) -> Front:
    """At most about `limit` ways: the fastest of each cell of a grid on bytes, as fine as that allows; and extremes."""
    if len(front) <= limit:
        return front
    order = np.lexsort((*needs.T[::-1], np.round(front.ms, 9)))
    low = needs.min(axis=0)
    # One measure for all columns: what hardly differs takes no cells.
    shares = ((needs - low) / max(1, int((needs.max(axis=0) - low).max())))[order]
    bits = 63 // needs.shape[1]
    digits = 1 << (bits * np.arange(needs.shape[1]))
    fewest, most = 1, (1 << min(bits, 10)) - 1
    chosen = order[:1]
    while fewest <= most:
        num_cells = (fewest + most) // 2
        _, fastest = np.unique((shares * num_cells).astype(np.int64) @ digits, return_index=True)
        if len(fastest) <= limit:
            chosen, fewest = order[fastest], num_cells + 1
        else:
            most = num_cells - 1
    heights = (needs[:, STATIC] + needs[:, BACKWARD_PEAK], needs[:, STATIC] + needs[:, FORWARD_NET])
    extremes = [order[int(np.argmin(values[order]))] for values in (*needs.T, *heights)]
    return front.take(np.unique([*chosen, *extremes]))


# ---- where steps do not nest


def _prefix_choices(model: CostModel, run: Run, allowed: Sequence[Treatment]) -> Iterator[Choice]:
    """For steps that do not nest (blocks called twice): blocks in the order of their bargain, the first so many.

    One treatment, or two: the smaller first.
    """
    if model.can_treat(run, "keep"):
        yield Choice((), run)
    usable = [treatment for treatment in allowed if model.can_treat(run, treatment)]
    for position, treatment in enumerate(usable):
        ranking = _rank(model, treatment)
        lengths = range(1, len(ranking) + 1) if model.can_treat(run, "keep") else [len(model.blocks)]
        for length in lengths:
            yield Choice(tuple((fqn, treatment) for fqn in ranking[:length]), run)
            for milder in usable[:position]:
                others = [fqn for fqn in _rank(model, milder) if fqn not in ranking[:length]]
                for extent in sorted({len(others) // 4, len(others) // 2, len(others)} - {0}):
                    blocks = [(fqn, treatment) for fqn in ranking[:length]]
                    yield Choice((*blocks, *((fqn, milder) for fqn in others[:extent])), run)


def _rank(model: CostModel, treatment: Treatment) -> list[str]:
    """Blocks worth treating, the best bargain first; among equals the earliest, whose recompute comes last."""
    worth = []
    for fqn, layer in model.blocks.items():
        frees = model.saved_bytes(fqn, treatment) + (layer.param_bytes if treatment.startswith("stream") else 0)
        if layer.num_calls and frees > 0:
            worth.append((fqn, frees / max(model.extra_ms(fqn, treatment), 1e-6)))
    # Rounded, so that layers that differ by noise of no meaning keep their order in the model.
    return [fqn for fqn, bargain in sorted(worth, key=lambda entry: -float(f"{entry[1]:.2g}"))]
