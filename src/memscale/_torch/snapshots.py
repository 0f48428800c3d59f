"""Values at one moment: what a container holds, what a tensor holds, where a random generator stands."""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from memscale._torch import private

KeyT = TypeVar("KeyT", bound=Hashable)

ABSENT = object()
"""Stands for what is not there."""
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)
_MAX_DEPTH = 4
"""Containers in containers are looked into so deep."""
_SMALL_BYTES = 1 << 20
"""Larger tensors that attributes hold are not copied on the chance that they change."""
_UNVERSIONED = -1
"""Inference tensors have no version."""


# ---- versions


def version_of(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return _UNVERSIONED
    return value._version


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return [_UNVERSIONED if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(tensor) for tensor in tensors]


# ---- attributes


class KeptTensor:
    """A tensor that an attribute holds, and a copy in case that it is changed in place."""

    def __init__(self, tensor: torch.Tensor, *, may_be_large: bool) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        is_copied = may_be_large or tensor.nbytes <= _SMALL_BYTES
        self.copy = tensor.detach().clone() if is_copied else None

    @property
    def is_changed(self) -> bool:
        return version_of(self.tensor) != self.version

    @property
    def is_lost(self) -> bool:
        return self.is_changed and self.copy is None

    def stand_in(self) -> torch.Tensor:
        if not self.is_changed:
            return self.tensor
        assert self.copy is not None
        return self.copy.clone()

    def put_back(self) -> torch.Tensor:
        """The tensor itself, with the values that it had, so that others which share its memory have them, too."""
        if self.is_changed:
            if self.copy is None or self.tensor.requires_grad:
                raise RuntimeError("a tensor that an attribute holds was changed in place, and cannot be put back")
            with torch.no_grad():
                self.tensor.copy_(self.copy)
        return self.tensor


def snapshot(value: Any, *, may_be_large: bool = True) -> Any:
    """Containers and tensors are changed in place, so what they hold is remembered; else the object itself."""
    if isinstance(value, torch.Tensor):
        return KeptTensor(value, may_be_large=may_be_large)
    return containers_copied(value)


def stand_in_for(kept: Any) -> Any:
    """What a snapshot was taken of, free to be changed."""
    return kept.stand_in() if isinstance(kept, KeptTensor) else containers_copied(kept)


def containers_copied(value: Any, depth: int = 0) -> Any:
    """The value, with containers replaced by copies that hold the same."""
    if type(value) not in _CONTAINERS or depth > _MAX_DEPTH:
        return value
    copied = copy.copy(value)
    if isinstance(copied, set):
        return copied
    items = copied.items() if isinstance(copied, dict) else enumerate(copied)
    for key, item in list(items):
        if type(item) in _CONTAINERS:
            copied[key] = containers_copied(item, depth + 1)
    return copied


def num_elements_in(values: Iterable[Any], most: int, depth: int = 0) -> int:
    """How many elements the containers among these have, those in containers included; counted up to `most`."""
    found = 0
    for value in values:
        if found <= most and type(value) in _CONTAINERS and depth <= _MAX_DEPTH:
            found += len(value)
            inner = value.values() if isinstance(value, dict) else value
            found += num_elements_in(inner, most - found, depth + 1) if found <= most else 0
    return found


def is_unchanged(before: Any, after: Any, depth: int = 0) -> bool:
    """Whether a value is as its snapshot."""
    if isinstance(before, KeptTensor):
        return before.tensor is after and not before.is_changed
    if type(before) not in _CONTAINERS or type(before) is not type(after) or depth > _MAX_DEPTH:
        return before is after
    if isinstance(before, set):
        return len(before) == len(after) and before <= after
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            is_unchanged(value, after[key], depth + 1) for key, value in before.items()
        )
    return len(before) == len(after) and all(is_unchanged(a, b, depth + 1) for a, b in zip(before, after, strict=True))


# ---- buffers

_Flats: TypeAlias = dict[tuple[int, torch.dtype], torch.Tensor]


def clones_of(values: dict[KeyT, Any], shared: frozenset[KeyT]) -> dict[KeyT, Any]:
    """Tensors that share memory share it in their clones too."""
    if not shared:
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    flats: _Flats = {}
    cloned = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            value = _clone_view(value, flats) if key in shared else value.clone()
        cloned[key] = value
    return cloned


def groups_sharing_memory(values: dict[KeyT, torch.Tensor]) -> list[list[KeyT]]:
    """The keys, those together whose tensors share memory."""
    groups: dict[int, list[KeyT]] = {}
    for key, value in values.items():
        place = _storage_of(value) if value.layout is torch.strided else id(value)
        groups.setdefault(place, []).append(key)
    return list(groups.values())


def _storage_of(tensor: torch.Tensor) -> int:
    return private.storage_key(tensor.untyped_storage())


def _clone_view(value: torch.Tensor, flats: _Flats) -> torch.Tensor:
    key = (_storage_of(value), value.dtype)
    if key not in flats:
        num_elements = value.untyped_storage().nbytes() // value.element_size()
        flats[key] = value.detach().as_strided((num_elements,), (1,), 0).clone()
    return flats[key].as_strided(value.size(), value.stride(), value.storage_offset())


def is_small_vector(buffer: torch.Tensor) -> bool:
    """Whether it is a number or a vector such as batch norms write to, and small enough to be copied at any time."""
    return buffer.dim() <= 1 and buffer.layout is torch.strided and buffer.nbytes <= _SMALL_BYTES


def may_change_silently(buffer: torch.Tensor) -> bool:
    """Kernels that write without telling autograd are batch norms, and they write vectors; values would tell."""
    return _has_values(buffer) or buffer.dim() <= 1


def has_same_values(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    return _has_values(before) and torch.equal(before, after)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and not private.is_fake(tensor)


# ---- random generators


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers from a state that can be read and set; the system's own have none."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and isinstance(value, (numpy_random.Generator, numpy_random.RandomState))


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
