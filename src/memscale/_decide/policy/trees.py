"""Boosted trees as plain data, and the walk through them. Training them: `benchmarks.policy`.

Features, thresholds and leaves are integers, which a walk compares and adds: see NOTE [whole numbers] in features.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

UNIT = 1_000_000
"""Leaves are the logarithm of odds in millionths."""
_MOST = 2**53


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """Nodes by number, the root first; a leaf has feature -1."""

    feature: tuple[int, ...]
    threshold: tuple[int, ...]
    left: tuple[int, ...]
    """Where to go on if the feature is at most the threshold."""
    right: tuple[int, ...]
    value: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.feature)
        columns = (self.feature, self.threshold, self.left, self.right, self.value)
        if not size or any(len(column) != size for column in columns):
            raise ValueError("a tree needs the same number of entries in each column, and at least one")
        if any(type(entry) is not int or abs(entry) > _MOST for column in columns for entry in column):
            raise ValueError("a tree is made of integers of at most 2**53")
        for node, feature in enumerate(self.feature):
            # Children come after their parents, so every walk ends.
            if feature >= 0 and not (node < self.left[node] < size and node < self.right[node] < size):
                raise ValueError(f"node {node} of a tree leads nowhere")

    def at(self, row: Sequence[int]) -> int:
        node = 0
        while self.feature[node] >= 0:
            goes_left = row[self.feature[node]] <= self.threshold[node]
            node = self.left[node] if goes_left else self.right[node]
        return self.value[node]


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """A sum of trees, as the logarithm of odds in millionths."""

    base: int
    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        if type(self.base) is not int or abs(self.base) > _MOST:
            raise ValueError("a forest stands on an integer of at most 2**53")

    @property
    def num_features(self) -> int:
        """How many features a row must have."""
        return 1 + max((feature for tree in self.trees for feature in tree.feature), default=-1)

    def odds(self, row: Sequence[int]) -> int:
        """How likely it is: above 0 more likely than not."""
        return self.base + sum(tree.at(row) for tree in self.trees)
