"""Stores and transfers as tests need them: every way that bytes can take."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import torch

from memscale.techniques.offload.store.disk import DiskStore
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.store.stores import Store, TieredStore
from memscale.techniques.offload.transfer.transfers import Transfers

WAYS = (
    "simgpu host async",
    "simgpu host async one stream",
    "simgpu host sync",
    "simgpu disk async",
    "simgpu disk sync",
    "simgpu tiered async",
    "cpu disk async",
    "cpu disk sync",
    "cpu buffered async",
)


def device_of(way: str) -> str:
    return way.split()[0]


@contextlib.contextmanager
def opened(way: str, directory: pathlib.Path, **settings: Any) -> Iterator[Transfers]:
    """Transfers over a store, closed and checked for leaks at the end."""
    store = make_store(way, directory)
    if "one stream" in way:
        settings["num_streams"] = 1
    transfers = Transfers(device_of(way), store, asynchronous="async" in way, **settings)
    try:
        yield transfers
        transfers.settle()
        for leaf in (*store.leaves(), transfers.staging):
            leaf.sweep()
            assert leaf.counters.held_bytes == 0, f"{leaf.name}: {leaf.counters.held_bytes} bytes are still held"
    finally:
        transfers.close()
        store.close()
    assert list(directory.iterdir()) == []


def make_store(way: str, directory: pathlib.Path) -> Store:
    pinned = device_of(way) != "cpu"
    match way.split()[1]:
        case "host":
            return HostStore(1 << 26, pinned=pinned)
        case "disk":
            return DiskStore(directory, verify=True)
        case "buffered":
            return DiskStore(directory, verify=True, direct=False)
        case _:
            return TieredStore(HostStore(1 << 16, pinned=pinned), DiskStore(directory, verify=True))


def on_host(tree: Any) -> Any:
    """Copies of the tensors of nested containers on the CPU, for comparing."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    return [on_host(value) for value in tree] if isinstance(tree, list | tuple) else tree


def same(first: Any, second: Any) -> bool:
    """Equal to the last bit, types and dtypes included."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and torch.equal(first.detach().cpu(), second.detach().cpu())
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
