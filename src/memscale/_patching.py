"""Overrides on a user's modules that can be taken off again, in any order, and that copies do not inherit.

PyTorch's hooks come first; this is for what hooks cannot do: re-entering a forward, and keeping MemScale out of
copies. See NOTE [override chain] and NOTE [clean copies].
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

EXECUTOR_ATTRIBUTE = "_memscale_executor"
OWN_ATTRIBUTES = frozenset({EXECUTOR_ATTRIBUTE, "forward", "__getstate__"})
"""What a wrapped module may carry of ours."""


class OwnHook:
    """Base of every hook that MemScale registers on a module: copies of the module leave it behind."""


class MethodOverride:
    """Stands in for one method of one module.

    NOTE [override chain]: several overrides may sit on one module (nested wraps). Each knows what it replaced; taking
    one off relinks its neighbours, and one that is buried under a stranger's override turns itself into a pass-through.
    No override holds its module strongly, so a wrapped model dies with its last reference.
    """

    method: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._replaced: Callable[..., Any] | None = vars(module).get(self.method)
        self.active = True

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "an override is only called through its module"
        return module

    def inner(self) -> Callable[..., Any]:
        """What this override replaced."""
        if self._replaced is not None:
            return self._replaced
        method: Callable[..., Any] = getattr(type(self.module), self.method).__get__(self.module)
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.inner()(*args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def __signature__(self) -> Any:
        import inspect  # frameworks ask a forward for its parameters

        return inspect.signature(self.inner())

    def attach(self, undo: contextlib.ExitStack) -> None:
        vars(self.module)[self.method] = self
        undo.callback(self.detach)
        keep_copies_clean(self.module, undo)

    def detach(self) -> None:
        self.active = False
        module = self._module()
        if module is None:
            return
        top = vars(module).get(self.method)
        if top is self:
            _restore(module, self.method, self._replaced)
            return
        while isinstance(top, MethodOverride):
            if top._replaced is self:
                top._replaced = self._replaced
                return
            top = top._replaced


class ForwardOverride(MethodOverride):
    """Stands in for one module's forward."""

    method = "forward"


def _restore(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        del vars(module)[name]
    else:
        vars(module)[name] = value


class _CleanState:
    """A module's `__getstate__` while it carries anything of ours.

    NOTE [clean copies]: `copy.deepcopy`, `pickle` and `torch.save` ask an object for its state through `__getstate__`,
    looked up on the instance. Ours leaves out what MemScale added, so copies are plain, working models.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.users = 0

    def __call__(self) -> dict[str, Any]:
        module = self._module()
        assert module is not None
        own = getattr(type(module), "__getstate__", None)
        is_custom = own is not None and own is not getattr(object, "__getstate__", None)
        state = dict(own(module)) if is_custom and own is not None else dict(vars(module))
        for name in ("__getstate__", EXECUTOR_ATTRIBUTE):
            state.pop(name, None)
        _drop_overrides(state)
        _drop_hooks(state)
        return state


def _drop_overrides(state: dict[str, Any]) -> None:
    for name, value in [*state.items()]:
        while isinstance(value, MethodOverride):
            value = value._replaced
        if value is None and isinstance(state[name], MethodOverride):
            del state[name]
        else:
            state[name] = value


def _drop_hooks(state: dict[str, Any]) -> None:
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        ours = {key for key, hook in state[name].items() if isinstance(hook, OwnHook)}
        if not ours:
            continue
        for related in [key for key in state if key.startswith(name)] + ["_forward_hooks_always_called"]:
            table = state[related]
            state[related] = type(table)((key, value) for key, value in table.items() if key not in ours)


def keep_copies_clean(module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Make copies of this module plain, as long as anyone of ours is on it."""
    state = vars(module).get("__getstate__")
    if not isinstance(state, _CleanState):
        state = vars(module)["__getstate__"] = _CleanState(module)
    state.users += 1
    undo.callback(_release, weakref.ref(module), state)


def _release(module_ref: weakref.ref[nn.Module], state: _CleanState) -> None:
    state.users -= 1
    module = module_ref()
    if state.users == 0 and module is not None and vars(module).get("__getstate__") is state:
        del vars(module)["__getstate__"]


def set_attribute(target: Any, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Set an attribute until undone; restored only if it is still ours."""
    before = getattr(target, name)
    setattr(target, name, value)
    undo.callback(_restore_attribute, _reference(target), name, before, value)


def _reference(target: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(target)
    except TypeError:  # e.g. a `types.SimpleNamespace`, which holds no model, so holding it makes no cycle
        return lambda: target


def _restore_attribute(target_ref: Callable[[], Any], name: str, before: Any, ours: Any) -> None:
    target = target_ref()
    if target is not None and getattr(target, name) is ours:
        setattr(target, name, before)
