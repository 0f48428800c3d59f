"""Says when a PyTorch release changes what `_torch/private/hooks.py` relies on."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memscale._torch import private


def test_hooks_of_every_module_are_seen() -> None:
    register = nn.modules.module.register_module_forward_pre_hook
    handle = register(lambda module, args: None)
    kinds = [kind for kind, hooks in private.global_module_hooks() if hooks]
    handle.remove()
    assert kinds == ["forward"]
    assert not any(hooks for _, hooks in private.global_module_hooks())


def test_hooks_of_every_optimizer_are_seen() -> None:
    register = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    handles = [each(lambda optimizer, args, kwargs: None) for each in register]
    assert [handle.id in hooks for handle, hooks in zip(handles, private.global_step_hooks(), strict=True)] == [
        True,
        True,
    ]
    for handle in handles:
        handle.remove()


def test_hooks_of_one_optimizer_are_in_order() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    steps = [optimizer.register_step_pre_hook(lambda *args: None) for _ in range(2)]
    assert list(private.step_pre_hooks(optimizer)) == [handle.id for handle in steps]
    first, last = (optimizer.register_load_state_dict_pre_hook(lambda *args: None) for _ in range(2))
    assert not private.is_last_load_hook(optimizer, first.id)
    assert private.is_last_load_hook(optimizer, last.id)
