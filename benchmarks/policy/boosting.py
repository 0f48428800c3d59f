"""Gradient-boosted trees for yes or no, in numpy: small and deterministic; written out in integers (`trees.py`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from memscale._decide.policy.trees import UNIT, Forest, Tree

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    num_trees: int = 30
    depth: int = 3
    rate: float = 0.2
    num_bins: int = 48
    min_weight: float = 4.0
    """Of the Hessian in a leaf: a few undecided cases, or many that are settled."""
    penalty: float = 2.0


def fit(rows: Array, labels: Array, settings: Settings) -> Forest:
    """Trees for the logarithm of the odds that a label is 1."""
    share = (labels.sum() + 0.5) / (len(labels) + 1)
    base = math.log(share / (1 - share))
    bins = _Bins(rows, settings.num_bins)
    odds = np.full(len(rows), base)
    trees = []
    for _ in range(settings.num_trees):
        likely = 1 / (1 + np.exp(-odds))
        grown = _Grower(bins, labels - likely, likely * (1 - likely), settings)
        trees.append(grown.tree())
        odds += grown.fitted
    return Forest(_whole(base), tuple(trees))


class _Bins:
    """Every feature in steps of about equally many cases."""

    def __init__(self, rows: Array, num_bins: int) -> None:
        quantiles = np.linspace(0, 1, num_bins + 1)[1:-1]
        self.edges = []
        for column in rows.T:
            edges = {int(edge) for edge in np.quantile(column, quantiles, method="lower")}
            self.edges.append(np.array(sorted(edge for edge in edges if edge < column.max()), np.int64))
        # A case goes left of an edge that it does not exceed, as in the walk.
        columns = [np.searchsorted(e, c, side="left") for e, c in zip(self.edges, rows.T, strict=True)]
        self.codes = np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0), np.int64)
        self.width = max((len(edges) for edges in self.edges), default=0) + 1


class _Grower:
    """One tree, grown depth first."""

    def __init__(self, bins: _Bins, gradients: Array, hessians: Array, settings: Settings) -> None:
        self.bins, self.gradients, self.hessians, self.settings = bins, gradients, hessians, settings
        self.nodes: list[tuple[int, int, int, int, int]] = []
        self.fitted = np.zeros(len(gradients))
        num_features = bins.codes.shape[1]
        self._flat = bins.codes + np.arange(num_features) * bins.width
        self._grow(np.arange(len(gradients)), settings.depth)

    def tree(self) -> Tree:
        feature, threshold, left, right, value = zip(*self.nodes, strict=True)
        return Tree(feature, threshold, left, right, value)

    def _grow(self, cases: Array, depth: int) -> int:
        number = len(self.nodes)
        self.nodes.append((-1, 0, 0, 0, 0))
        split = self._best_split(cases) if depth else None
        if split is None:
            step = self.gradients[cases].sum() / (self.hessians[cases].sum() + self.settings.penalty)
            value = _whole(self.settings.rate * step)
            self.fitted[cases] = value / UNIT
            self.nodes[number] = (-1, 0, 0, 0, value)
            return number
        feature, position = split
        goes_left = self.bins.codes[cases, feature] <= position
        left = self._grow(cases[goes_left], depth - 1)
        right = self._grow(cases[~goes_left], depth - 1)
        self.nodes[number] = (feature, int(self.bins.edges[feature][position]), left, right, 0)
        return number

    def _best_split(self, cases: Array) -> tuple[int, int] | None:
        """The feature and edge that lower the loss most; the first among equals."""
        width, penalty = self.bins.width, self.settings.penalty
        num_features = self.bins.codes.shape[1]
        flat = self._flat[cases].ravel()

        def sums(values: Array) -> Array:
            weights = np.repeat(values[cases], num_features)
            totals = np.bincount(flat, weights, minlength=num_features * width)
            return totals.reshape(num_features, width).cumsum(axis=1)

        gradients, hessians = sums(self.gradients), sums(self.hessians)
        whole_g, whole_h = gradients[:, -1:], hessians[:, -1:]
        right_h = whole_h - hessians
        gain = gradients**2 / (hessians + penalty) + (whole_g - gradients) ** 2 / (right_h + penalty)
        gain -= whole_g**2 / (whole_h + penalty)
        least = self.settings.min_weight * 0.25  # a Hessian is at most a quarter
        gain[(hessians < least) | (right_h < least)] = 0
        for feature, edges in enumerate(self.bins.edges):
            gain[feature, len(edges) :] = 0
        best = int(np.argmax(np.round(gain, 9)))
        return divmod(best, width) if gain.flat[best] > 1e-6 else None


def _whole(odds: float) -> int:
    """In millionths; three digits less are enough, and read better in a diff."""
    return 1000 * round(odds * UNIT / 1000)
