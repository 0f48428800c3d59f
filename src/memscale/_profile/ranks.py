"""`Ranks`: how processes that train one model together hold it, and which of PyTorch's wrappers says so.

DDP gives every rank the whole model, and buckets beside it through which gradients are averaged. FSDP2 (`fully_shard`)
gives every rank a share of parameters, gradients and optimizer state, and a layer's whole parameters for as long as it
computes (`sharding.py` says what that does to a step).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memscale._errors import MemScaleError, runs_in_threads
from memscale._torch import private
from memscale._units import MIB

BUCKET_BYTES = 25 * MIB
"""The size of DDP's buckets, unless it is told otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """How one rank holds a model. Without arguments: it trains alone."""

    num_ranks: int = 1
    shards: bool = False
    """Parameters, gradients and optimizer state are shared out among the ranks, as FSDP2 does it."""
    bucket_bytes: int = 0
    """Buckets through which gradients are averaged; there from the first step to the last."""
    keeps_gradients: bool = False
    """Gradients are views of the buckets, and so exist all the time."""

    @property
    def num_shards(self) -> int:
        return self.num_ranks if self.shards else 1

    def bucket_sizes(self) -> list[int]:
        """The sizes of the buckets that DDP makes by default."""
        whole, left = divmod(self.bucket_bytes, BUCKET_BYTES)
        return [BUCKET_BYTES] * whole + [left] * (left > 0)

    @classmethod
    def replicated(
        cls, model: nn.Module, num_ranks: int, ignored: Collection[str] = (), *, views: bool = False
    ) -> Ranks:
        """The ranks as DDP holds this model, but for what it ignores; `views`: `gradient_as_bucket_view`."""
        trained = {id(p): p.nbytes for n, p in model.named_parameters() if p.requires_grad and n not in ignored}
        return cls(num_ranks, bucket_bytes=0 if views else sum(trained.values()), keeps_gradients=views)


ALONE = Ranks()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The ranks that hold one model together, and the process group in which they meet at every training step."""

    ranks: Ranks
    process_group: Any


def find_group(model: nn.Module, replica: nn.Module | None = None) -> Group | None:
    """The group of a model that DDP or FSDP2 runs; None where it trains alone.

    `replica` is the DDP around it, where that is known. Otherwise it is known while its forward runs.
    """
    if not torch.distributed.is_available():
        return None
    around = replica if replica is not None else private.active_ddp()
    if isinstance(around, DistributedDataParallel) and around.module is model:
        group = around.process_group
        views = around.gradient_as_bucket_view
        return Group(Ranks.replicated(model, _size(group), around.parameters_to_ignore, views=views), group)
    shards_over = next((found for found in map(_shard_group, model.parameters()) if found is not None), None)
    return None if shards_over is None else Group(Ranks(_size(shards_over), shards=True), shards_over)


def _shard_group(parameter: torch.Tensor) -> Any:
    """The process group over which FSDP2 has shared this parameter out; None: it has not."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not loaded: then nobody can have made one
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    return next((mesh.get_group(n) for n, placement in enumerate(placements) if placement.is_shard()), None)


def _size(process_group: Any) -> int:
    return torch.distributed.get_world_size(process_group)


def refuse_flat_parameters(model: nn.Module) -> None:
    """FSDP1 puts the parameters of several modules into one flat tensor, of which blocks cannot be told apart."""
    sharding = sys.modules.get("torch.distributed.fsdp")  # not loaded: then nobody can have made one
    if sharding is None:
        return
    is_around = any(isinstance(module, sharding.FullyShardedDataParallel) for module in model.modules())
    if is_around or any(private.is_flattened(parameter) for parameter in model.parameters()):
        raise MemScaleError(
            f"{type(model).__name__} is sharded by FullyShardedDataParallel (FSDP1), which MemScale cannot plan: its "
            "parameters are parts of one flat tensor. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) "
            "instead, before or after memscale.wrap"
        )


def refuse_data_parallel(model: nn.Module) -> None:
    """`nn.DataParallel` copies a model to several devices in each forward; the copies run in threads of one process."""
    around = (module for module in model.modules() if isinstance(module, nn.DataParallel))
    if private.is_data_parallel_copy(model) or any(len(module.device_ids) > 1 for module in around):
        raise runs_in_threads(type(model).__name__)
