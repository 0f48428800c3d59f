"""Key-value caches in training: a model goes the way that it goes with one, and nothing is kept.

A `transformers` model whose config says `use_cache=True` makes a cache in every forward, in training as well. It is of
no use there, but switching it off changes the bits: a cache lays keys and values out anew, which leads to other
kernels, and without one a mask may be built in another way. So the cache stays, and each block that is computed again
in backward gets it as it was before:

- before such a block, the cache's structure is noted, not its tensors' contents (`CacheBefore`);
- after it, the keys and values that the block has put there are replaced by tensors of the same shape on the `meta`
  device: lengths are right, no memory is held, and whoever computes with them gets an error, never a wrong number;
- the recompute works on a copy of the structure as it was.

A cache that the caller has handed in, or asked for with `use_cache=True` in the call, is the caller's: its blocks keep
their activations for that call, with a warning. See `may_forget`.

Models whose caches are not known to work so (not of `transformers`, or with a cache of their own kind) have
`use_cache` switched off during their forwards, and that is said once. Their config is as the user left it at all other
times, also when it is saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memscale._torch.overrides import ForwardOverride, OwnHook, is_failing

_HOME = "transformers.cache_utils"
_MODELS = "transformers.models."


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    """One forward of a watched model, on one thread."""

    given: tuple[Any, ...]
    """Caches that the caller handed in. Held, so that their identity is theirs alone for as long."""
    is_asked_for: bool


class _Forwards(threading.local):
    frame: _Frame | None = None
    switched_off: tuple[Any, ...] = ()
    """Configs whose `use_cache` is off for the moment."""


_forwards = _Forwards()


def is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def may_forget(cache: Any) -> bool:
    """Whether the model has made this cache for itself, and what it holds is known."""
    frame = _forwards.frame
    if frame is None or frame.is_asked_for or not _is_structure(cache):
        return False
    return not any(given is part for given in frame.given for part in _structures(cache))


class CacheBefore:
    """A cache as it was before a block. Shares the tensors, and none of the objects that hold them."""

    __slots__ = ("_after", "_before")

    def __init__(self, cache: Any) -> None:
        self._before = _copied(cache, {})
        self._after = cache

    def forget(self) -> None:
        """Let go of what the block has put into the cache."""
        cache, self._after = self._after, None
        known = {id(tensor) for tensor in _tensors(self._before)}
        for holder in _structures(cache):
            vars(holder).update({name: _hollow(value, known) for name, value in vars(holder).items()})

    def again(self) -> Any:
        """A cache to compute the block with once more."""
        return _copied(self._before, {})


def _is_structure(value: Any) -> bool:
    """A cache or one of its layers. A subclass that a model brings along is one, too."""
    return any(kind.__module__ == _HOME for kind in type(value).__mro__)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(_copied(each, memo) for each in value)
    if kind is dict:
        return {name: _copied(each, memo) for name, each in value.items()}
    if not _is_structure(value):
        return value
    copy = memo[id(value)] = object.__new__(kind)
    vars(copy).update({name: _copied(each, memo) for name, each in vars(value).items()})
    return copy


def _parts(value: Any) -> Iterator[Any]:
    """Everything in a cache that is neither a container nor a structure; and the structures."""
    if isinstance(value, list | tuple | set):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, dict):
        yield from _parts(list(value.values()))
    else:
        yield value
        if _is_structure(value):
            yield from _parts(vars(value))


def _structures(cache: Any) -> list[Any]:
    return [part for part in _parts(cache) if _is_structure(part)]


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [part for part in _parts(cache) if isinstance(part, torch.Tensor)]


def _hollow(value: Any, known: set[int]) -> Any:
    """The same with a tensor of the `meta` device in the place of each that is not known."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(_hollow(each, known) for each in value)
    if kind is dict:
        return {name: _hollow(each, known) for name, each in value.items()}
    if isinstance(value, torch.Tensor) and id(value) not in known:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


# ---- whose cache it is


def watch(model: nn.Module, recomputed: set[str], undo: contextlib.ExitStack) -> bool:
    """Know for each forward of this model, or of a part of it, whose caches its blocks are given.

    Returns whether some config's `use_cache` will be off in training forwards.
    """
    found = _cache_makers(model, recomputed)
    unknown = {id(config) for _, config in found if not _is_understood(model, config)}
    for module, config in found:
        off = (config,) if id(config) in unknown else ()
        _Watch(module, is_root=module is model, off=off).attach(undo)
    return bool(unknown)


def _cache_makers(model: nn.Module, recomputed: set[str]) -> list[tuple[nn.Module, Any]]:
    """Modules around these blocks whose config turns caches on. An attention has the config, too, and makes none;
    inside a compiled block it may not be watched. See NOTE [around compiled code]."""
    around: dict[int, nn.Module] = {}
    for module_fqn in recomputed:
        module = model
        for name in filter(None, module_fqn.split(".")):
            around[id(module)] = module
            module = module.get_submodule(name)
    found = [(module, getattr(module, "config", None)) for module in model.modules() if id(module) in around]
    return [(module, config) for module, config in found if getattr(config, "use_cache", False) is True]


def _is_understood(model: nn.Module, config: Any) -> bool:
    """Whether the classes of `transformers` that have this config make their caches of its own kinds."""
    owners = [module for module in model.modules() if getattr(module, "config", None) is config]
    files = [file for module in owners if (file := _file_of(module)) is not None]
    return bool(files) and all("DynamicCache" in vars(file) for file in files)


def _file_of(module: nn.Module) -> Any:
    """The file of `transformers` that a module's class, or the one that it is derived from, stands in."""
    names = [kind.__module__ for kind in type(module).__mro__ if kind.__module__.startswith(_MODELS)]
    return sys.modules.get(names[0]) if names else None


def say_switched_off(model: nn.Module) -> None:
    warnings.warn(
        f"{type(model).__name__} trains with `use_cache=False` while it is wrapped: its key-value cache would be "
        "filled twice. The run is exact against the plain model with `use_cache=False`, which may differ in the last "
        "bits from one with it. Set `config.use_cache = False` to compare, and to be told no more.",
        stacklevel=2,
    )


class _Watch(ForwardOverride):
    """Notes what a forward is given."""

    def __init__(self, module: nn.Module, *, is_root: bool, off: tuple[Any, ...]) -> None:
        super().__init__(module)
        self.is_root = is_root
        self.off = off

    def call(self, *args: Any, **kwargs: Any) -> Any:
        before = _forwards.frame
        if before is None or self.is_root:
            _forwards.frame = _frame_of(args, kwargs)
        try:
            with switched_off(self.off if torch.is_grad_enabled() else ()):
                return self.inner()(*args, **kwargs)
        finally:
            _forwards.frame = before


def _frame_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame:
    given = [part for value in (*args, *kwargs.values()) if is_cache(value) for part in (value, *_structures(value))]
    return _Frame(tuple(given), kwargs.get("use_cache") is True)


@contextlib.contextmanager
def switched_off(configs: tuple[Any, ...]) -> Iterator[None]:
    """`use_cache` off for the moment; what somebody else sets meanwhile is left alone."""
    on = [config for config in configs if config.use_cache is True]
    before, _forwards.switched_off = _forwards.switched_off, (*_forwards.switched_off, *on)
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        _forwards.switched_off = before
        for config in on:
            if config.use_cache is False:
                config.use_cache = True


def now_switched_off() -> tuple[Any, ...]:
    return _forwards.switched_off


# ---- a plan that is attached in the first moment of a forward


def enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """The model's own forward has begun before it was watched: watch it to its end."""
    override = ForwardOverride.top_of(model)
    while isinstance(override, ForwardOverride) and not isinstance(override, _Watch):
        override = override._replaced
    if isinstance(override, _Watch) and _forwards.frame is None:
        _forwards.frame = _frame_of(args, kwargs)
        undo.callback(_Leave(model, override.off).remove)


class _Leave(OwnHook):
    """A forward hook that ends what `enter` has begun, once. See NOTE [hooks of a failing forward]."""

    def __init__(self, model: nn.Module, off: tuple[Any, ...]) -> None:
        self.remove = model.register_forward_hook(self, always_call=True).remove
        self._undo = contextlib.ExitStack()
        self._undo.callback(setattr, _forwards, "frame", None)
        self._undo.enter_context(switched_off(off))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._undo.close()
        if not is_failing(output):
            self.remove()
