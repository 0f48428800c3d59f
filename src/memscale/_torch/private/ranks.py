"""What trains together: DDP, FSDP1, FSDP2 (`fully_shard`), the default process group, and `nn.DataParallel`.

Relies on: DDP's active module and its `_post_forward`, FSDP1's flat parameters, `nn.DataParallel`'s mark on its copies,
the states and parameter groups that `fully_shard` keeps, the store and the timeout of a process group.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def ddp_looks_at_outputs() -> tuple[type[Any], str]:
    """The method in which DDP looks whether outputs have a node, which it neither keeps nor hooks."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel, "_post_forward"


def active_ddp() -> Any:
    """The `DistributedDataParallel` whose forward is running; None outside of one."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


def is_data_parallel_copy(module: Any) -> bool:
    """Whether `nn.DataParallel` has made this module, for one forward on one of its devices."""
    return bool(getattr(module, "_is_replica", False))


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 has made this parameter a part of a flat one, or it is such a flat one."""
    from torch.distributed.fsdp import FlatParameter

    flat = (parameter, parameter._base)  # in a forward, parameters are views of the flat one
    return any(isinstance(one, FlatParameter) for one in flat) or bool(getattr(parameter, "_fsdp_flattened", False))


def fully_sharded(model: Any) -> dict[str, Any]:
    """The modules on which `fully_shard` was called, by their names."""
    sharding = sys.modules.get("torch.distributed.fsdp")  # not loaded: then nobody can have called it
    if sharding is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, sharding.FSDPModule)}


def _groups_of(module: Any) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups)


def unsharded_between(model: Any) -> list[str]:
    """Names of modules, but for the model itself, that `fully_shard` leaves whole between forward and backward."""
    found = {name: _groups_of(module) for name, module in fully_sharded(model).items() if name}
    return [name for name, groups in found.items() if any(not group._reshard_after_forward for group in groups)]


def gathers_otherwise(model: Any) -> bool:
    """Whether `fully_shard` was told to gather or reduce in another way than it does by itself, or over two meshes."""
    for module in fully_sharded(model).values():
        state = module._get_fsdp_state()
        if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
            return True
        for group in _groups_of(module):
            is_hybrid = any(len(parameter.sharded_param.placements) > 1 for parameter in group.fsdp_params)
            if is_hybrid or group._use_post_forward_mesh or getattr(group, "reduce_scatter_max_input_buffers", 1) != 1:
                return True
    return False


def why_not_rehearsed(model: Any) -> str:
    """What `fully_shard` was asked for that a rehearsal does not show; "": nothing."""
    for module in fully_sharded(model).values():
        state = module._get_fsdp_state()
        if not hasattr(state._pre_forward_hook_handle, "id"):
            return "fully_shard was called on several modules at once"
        policy = state._mp_policy
        if any((policy.param_dtype, policy.reduce_dtype, policy.output_dtype)):
            return "fully_shard computes in another precision"
        if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in _groups_of(module)):
            return "fully_shard offloads parameters"
    return ""


def plain_shells(model: Any, memo: dict[int, Any]) -> list[tuple[Any, Any]]:
    """Empty modules of the classes that `fully_shard` has replaced, each with its original; `memo` of a deep copy knows
    them, and leaves PyTorch's own records of sharding where they are."""
    shells = []
    for module in fully_sharded(model).values():
        state = module._get_fsdp_state()
        for group in _groups_of(module):
            memo.update((id(each), each) for each in (group, *group.fsdp_params))
        memo[id(state)] = state
        shell: Any = object.__new__(type(module).__mro__[2])
        memo[id(module)] = shell
        shells.append((module, shell))
    return shells


def fill_shell(module: Any, shell: Any, attributes: dict[str, Any]) -> None:
    """Give a shell these copied attributes of its original, but for what `fully_shard` has put there."""
    state = module._get_fsdp_state()
    vars(shell).update(attributes)
    for hooks, handle in (
        (("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"), state._pre_forward_hook_handle),
        (
            ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
            state._post_forward_hook_handle,
        ),
    ):
        for name in hooks:
            vars(shell)[name].pop(handle.id, None)


def meeting_store() -> Any:
    """The key-value store through which the processes of the default group have found each other."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def timeout_of(process_group: Any) -> Any:
    """How long a collective of this group waits for the other ranks, as a `timedelta`."""
    from torch.distributed import distributed_c10d

    try:
        backend = process_group._get_backend(torch.device("cpu"))
        return backend.options._timeout
    except (AttributeError, RuntimeError):
        return distributed_c10d.default_pg_timeout
