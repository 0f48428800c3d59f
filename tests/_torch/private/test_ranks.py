"""Says when a PyTorch release changes what `_torch/private/ranks.py` relies on."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, MixedPrecisionPolicy, fully_shard

from memscale._torch import private


def test_ddp_looks_for_nodes_of_outputs_in_one_method():
    kind, name = private.ddp_looks_at_outputs()
    assert name in kind.forward.__code__.co_names
    assert "grad_fn" in getattr(kind, name).__code__.co_names


@pytest.fixture
def alone() -> Iterator[torch.distributed.ProcessGroup]:
    """A process group of one process."""
    timeout = datetime.timedelta(seconds=123)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_says_how_long_it_waits_and_where_its_processes_met(alone: Any) -> None:
    assert private.timeout_of(alone) == datetime.timedelta(seconds=123)
    store = private.meeting_store()
    store.set("ours", "7")
    assert store.get("ours") == b"7"


def test_ddp_is_active_while_its_forward_runs(alone: Any) -> None:
    seen: list[Any] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *args: seen.append(private.active_ddp()))
    replica = nn.parallel.DistributedDataParallel(model)
    replica(torch.ones(1, 2))
    assert seen == [replica]
    assert private.active_ddp() is None


def test_the_copies_that_data_parallel_makes_are_known() -> None:
    model = nn.Linear(2, 2)
    assert not private.is_data_parallel_copy(model)
    assert private.is_data_parallel_copy(model._replicate_for_data_parallel())


def test_parameters_that_fsdp1_has_flattened_are_known() -> None:
    weight = nn.Parameter(torch.ones(4))
    flat = FlatParameter._make_subclass(FlatParameter, torch.ones(4), False)
    assert not private.is_flattened(weight)
    assert private.is_flattened(flat)
    assert private.is_flattened(flat[:2])


def sharded() -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_what_fully_shard_was_called_on_is_found(alone: Any) -> None:
    model = sharded()
    assert list(private.fully_sharded(model)) == ["", "0", "1"]
    assert not private.fully_sharded(nn.Linear(2, 2))
    assert private.unsharded_between(model) == ["0"]


def test_what_fully_shard_does_beside_sharding_is_named(alone: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    assert private.why_not_rehearsed(sharded()) == ""
    halves = fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert "precision" in private.why_not_rehearsed(halves)
    several = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([several[0], several[1]], mesh=mesh)
    assert "several modules" in private.why_not_rehearsed(several)


def test_a_shell_is_of_the_class_before_fully_shard_and_has_none_of_its_hooks(alone: Any) -> None:
    model, memo = sharded(), {}
    shells = private.plain_shells(model, memo)
    assert [type(shell) for _, shell in shells] == [nn.Sequential, nn.Linear, nn.Linear]
    assert all(memo[id(module)] is shell for module, shell in shells)
    for module, shell in shells:
        private.fill_shell(module, shell, {name: copy.copy(value) for name, value in vars(module).items()})
        assert module._forward_pre_hooks
        assert module._forward_hooks
        assert not shell._forward_pre_hooks
        assert not shell._forward_hooks


def test_what_fully_shard_was_told_to_do_otherwise_is_known(alone: Any) -> None:
    def sharded(**options: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for part in model:
            fully_shard(part, **options)
        return fully_shard(model, **options)

    assert not private.gathers_otherwise(nn.Linear(2, 2))
    assert not private.gathers_otherwise(sharded())
    ahead = sharded()
    ahead[0].set_modules_to_forward_prefetch([ahead[1]])
    assert private.gathers_otherwise(ahead)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    assert private.gathers_otherwise(sharded(mesh=mesh))
