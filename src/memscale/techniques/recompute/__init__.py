"""A module whose forward is computed once now and once more in backward: the base of checkpointing and streaming.

Non-reentrant `torch.utils.checkpoint` around the module's forward. On top of what PyTorch reproduces (its own RNG,
autocast), the recompute sees the module as the forward saw it:

- Python's and NumPy's random state, and that of generators which the module holds;
- buffers that the forward changes (BatchNorm statistics, spectral-norm vectors) and attributes (a counter, a list
  that grows, an object or an array that is written to) as they were before it, so that they are not changed twice;
- small tensors that are not registered and that its code can reach (in a list, a closure, a global), likewise;
- weights that `parametrize.cached()` had kept by then, and those that it had not;
- attributes that somebody sets between forward and backward (a dropout rate, the training mode) as they were;
- the very parameters, also when `torch.func.functional_call` had put others in their place;
- arguments: containers that a module changes in place are changed once.

Known limits: Python state that a forward changes elsewhere (a global, a class, an iterator that it draws from), or in
an attribute and not at its first run, is not reproduced; `Config(verify_correctness=True)` finds that. Forward hooks on
parts of the module run again in the recompute. A module that changes its input tensors in place, or attributes of an
object among its arguments, is refused. A module that is given a key-value cache of the caller's is not recomputed for
that call (see `key_value_caches.py`), nor is any inside `torch.func` transforms.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from memscale._errors import VerificationError
from memscale._torch import private
from memscale._torch.host_rng import Fingerprint, HostRng
from memscale._torch.overrides import ForwardOverride, transforms_refused
from memscale._torch.unversioned_steps import STEPS
from memscale.techniques.recompute import key_value_caches
from memscale.techniques.recompute.backward_errors import wait_on_errors
from memscale.techniques.recompute.module_state import RUN_AGAIN, Flags, Memory, ModuleState
from memscale.techniques.recompute.open_autocast import Casts
from memscale.techniques.recompute.saved_writes import SavedWrites
from memscale.techniques.recompute.silent_writes import SilentWrites, is_watched_here, may_write_silently


class RecomputeWatcher(Protocol):
    """Who observes a step."""

    def begin_recompute(self, module_fqn: str) -> None: ...
    def end_recompute(self, module_fqn: str) -> None: ...


class RecomputedForward(ForwardOverride):
    """The forward of a module that is computed again in backward."""

    context_fn: Callable[[], Any] = staticmethod(noop_context_fn)
    """What `torch.utils.checkpoint` calls for its pair of contexts."""
    anchor: torch.Tensor | None = None
    """A tensor on the device that the forward computes on, where its arguments need not show it."""
    watcher: RecomputeWatcher | None = None
    """Is told when a recompute begins and ends."""

    def __init__(self, module: nn.Module, module_fqn: str, *, verify: bool = False) -> None:
        super().__init__(module)
        self.module_fqn = module_fqn
        self.verify = verify
        self.num_recomputes = 0
        self.recompute_s = 0.0
        """The host's time in them. An accelerator may still be at work when the host is done."""
        self.draws: dict[Flags, bool] = {}
        """Whether it draws from Python's or NumPy's generators: learned at the first forward in each state of the
        training flags."""
        self.changes_saved: dict[Flags, bool] = {}
        """Whether it changes what it has saved for backward: learned likewise."""
        self.casts = Casts()
        self.state = ModuleState(module)
        self._warned = False
        self._input_devices: frozenset[torch.device] = frozenset()

    def attach(self, undo: contextlib.ExitStack) -> None:
        super().attach(undo)
        watching = weakref.finalize(self, STEPS.watch())  # a wrapped model may die without being detached
        watching.atexit = False
        undo.callback(watching)
        wait_on_errors(self, self.module, undo)

    def devices(self) -> set[torch.device]:
        """Where it computes: its autograd threads."""
        module = self._module()
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        if self.anchor is not None:
            tensors.append(self.anchor)
        return {*self._input_devices, *(tensor.device for tensor in tensors if not private.is_fake(tensor))}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.casts.refuse_changed(self.module_fqn)
        if not torch.is_grad_enabled() or private.inside_functional_transform():
            return self.compute(args, kwargs, None)
        # Flat, so that checkpoint sees every tensor: it saves the RNG only of devices that it finds among them.
        leaves, spec = _flatten(args, kwargs)
        if not self._input_devices:
            self._input_devices = _devices(leaves)
        region = Region(self, args, kwargs, spec)
        if isinstance(spec, TreeSpec) and (caches := _find_caches(args, kwargs)):
            if not all(map(key_value_caches.may_forget, caches)):
                self._warn_of_cache()
                return self.compute(args, kwargs, None)
            region.caches = [key_value_caches.CacheBefore(cache) for cache in caches]
            leaves, region.spec = _flatten(*_with_each(caches, region.caches, args, kwargs))
        if self.anchor is not None:
            leaves, region.num_anchors = [self.anchor, *leaves], 1
        with transforms_refused(self.module_fqn):
            output = self._run(region, leaves)
        for cache in region.caches:
            cache.forget()
        return output

    def _run(self, region: Region, leaves: list[Any]) -> Any:
        if not self.verify:
            return checkpoint(region, *leaves, use_reentrant=False, context_fn=self.context_fn)
        with set_checkpoint_early_stop(False):
            return checkpoint(region, *leaves, use_reentrant=False, context_fn=self.context_fn)

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region | None) -> Any:
        """The module's forward, the first time; without a region if there will be no recompute."""
        return self.inner()(*args, **kwargs)

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The same in backward."""
        return self.inner()(*args, **kwargs)

    def silent_writes(self, leaves: tuple[Any, ...], memory: Memory) -> SilentWrites | None:
        """Who looks for writes past autograd in the forward that begins; None: its code makes none."""
        if not is_watched_here() or not may_write_silently(self.module):
            return None
        return SilentWrites(self.module, self.module_fqn, leaves, memory.storages())

    def note_recompute(self, begun_in: int, memory: Memory) -> None:
        """See NOTE [open blocks] in open_autocast.py."""
        types = {device.type for device in self._input_devices}
        self.casts.note_recompute(begun_in, types, memory)

    def _warn_of_cache(self) -> None:
        """A key-value cache that is the caller's is filled as ever; a recompute would fill it a second time."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.module_fqn} keeps its activations while it fills a key-value cache; "
                "pass use_cache=False in training",
                stacklevel=2,
            )


class Region:
    """One call of such a module."""

    __slots__ = (
        "begun_in",
        "cached_weights",
        "caches",
        "caches_off",
        "digest",
        "host_rng",
        "memory",
        "notes",
        "num_anchors",
        "original",
        "owner",
        "spec",
    )

    def __init__(self, owner: RecomputedForward, args: Any, kwargs: Any, spec: Spec) -> None:
        self.owner = owner
        self.spec = spec
        self.num_anchors = 0
        """Arguments before the module's own."""
        self.original: tuple[Any, Any] | None = (args, kwargs)
        self.host_rng: HostRng | None = None
        """The state of the host's random numbers, for a module that draws from them."""
        self.caches: list[key_value_caches.CacheBefore] = []
        """Key-value caches among the arguments, as they were."""
        self.caches_off = key_value_caches.now_switched_off()
        self.cached_weights: dict[Any, Any] | None = None
        """What `parametrize.cached()` kept when the forward began: such weights were not computed in it."""
        self.begun_in = threading.get_ident()
        self.memory: Memory
        self.digest: list[int] | None = None
        self.notes: Any = None
        """What the owner wants to find again in the recompute. Lives as long as the graph may need it."""

    def __call__(self, *leaves: Any) -> Any:
        if self.original is not None:
            (args, kwargs), self.original = self.original, None
            versions, objects = _versions(leaves), _objects(leaves) if isinstance(self.spec, TreeSpec) else ()
            output = self._compute(args, kwargs, leaves)
            if _versions(leaves) != versions or (objects and not all(_is_as_before(*pair) for pair in objects)):
                raise RuntimeError(
                    f"{self.owner.module_fqn} changes its input in place, so it cannot be computed again; leave it out "
                    "of checkpointing, or let it work on a copy"
                )
            return output
        args, kwargs = _unflatten(leaves[self.num_anchors :], self.spec)
        if self.caches:
            args, kwargs = _with_each(self.caches, [cache.again() for cache in self.caches], args, kwargs)
        with key_value_caches.switched_off(self.caches_off), private.parametrized_as(self.cached_weights):
            return self._recompute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any, leaves: tuple[Any, ...]) -> Any:
        owner = self.owner
        self.cached_weights = private.cached_weights()
        self.memory = owner.state.before()
        draws = owner.draws.get(self.memory.flags)
        seen: HostRng | Fingerprint = Fingerprint() if draws is False else HostRng()
        if owner.changes_saved.get(self.memory.flags) is False:
            output = owner.compute(args, kwargs, self)
        else:
            silent = owner.silent_writes(leaves, self.memory)
            writes = SavedWrites(owner.module_fqn, ends_early=not owner.verify, silent=silent)
            with writes.watched():
                output = owner.compute(args, kwargs, self)
            owner.changes_saved[self.memory.flags] = owner.changes_saved.get(self.memory.flags, False) or writes.found
        self._note_draws(seen)
        owner.state.after(self.memory)
        if owner.verify:
            self.digest = _digest(output)
        return output

    def _note_draws(self, seen: HostRng | Fingerprint) -> None:
        """Remember the random state for the recompute, if the forward drew from it."""
        draws = self.owner.draws
        if isinstance(seen, HostRng):
            if draws.setdefault(self.memory.flags, False) or seen.moved():
                draws[self.memory.flags] = True
                self.host_rng = seen
            return
        if not seen.moved():
            return
        draws[self.memory.flags] = True
        if seen.numpy_moved():
            raise RuntimeError(
                f"{self.owner.module_fqn} drew from NumPy's random numbers in this forward but not in earlier ones, so "
                f"computing it again in backward would give other results. {RUN_AGAIN}"
            )
        self.host_rng = HostRng(seen.python_state())

    def _recompute(self, args: Any, kwargs: Any) -> Any:
        owner = self.owner
        owner.num_recomputes += 1
        owner.note_recompute(self.begun_in, self.memory)
        begun_s = time.perf_counter()
        shown = owner.state.show(self.memory)
        watcher = owner.watcher
        if watcher is not None:
            watcher.begin_recompute(owner.module_fqn)
        try:
            if self.host_rng is None:
                output = owner.recompute(args, kwargs, self)
            else:
                with self.host_rng.repeated():
                    output = owner.recompute(args, kwargs, self)
        finally:
            if watcher is not None:
                watcher.end_recompute(owner.module_fqn)
            owner.state.hide(shown)
            owner.recompute_s += time.perf_counter() - begun_s
        if self.digest is not None and self.digest != _digest(output):
            raise VerificationError(
                f"the recompute of {owner.module_fqn} differs from its forward: the module depends on state that "
                "changes between the two; leave it out of checkpointing"
            )
        return output


_SIMPLE_TYPES = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str})
Spec: TypeAlias = TreeSpec | tuple[int, tuple[str, ...]]
"""How leaves become arguments: a tree, or just the number of positional ones and the names of the others."""


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Spec]:
    """The arguments' leaves. PyTrees take tens of microseconds, and most layers get plain tensors."""
    leaves = [*args, *kwargs.values()]
    if _SIMPLE_TYPES.issuperset(map(type, leaves)):
        return leaves, (len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))


def _unflatten(leaves: tuple[Any, ...], spec: Spec) -> tuple[Any, Any]:
    if isinstance(spec, TreeSpec):
        args, kwargs = tree_unflatten(list(leaves), spec)
        return args, kwargs
    num_args, names = spec
    if not names:
        return leaves, {}
    return leaves[:num_args], dict(zip(names, leaves[num_args:], strict=True))


def _find_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = {id(value): value for value in (*args, *kwargs.values()) if key_value_caches.is_cache(value)}
    return list(found.values())


def _with_each(
    old: Sequence[Any], new: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each of these in the place of those."""
    table = {id(before): after for before, after in zip(old, new, strict=True)}
    replaced = {name: table.get(id(value), value) for name, value in kwargs.items()}
    return tuple(table.get(id(value), value) for value in args), replaced


def _devices(leaves: list[Any]) -> frozenset[torch.device]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not private.is_fake(leaf)]
    return frozenset(tensor.device for tensor in tensors)


def _versions(leaves: tuple[Any, ...]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _objects(leaves: tuple[Any, ...]) -> list[tuple[Any, dict[str, Any]]]:
    """Objects among the arguments, with their attributes: the recompute gets the very object."""
    others = [leaf for leaf in leaves if type(leaf) not in _SIMPLE_TYPES]
    return [(leaf, dict(vars(leaf))) for leaf in others if hasattr(leaf, "__dict__") and not _is_known(leaf)]


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | nn.Module | type)


def _is_as_before(leaf: Any, attributes: dict[str, Any]) -> bool:
    now = vars(leaf)
    return now.keys() == attributes.keys() and all(now[name] is value for name, value in attributes.items())


def _digest(output: Any) -> list[int]:
    """A fingerprint of every bit of the output's tensors, without keeping them. A lazy one is not looked at."""
    leaves = tree_leaves(output)
    return [_bits(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and not getattr(leaf, "is_lazy", False)]


def _bits(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
        positions = torch.arange(1, raw.numel() + 1, device=raw.device)
        return int((raw * (positions % 65521)).sum().item()) if raw.numel() else 0
