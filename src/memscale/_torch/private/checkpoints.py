"""Checkpoints through `torch.utils.checkpoint`: those that a model has of its own, and what a selective one keeps.

Relies on: the generator behind a non-reentrant checkpoint, the autograd function behind a reentrant one, the stack of
hooks on saved tensors, of which only the top is asked, and the two modes of a selective checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memscale._torch.private.dispatch import below_mode, run_below_mode


class SeenThrough(threading.local):
    """Inside what this thread's checkpoints are seen through: names, the innermost last. Outside there are none."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.names) and torch.is_grad_enabled()  # without gradients nothing is computed again


def _only_called() -> Iterator[None]:
    """What a checkpoint steps through before and after it calls its function, which does nothing. An error of the
    function, also the one that ends an outer recompute early, is thrown into it and comes out again."""
    yield


def see_through_checkpoints(inside: SeenThrough, refuse: Callable[[str], None]) -> Callable[[], None]:
    """While a thread is `inside`, `torch.utils.checkpoint` computes its function as if it were not there.

    What would not be the same is given to `refuse`, by its name. Returns what undoes that.
    """
    from torch.utils import checkpoint

    module: Any = checkpoint
    before = module._checkpoint_without_reentrant_generator

    def start(fn: Any, preserve: bool = True, context_fn: Any = module.noop_context_fn, *args: Any, **kw: Any) -> Any:
        if not inside:
            return before(fn, preserve, context_fn, *args, **kw)
        if context_fn is not module.noop_context_fn:
            refuse("context_fn")
        return _only_called()

    def apply(*args: Any, **kwargs: Any) -> Any:
        if inside:
            refuse("use_reentrant=True")
        return super(kind, kind).apply(*args, **kwargs)

    kind = module.CheckpointFunction
    module._checkpoint_without_reentrant_generator = start
    kind.apply = apply

    def restore() -> None:
        if module._checkpoint_without_reentrant_generator is start:
            module._checkpoint_without_reentrant_generator = before
        if vars(kind).get("apply") is apply:
            del kind.apply

    return restore


def selective_contexts(policy: Any, may_keep: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return PyTorch's two contexts of a selective checkpoint, which number only operators that it may keep.

    They number all of them otherwise, and a recompute must call as many as its forward did. That does not hold under
    autocast: where a block is called again under one, its forward finds the casts of its weights made.
    """
    from torch.utils import checkpoint

    class Keeping(checkpoint._CachingTorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if may_keep(func):
                with below_mode(func, args):
                    return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            output = run_below_mode(func, args, kwargs or {})
            if func not in checkpoint.SAC_IGNORED_OPS:
                context = checkpoint.SelectiveCheckpointContext(is_recompute=False, op_output=output)
                policy(context, func, *args, **(kwargs or {}))
            return output

    class Reading(checkpoint._CachedTorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if may_keep(func):
                with below_mode(func, args):
                    return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return run_below_mode(func, args, kwargs or {})

    storage: dict[Any, dict[int, Any]] = collections.defaultdict(dict)
    return Keeping(policy, storage), Reading(None, storage)


@contextlib.contextmanager
def outside_checkpoints() -> Iterator[None]:
    """What is computed in here is not seen by checkpoints that are under way: it is no part of what they compute."""
    stack, taken = torch._C._autograd, []
    while (top := stack._top_saved_tensors_default_hooks(True)) is not None and _is_of_checkpoint(top[0]):
        stack._pop_saved_tensors_default_hooks()
        taken.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            stack._push_saved_tensors_default_hooks(pack, unpack)


def saves_are_hooked() -> bool:
    """Whether somebody is handed what is saved for backward now: a checkpoint, an offload, a user's own hooks."""
    return saved_tensors_hooks_in_use() is not None


def saved_tensors_hooks_in_use() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """What packs and unpacks a tensor that is saved for backward now; None: it is kept as it is."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def strange_contexts() -> str | None:
    """What the user has put around all operators of this thread: a mode that sees them, or what they save."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
            if type(mode).__module__.partition(".")[0] not in _OURS and type(mode).__name__ != "DeviceContext":
                return f"a mode is in force that sees all operators ({type(mode).__name__})"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and str(getattr(hooks[0], "__module__", "")).partition(".")[0] not in _OURS:
        return "what is saved for backward goes through hooks (a checkpoint around the model, saved_tensors_hooks)"
    return None


_OURS = ("memscale", "simgpu")


def _is_of_checkpoint(hook: Any) -> bool:
    return getattr(hook, "__module__", "") in ("torch.utils.checkpoint", "memscale.techniques.recompute.saved_writes")
