"""Chooses the store in which tensors wait: host memory for an accelerator, and the disk below it or for a CPU."""

from __future__ import annotations

import contextlib
import logging

import torch

from memscale._config import AsyncOffloadConfig
from memscale._errors import PlanError
from memscale.techniques.offload.store.disk import DiskStore
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.store.stores import ShapeStore, Store, TieredStore
from memscale.techniques.offload.transfer.transfers import Transfers

logger = logging.getLogger("memscale")


def open_tier(
    device: torch.device,
    undo: contextlib.ExitStack,
    *,
    is_fake: bool,
    asynchronous: bool,
    async_config: AsyncOffloadConfig,
    host_budget_bytes: int | None,
    offload_dir: str | None,
    verify: bool = False,
) -> Transfers:
    """Return the next tier of this device and the transfers that move tensors there, until undone.

    `verify`: what comes back from the disk is compared with what was written, by a checksum.
    """
    if asynchronous and not has_streams(device):
        logger.info("%s has no streams: transfers block", device)
        asynchronous = False
    store = _choose_store(device, is_fake, asynchronous, host_budget_bytes, offload_dir, verify=verify)
    undo.callback(store.close)
    transfers = Transfers(
        device,
        store,
        asynchronous=asynchronous,
        num_streams=async_config.num_transfer_streams or num_copy_engines(device),
        window_bytes=async_config.window_bytes,
        staging_bytes=async_config.pinned_pool_bytes,
        debug=async_config.debug,
    )
    undo.callback(transfers.close)
    return transfers


def has_streams(device: torch.device) -> bool:
    """Whether copies can run beside compute: on side streams of an accelerator, or in threads beside a CPU."""
    if device.type in ("cpu", "meta"):
        return True
    try:
        torch.Stream(device=device)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def num_copy_engines(device: torch.device) -> int:
    """Return 2, a stream for each direction, or 1 if the device says that its copies take turns anyway."""
    if device.type in ("cpu", "meta"):
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    return 1 if getattr(properties, "async_engine_count", 2) == 1 else 2


def set_host_budget(store: Store, host_budget_bytes: int | None) -> None:
    """Bound the bytes that the host's tier takes from now on. What it holds stays."""
    for leaf in store.leaves():
        if isinstance(leaf, HostStore):
            leaf.budget_bytes = host_budget_bytes


def _choose_store(
    device: torch.device,
    is_fake: bool,
    asynchronous: bool,
    host_budget_bytes: int | None,
    offload_dir: str | None,
    *,
    verify: bool,
) -> Store:
    if is_fake:
        return ShapeStore()
    if device.type == "cpu":
        if offload_dir is None:
            raise PlanError("the next tier of a CPU is the disk: set offload_dir")
        return DiskStore(offload_dir, verify=verify)
    host = HostStore(host_budget_bytes, pinned=asynchronous)
    return host if offload_dir is None else TieredStore(host, DiskStore(offload_dir, verify=verify))
