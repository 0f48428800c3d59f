"""Less is reserved: what a plan asks of the caching allocator, for as long as it is attached.

A caching allocator keeps what is freed, in segments whose sizes were those of the requests that made them. A step needs
other sizes in its blocks, at its head and in the optimizer's step, and what lives long lies between what does not: so
segments of one phase are of no use in the next, and up to half as much again is reserved as is ever allocated.
Segments that grow page by page can be given back page by page, too. So a plan may switch to those, and name a few
moments of the step at which all unused pages go back to the card, just before a phase that needs large pieces. Where
much would still be held, it has what stays on the device moved together (`compaction.py`).

NOTE [segments stay as they are]: a later plan of the same model may ask for nothing. What was allocated before lies in
segments that grow, though, and their unused pages are of no use to segments of the other kind: switching back would
hold both. So the settings stay until the model is detached, and such a plan's numbers are made for them
(`settings_in_force`). A plan that asks for nothing while another model's settings are on is made for those, too, so it
holds them as if it had asked: they stay when the other model is detached.

Of settings and releases neither tensors nor streams are touched, so there is nothing here to get wrong but time: the
host waits at such a moment for the device. `_planning/reserved/least_reserved.py` chooses the moments.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale._execute.compaction import Compaction
from memscale._hardware.allocator_environment import SMALL_PAGES, may_switch, own_settings
from memscale._plan import AllocatorUse, ReleasePoint
from memscale._torch import private
from memscale._torch.overrides import OwnHook, find_module, keep_copies_clean, undo_with

logger = logging.getLogger("memscale")

_AS_IT_COMES = "expandable_segments:False,large_segment_size_mb:20"
"""PyTorch's defaults of what `SMALL_PAGES` sets."""

STEP_BEGIN = ReleasePoint("forward")
"""The moment at which the model's forward begins."""
PHASES: tuple[Literal["forward", "after", "backward"], ...] = ("forward", "after", "backward")
"""The phases of moments, in the order in which a step comes to them."""

Reach = Callable[[ReleasePoint], None]
"""Called when a step has come to a moment."""

_lock = threading.Lock()
_num_users = 0


def attach(use: AllocatorUse, model: nn.Module, undo: contextlib.ExitStack, detached: contextlib.ExitStack) -> None:
    """Follow this until undone; settings until detached. See NOTE [segments stay as they are]."""
    if (use.settings or _num_users) and may_switch():
        _acquire()
        undo_with(model, _release, detached)
        if use.compacted_bytes:
            compaction = Compaction(model)
            compaction.attach(undo)
            watch(model, [STEP_BEGIN], compaction.reached, undo)
    elif use.settings:
        logger.warning(
            "The plan asks for the allocator settings %s, which are not set here: %s. It may reserve more than the "
            "plan says.",
            use.settings,
            f"this process has its own, {own_settings()}" if own_settings() else f"this is {sys.platform}",
        )
    watch(model, use.releases, _give_back, undo)


def settings_in_force() -> str:
    """What PyTorch's allocator of this process is set to: by the user, or by the plan of a model that is attached."""
    return SMALL_PAGES if _num_users else own_settings()


def _acquire() -> None:
    global _num_users
    with _lock:
        _num_users += 1
        if _num_users == 1:
            private.set_allocator_settings(SMALL_PAGES)


def _release() -> None:
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users == 0:
            private.set_allocator_settings(_AS_IT_COMES)


# ---- drivers that spill


def spills_silently() -> bool:
    """Whether the driver lets a full card use host memory instead of failing: on Windows, and on Linux inside it."""
    return sys.platform == "win32" or "microsoft" in platform.uname().release.lower()


def refuse_to_spill(device: torch.device, undo: contextlib.ExitStack) -> None:
    """Where the driver would spill, let the allocator take no more than the card has now, until undone.

    What spilled would be slower by an order of magnitude, and nobody would be told. So it is an error, which a step can
    be run again after.
    """
    set_fraction = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if set_fraction is None or not spills_silently():
        return
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    fraction = min(1.0, (free_bytes + torch.accelerator.memory_reserved(device)) / total_bytes)
    set_fraction(fraction, device)
    undo.callback(set_fraction, 1.0, device)


def _give_back(point: ReleasePoint) -> None:
    empty_cache()


def empty_cache() -> None:
    """Give back what the allocator of the device has cached, where there is a device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


# ---- the moments of a step


def points_of(module_fqns: Iterable[str]) -> tuple[ReleasePoint, ...]:
    """All moments that there are in a model with these modules beside its blocks."""
    return tuple(ReleasePoint(phase, fqn) for fqn in ("", *module_fqns) for phase in PHASES)


def watch(model: nn.Module, points: Iterable[ReleasePoint], reach: Reach, undo: contextlib.ExitStack) -> None:
    """Call `reach` at each of these moments of every training step, until undone."""
    for point in points:
        watch_module(find_module(model, point.module_fqn), point, reach, undo)


def watch_module(module: nn.Module, point: ReleasePoint, reach: Reach, undo: contextlib.ExitStack) -> None:
    """The same for one moment, of this module, whatever its name is now."""
    keep_copies_clean(module, undo)
    if point.phase == "forward":
        handle = module.register_forward_pre_hook(_BeforeForward(point, reach))
    elif point.phase == "after":
        handle = module.register_forward_hook(_AfterForward(point, reach))
    else:
        handle = module.register_forward_hook(_BeforeBackward(point, reach))
    undo.callback(handle.remove)


class _BeforeForward(OwnHook):
    def __init__(self, point: ReleasePoint, reach: Reach) -> None:
        self._point = point
        self._reach = reach

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._reach(self._point)


class _AfterForward(OwnHook):
    """A weight that visited the device for this module has left it: what comes next is not of its size."""

    def __init__(self, point: ReleasePoint, reach: Reach) -> None:
        self._point = point
        self._reach = reach

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._reach(self._point)


class _BeforeBackward(OwnHook):
    """The first node of a module's backward is that of its first output. A hook on the node changes no graph, where
    one on the module's backward would put a view of its own around the output."""

    def __init__(self, point: ReleasePoint, reach: Reach) -> None:
        self._point = point
        self._reach = reach

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        nodes = (leaf.grad_fn for leaf in tree_leaves(output) if _is_plain(leaf))
        node = next((node for node in nodes if node is not None), None)
        if node is not None:
            node.register_prehook(_Reached(weakref.ref(self)))

    def reached(self) -> None:
        self._reach(self._point)


def _is_plain(value: Any) -> bool:
    """Whether looking at it computes nothing: the logits of a tiled head would come to exist whole."""
    return type(value) is torch.Tensor or (isinstance(value, torch.Tensor) and private.is_fake(value))


class _Reached:
    """Hangs on a node of a graph, which may outlive the hook that put it there: then it does nothing."""

    def __init__(self, hook: weakref.ref[_BeforeBackward]) -> None:
        self._hook = hook

    def __call__(self, gradients: Any) -> None:
        hook = self._hook()
        if hook is not None:
            hook.reached()
