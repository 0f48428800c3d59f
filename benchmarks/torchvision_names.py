"""Names that stand in for torchvision while timm is imported, on a torch for which there is no torchvision.

    with names_of_torchvision():
        import timm

To build and train models, timm imports names of torchvision and calls none of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any


class _AnyClass(type):
    def __getattr__(cls, name: str) -> type:
        return _class(name)


def _class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyClass(name, (), {})


class _Names(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return _class(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def names_of_torchvision() -> Iterator[None]:
    """Where torchvision cannot be imported, names stand in for it until this is left."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # it is not there, or not for this torch
        pass
    else:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
