"""Which memory a tensor lies in, who else holds it, and tensors made over memory that is there.

Relies on: the address and the use count of a C++ storage, `Tensor.set_` inside a mode of fake tensors, and
`Tensor._make_wrapper_subclass`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from memscale._torch.private.fake_tensors import active_fake_mode, fake_mode_of, is_fake


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the C++ storage: the same for every Python object that shows it, unique while it lives."""
    return int(storage._cdata)


def wrapper_tensor(cls: type[Any], geometry: torch.Tensor, device: torch.device) -> Any:
    """A tensor of class `cls` with the shape, strides and dtype of `geometry` and no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        geometry.shape,
        strides=geometry.stride(),
        storage_offset=geometry.storage_offset(),
        dtype=geometry.dtype,
        device=device,
        storage_size=0,
    )


@runtime_checkable
class OverStorages(Protocol):
    """A mode of fake tensors that makes them over storages of others by itself."""

    def over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        device: torch.device,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor: ...


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor over this storage that is no view of another tensor."""
    active = active_fake_mode()
    if isinstance(active, OverStorages) and (device.type == "cpu" or device.index is not None):
        return active.over(storage, dtype, device, offset, shape, stride)
    tensor = torch.empty(0, dtype=dtype, device=device)
    if not is_fake(tensor):
        return tensor.set_(storage, offset, shape, stride)
    mode = fake_mode_of(tensor)
    cached, mode.cache_enabled = mode.cache_enabled, False  # its cache would keep the storage
    try:
        return tensor.set_(storage, offset, shape, stride)
    finally:
        mode.cache_enabled = cached


NUM_HOLDERS_IN_DISPATCH = 2
"""How many hold a storage when an operator sees a tensor on it that only the operator's caller holds."""


def num_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and other owners a storage has, this object among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))
