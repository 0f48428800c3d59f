"""Which device a pickled tensor says it lay on.

Relies on: a tensor is pickled as a function and arguments, of which one is its storage, and a parameter as one of which
one is its `data`; `torch.save` writes a storage's `_fake_device`, where it has one, in place of its device; and
`torch.storage._load_from_bytes` reads a file of `torch.save`.
"""

from __future__ import annotations

import io
from typing import Any

import torch

AnyStorage = torch.TypedStorage | torch.UntypedStorage


def pickled_as_on(device: torch.device, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `tensor.__reduce_ex__` has returned, for a tensor that is to lie on `device` where it is read. No memory is
    taken there: a file has the values and the name of a device."""
    build, arguments, *rest = reduced
    return (build, tuple(_placed(argument, device) for argument in arguments), *rest)


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
        shown = _said_to_be_on(device, value)
        shown.__reduce_ex__ = _InBytes(device, value)
        return shown
    if isinstance(value, torch.Tensor):  # a parameter's data; it has a Python object of its own, which nobody else has
        value.__reduce_ex__ = _Data(device, value.detach())  # type: ignore[method-assign]
    return tuple(_placed(each, device) for each in value) if type(value) is tuple else value


def _said_to_be_on(device: torch.device, storage: AnyStorage) -> Any:
    """The same storage behind another Python object, which says that it is on `device`."""
    shown: Any
    if isinstance(storage, torch.TypedStorage):
        shown = torch.TypedStorage(wrap_storage=storage._untyped_storage, dtype=storage.dtype, _internal=True)
    else:
        shown = storage.clone()  # an untyped storage has one Python object
    shown._fake_device = device
    return shown


class _InBytes:
    """How a storage is pickled outside of `torch.save`, which would take a storage as it is."""

    def __init__(self, device: torch.device, storage: AnyStorage) -> None:
        self._device, self._storage = device, storage

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        file = io.BytesIO()
        torch.save(_said_to_be_on(self._device, self._storage), file)
        return torch.storage._load_from_bytes, (file.getvalue(),)


class _Data:
    """How the data of a parameter are pickled."""

    def __init__(self, device: torch.device, data: torch.Tensor) -> None:
        self._device, self._data = device, data

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        return pickled_as_on(self._device, self._data.__reduce_ex__(protocol))
