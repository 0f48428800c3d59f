"""Which store tensors wait in: host memory beside an accelerator, and the disk below it or beside a CPU."""

from __future__ import annotations

import contextlib

import torch

from memscale._config import AsyncOffloadConfig
from memscale._errors import PlanError
from memscale.techniques.offload.disk import DiskStore
from memscale.techniques.offload.host import HostStore
from memscale.techniques.offload.stores import ShapeStore, Store, TieredStore
from memscale.techniques.offload.transfers import Transfers


def open_tier(
    device: torch.device,
    undo: contextlib.ExitStack,
    *,
    is_fake: bool,
    asynchronous: bool,
    async_config: AsyncOffloadConfig,
    host_budget_bytes: int | None,
    offload_dir: str | None,
) -> Transfers:
    """The next tier of this device and what moves tensors there, until undone."""
    store = _choose_store(device, is_fake, asynchronous, host_budget_bytes, offload_dir)
    undo.callback(store.close)
    transfers = Transfers(
        device,
        store,
        asynchronous=asynchronous,
        num_streams=async_config.num_transfer_streams or 2,
        staging_bytes=async_config.pinned_pool_bytes,
    )
    undo.callback(transfers.close)
    return transfers


def _choose_store(
    device: torch.device,
    is_fake: bool,
    asynchronous: bool,
    host_budget_bytes: int | None,
    offload_dir: str | None,
) -> Store:
    if is_fake:
        return ShapeStore()
    if device.type == "cpu":
        if offload_dir is None:
            raise PlanError("the next tier of a CPU is the disk: set offload_dir")
        return DiskStore(offload_dir)
    host = HostStore(host_budget_bytes, pinned=asynchronous)
    return host if offload_dir is None else TieredStore(host, DiskStore(offload_dir))
