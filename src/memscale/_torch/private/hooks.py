"""Hooks that others have registered, on every module, on every optimizer, or on one optimizer.

Relies on: the dictionaries in which `nn.Module` and `Optimizer` keep them.
"""

from __future__ import annotations

from typing import Any


def global_module_hooks() -> list[tuple[str, dict[int, Any]]]:
    """The hooks that run for every module: (forward or backward, hooks by id)."""
    from torch.nn.modules import module

    return [
        ("forward", module._global_forward_hooks),
        ("forward", module._global_forward_pre_hooks),
        ("backward", module._global_backward_hooks),
        ("backward", module._global_backward_pre_hooks),
    ]


def step_pre_hooks(optimizer: Any) -> Any:
    """An optimizer's own step pre-hooks, in the order in which they run."""
    return optimizer._optimizer_step_pre_hooks


def global_step_hooks() -> list[dict[int, Any]]:
    """The hooks that run before and after the step of every optimizer, by id."""
    from torch.optim import optimizer

    return [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]


def is_last_load_hook(optimizer: Any, hook_id: int) -> bool:
    """Whether this is the last of an optimizer's load_state_dict pre-hooks."""
    return bool(next(reversed(optimizer._optimizer_load_state_dict_pre_hooks)) == hook_id)
