"""What code can change about a tensor without writing to its values: attributes, version, `requires_grad`, `.grad`.

    marks = TensorMarks(tensor)
    ...                         # runs on fake tensors, where a real one is read, and never written to
    marks.put_back()

A rehearsal computes with copies of what the model holds. A tensor that its code reaches otherwise (through a closure, a
global) is the user's own: its values are safe there, since operators on it give fake tensors, and this is the rest.
"""

from __future__ import annotations

import torch

from memscale._torch import private
from memscale._torch.carried_attributes import attributes_of
from memscale._torch.snapshots import version_of


class TensorMarks:
    """See the module's docstring."""

    def __init__(self, tensor: torch.Tensor) -> None:
        attributes = attributes_of(tensor)
        self._tensor = tensor
        self._attributes = None if attributes is None else dict(attributes)
        self._version = version_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None

    def put_back(self) -> None:
        tensor = self._tensor
        if self._attributes is not None:
            now = vars(tensor)
            for name in now.keys() - self._attributes.keys():
                del now[name]
            now.update(self._attributes)
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.is_leaf and tensor.grad is not self._gradient:
            tensor.grad = self._gradient
        if version_of(tensor) != self._version:
            private.set_version(tensor, self._version)
