"""The tensors of what a model returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a tree, also those in dataclasses, which PyTorch's trees take for leaves."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
