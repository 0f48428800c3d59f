"""An optimizer's state, and the scale of gradients, follow parameters to another device.

NOTE [scale on the host]: `torch.amp.GradScaler` copies its scale to the devices of the gradients without blocking and
uses the copy at once. A copy to the host is a race then, which goes wrong rarely and silently on real devices. While
gradients live on the host, such copies block in the scaler's replicator. Fused optimizers copy the scale themselves, so
they are given a copy on the host. They skip a step if `found_inf` is 1, but the scaler passes the sum over devices,
which is 2 if two of them overflowed: they are given 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.interception import intercept
from memscale._torch.optimizer_steps import living_optimizers, watch_steps
from memscale._torch.overrides import undo_with
from memscale.techniques.offload.parameters.state_placement import Followers


def follow_all(followers: Followers) -> None:
    """Move the state of every optimizer of the model in this process to where the parameters are now."""
    followers.follow_all(living_optimizers())


def _blocking_get(get: Callable[..., torch.Tensor], replicator: Any, device: torch.device) -> torch.Tensor:
    copy = get(replicator, device)
    if device.type == "cpu" and replicator.master.device.type != "cpu":
        torch.accelerator.current_stream(replicator.master.device).synchronize()
    return copy


def attach(model: nn.Module, undo: contextlib.ExitStack) -> Followers:
    """Let state follow parameters and copy scales safely, until undone or until the model is gone."""
    followers = Followers(model)
    undo.callback(followers.release)
    undo_with(model, watch_steps(followers), undo)
    undo_with(model, intercept(private.scale_replicator(), "get", _blocking_get), undo)
    return followers
