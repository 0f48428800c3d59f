"""timm as it was when its sweep was run, on a torch for which there is no torchvision.

    pip install --no-deps timm==0.6.7
    timm = old_timm.load()
    with old_timm.on_meta():
        model = timm.create_model("vit_base_patch16_224")       # without memory

Models are built without weights and without images, so that timm does without torchvision, too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.torchvision_names import names_of_torchvision
from memscale import MemScaleError

VERSION = "0.6"
INSTALL = "pip install --no-deps timm==0.6.7"
"""Of July 2022; the sweep was published in August."""


def load() -> Any:
    """The module; raises `MemScaleError` where it is missing or another one."""
    if importlib.util.find_spec("timm") is None:
        raise MemScaleError(f"the section timm needs timm as it was then, which is no dependency of ours: {INSTALL}")
    with names_of_torchvision(), warnings.catch_warnings():
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
