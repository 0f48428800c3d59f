"""The values that a fake tensor carries: what they are, which tensors share them, and when they are not known any more.

See NOTE [values alias as tensors do] in `values/__init__.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memscale._profile.operator_costs import tensors_of
from memscale._torch import private

MAX_INTEGERS = 2**20
"""Integer and boolean tensors of at most so many elements carry values."""
MAX_FLOATS = 2**12
"""Floats too, if they are constants or buffers; what is computed from known numbers may be as large as integers."""


@dataclasses.dataclass(slots=True, eq=False)
class Cell:
    """What all values in one piece of memory have in common. See NOTE [values alias as tensors do]."""

    is_known: bool = True
    is_drawn: bool = False
    """Uniform random numbers are in them, of which the rehearsal tries several."""
    is_lucky: bool = False
    """Other random numbers are in them: they could as well be others."""
    origins: frozenset[str] = frozenset()
    """The inputs from whose values they were computed."""

    def take_from(self, others: Iterable[Cell]) -> None:
        """What was computed from others, or written with them, is as they are."""
        for other in others:
            self.is_drawn |= other.is_drawn
            self.is_lucky |= other.is_lucky
            self.origins |= other.origins


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """The contents of a fake tensor."""

    real: torch.Tensor
    cell: Cell


def keep_value(fake: torch.Tensor, real: torch.Tensor, origin: str | None = None) -> None:
    """Let a fake tensor carry the contents of the tensor that it was made from, if they are small.

    `origin`: the name of the input that it is.
    """
    if is_small(real) and real.device.type != "meta" and real.layout is torch.strided:
        set_value(fake, real.detach().to("cpu", copy=True), _cell_from(origin))


def assume_value(fake: torch.Tensor, number: int, origin: str | None = None) -> None:
    """Let a fake tensor of which nothing is known be this number everywhere, if it is small."""
    if is_small(fake):
        with private.real_tensors():
            set_value(fake, torch.full(tuple(fake.shape), number, dtype=fake.dtype), _cell_from(origin))


def _cell_from(origin: str | None) -> Cell:
    return Cell(origins=frozenset(() if origin is None else (origin,)))


def value_of(tensor: torch.Tensor) -> Value | None:
    """What a tensor carries; a real CPU tensor that meets fake ones (a table of the module) is its own value."""
    if private.is_fake(tensor):
        value: Value | None = tensor.__dict__.get("_memscale_value")
        if value is None or not value.cell.is_known or value.real.shape != tensor.shape:
            return None  # of a placeholder whose data was replaced (`parametrizations`): kernels trust shapes
        return value
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_small(tensor):
        return _private_value(tensor)
    return None


_PRIVATE: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
"""Copies of the storages of real tensors, beside the storages themselves, so that none is taken for another."""
MAX_PRIVATE_BYTES = 1 << 24


def _private_value(tensor: torch.Tensor) -> Value | None:
    """NOTE [private values]: a rehearsal may write to what a model keeps beside its modules. It writes to a copy, one
    for all views of a storage; the user's memory is never written to."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > MAX_PRIVATE_BYTES:
        return None
    key = private.storage_key(storage)
    with private.real_tensors():
        if key not in _PRIVATE:
            _PRIVATE[key] = (storage, storage.clone())
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(_PRIVATE[key][1], tensor.storage_offset(), tensor.size(), tensor.stride())
    return Value(copied, Cell())


@contextlib.contextmanager
def private_values() -> Iterator[None]:
    """Copies of real tensors live as long as one rehearsal. See NOTE [private values]."""
    _PRIVATE.clear()
    try:
        yield
    finally:
        _PRIVATE.clear()


def set_value(fake: torch.Tensor, real: torch.Tensor, cell: Cell) -> None:
    fake.__dict__["_memscale_value"] = Value(real, cell)
    fake.untyped_storage().__dict__["_memscale_cell"] = cell


def cell_of(fake: torch.Tensor) -> Cell | None:
    """The cell of what lies in the same memory and has values; None where nothing does."""
    cell: Cell | None = fake.untyped_storage().__dict__.get("_memscale_cell")
    return cell


def is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= limit(tensor)


def limit(tensor: torch.Tensor) -> int:
    return MAX_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MAX_INTEGERS


def attach(fakes: list[torch.Tensor], reals: list[torch.Tensor], inputs: list[Value], new: Cell) -> None:
    """Results carry their values. Views share the cell of what they are views of; others have one like `new`."""
    new.take_from([value.cell for value in inputs])
    given = {private.storage_key(value.real.untyped_storage()) for value in inputs}
    for fake, real in zip(fakes, reals, strict=True):
        if not private.is_fake(fake):
            continue
        cell = cell_of(fake)
        is_view = private.storage_key(real.untyped_storage()) in given
        if cell is None:
            with private.real_tensors_only():
                own = real.clone() if is_view else real
            set_value(fake, own, dataclasses.replace(new))
        elif is_view:
            cell.take_from([new])
            set_value(fake, real, cell)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What an operator writes to."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    is_write = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    names = [argument.name for argument, write in zip(arguments, is_write, strict=True) if write]
    return tensors_of([named.get(name) for name in names])


def spared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies in the place of real tensors that would be written to: a counter of a Python module,
    for one."""
    real = {id(each) for each in written(func, args, kwargs) if not private.is_fake(each)}
    if not real:
        return args, kwargs
    with private.real_tensors():
        spared: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda leaf: leaf.clone() if id(leaf) in real else leaf, (args, kwargs)
        )
    return spared


def forget_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What an operator has written to holds something unknown now."""
    for tensor in written(func, args, kwargs):
        cell = cell_of(tensor) if private.is_fake(tensor) else None
        if cell is not None:
            cell.is_known = False
