"""Boosted trees as plain data, and the walk through them. Training them: `benchmarks.policy`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """Nodes by number, the root first; a leaf has feature -1."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    """Where to go on if the feature is at most the threshold."""
    right: tuple[int, ...]
    value: tuple[float, ...]

    def __post_init__(self) -> None:
        size = len(self.feature)
        if not size or any(len(column) != size for column in (self.threshold, self.left, self.right, self.value)):
            raise ValueError("a tree needs the same number of entries in each column, and at least one")
        for node, feature in enumerate(self.feature):
            # Children come after their parents, so every walk ends.
            if feature >= 0 and not (node < self.left[node] < size and node < self.right[node] < size):
                raise ValueError(f"node {node} of a tree leads nowhere")

    def at(self, row: Sequence[float]) -> float:
        node = 0
        while self.feature[node] >= 0:
            goes_left = row[self.feature[node]] <= self.threshold[node]
            node = self.left[node] if goes_left else self.right[node]
        return self.value[node]


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """A sum of trees, as the logarithm of odds."""

    base: float
    trees: tuple[Tree, ...]

    def probability(self, row: Sequence[float]) -> float:
        odds = self.base + sum(tree.at(row) for tree in self.trees)
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, odds))))
