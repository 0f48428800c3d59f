"""timm as it was when its sweep was run, on a torch for which there is no torchvision.

    pip install --no-deps timm==0.6.7
    timm = old_timm.load()
    with old_timm.on_meta():
        model = timm.create_model("vit_base_patch16_224")       # without memory

Models are built without weights and without images: of torchvision timm imports names and calls nothing. Where
torchvision cannot be imported, these names stand in for it until timm has been imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memscale import MemScaleError

VERSION = "0.6"
INSTALL = "pip install --no-deps timm==0.6.7"
"""Of July 2022; the sweep was published in August."""


def load() -> Any:
    """The module; raises `MemScaleError` where it is missing or another one."""
    if importlib.util.find_spec("timm") is None:
        raise MemScaleError(f"the section timm needs timm as it was then, which is no dependency of ours: {INSTALL}")
    with _names_of_torchvision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timm = importlib.import_module("timm")
    if not timm.__version__.startswith(VERSION):
        raise MemScaleError(f"this is timm {timm.__version__}, whose models have changed since: {INSTALL}")
    return timm


class _OnHost(TorchFunctionMode):
    """Rates of stochastic depth are read while a model is built: they need values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({"device": "cpu", **kwargs} if func is torch.linspace else kwargs))


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Tensors that are made in here have no memory."""
    with torch.device("meta"), _OnHost():
        yield


# ---- names that stand in for torchvision


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
def _names_of_torchvision() -> Iterator[None]:
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
