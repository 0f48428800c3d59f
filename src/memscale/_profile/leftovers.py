"""Tables that a model's code caches beside the model must not hold fake tensors after a rehearsal.

The model of a rehearsal is a copy, so what it keeps in its attributes is gone with it. What its code keeps elsewhere is
not: `functools.lru_cache` around a function that makes rotary tables or anchors, a dictionary of a Python module or of
a class. Filled in a step on fake tensors, such a cache would give the real model a tensor without memory, and crash it.
So they are looked through after every fake step:

- An `lru_cache` with a fake tensor in it, or a module of the copy among its keys, is emptied: real steps fill it again.
- From containers of the Python modules and classes that the model's code comes from, entries with fake tensors are
  taken out; a name there that was bound to a fake tensor is bound to what it was before, or deleted.

Containers elsewhere (an object to which a user's hook appends) are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale._torch import private

_MAX_VISITED = 10_000
"""Objects of one cache that are looked at. Caches of tensors are small."""
_CONTAINERS = (dict, list, tuple, set)

_LruCache = type(functools.lru_cache(lambda: None))


class Caches:
    """The caches that a model's code may fill."""

    def __init__(self, model: nn.Module) -> None:
        classes = {cls for module in model.modules() for cls in type(module).__mro__ if not _is_torch(cls.__module__)}
        modules = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
        self._namespaces: list[Any] = [*classes, *modules]
        self._lru_caches: list[Any] | None = None
        self._misses: dict[int, int] = {}

    @contextlib.contextmanager
    def without_fakes(self) -> Iterator[None]:
        """What fake tensors were put into the caches inside is taken out again."""
        before = [dict(vars(namespace)) for namespace in self._namespaces]
        try:
            yield
        finally:
            for namespace, names in zip(self._namespaces, before, strict=True):
                _clean_namespace(namespace, names)
            self._clean_lru_caches()

    def _clean_lru_caches(self) -> None:
        if self._lru_caches is None:  # after the first step: its imports are done
            # By name, too: the collector does not show what was frozen (`gc.freeze`).
            named = [each for namespace in self._namespaces for each in vars(namespace).values()]
            found = {id(each): each for each in [*gc.get_objects(), *named] if type(each) is _LruCache}
            self._lru_caches = list(found.values())
        for cache in self._lru_caches:
            misses = cache.cache_info().misses
            if self._misses.get(id(cache)) != misses:
                self._misses[id(cache)] = misses
                if _holds_fakes(gc.get_referents(cache)):
                    cache.cache_clear()
                    self._misses[id(cache)] = 0


def _is_torch(module_name: str) -> bool:
    return module_name.partition(".")[0] in ("torch", "builtins", "typing", "abc")


def _is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether its type is one of these: a proxy that stands for nothing yet raises where `isinstance` asks it."""
    return issubclass(type(value), kinds)


def _clean_namespace(namespace: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(namespace).items()):
        if _is_a(value, torch.Tensor) and private.is_fake(value):
            if name in before:
                setattr(namespace, name, before[name])
            else:
                delattr(namespace, name)
        elif _is_a(value, (dict, list, set)) and not name.startswith("__"):
            _clean_container(value)


def _clean_container(container: Any) -> None:
    if not _holds_fakes([container]):  # asks the collector: a derived class may load what it lists when it is asked
        return
    if isinstance(container, dict):
        for key in [key for key, value in container.items() if _holds_fakes([key, value])]:
            del container[key]
    elif isinstance(container, list):
        container[:] = [value for value in container if not _holds_fakes([value])]
    else:
        container.difference_update([value for value in container if _holds_fakes([value])])


def _holds_fakes(objects: Iterable[Any]) -> bool:
    """Whether a fake tensor, or a module made of them, is among these objects or in containers among them."""
    waiting, seen = list(objects), set[int]()
    while waiting and len(seen) < _MAX_VISITED:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if _is_a(found, torch.Tensor):
            if private.is_fake(found):
                return True
        elif _is_a(found, nn.Module):
            waiting.extend(itertools.islice(itertools.chain(found.parameters(), found.buffers()), 1))
        elif _is_a(found, _CONTAINERS) or type(found).__module__ == "functools":
            waiting.extend(gc.get_referents(found))
    return False
