"""Copies of a streamed model lie on one device: where the model would be if it were not streamed.

    placed_copies.attach(model, homes, undo)
    twin = copy.deepcopy(model)         # a plain model, all of it where `memscale.detach(model)` would put the model
    torch.save(model, "model.pt")       # and so is what is loaded from it, as from `pickle.dumps(model)`

A streamed model lies on two devices, which nobody expects of its copy. `copy.deepcopy` copies a module's tables of
parameters and buffers, and asks a table that is no plain dict how. So tables whose tensors are elsewhere are replaced
by ones that know the answer. `__deepcopy__` of the module itself is no place for this: modules that hand every unknown
attribute to the module that they hold (those of PEFT do) would find it there and take it for their own.

Where a model is written to a file, each tensor says by itself how it is pickled, wherever it is found: an optimizer in
the same file has the same parameters. What is written is another name of a device; nothing moves for it. A file in the
format that PyTorch had before 1.6 (`_use_new_zipfile_serialization=False`) keeps two devices.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.interception import intercept
from memscale._torch.overrides import undo_with
from memscale.techniques.offload.parameters.parameter_homes import Homes, Slot


def attach(model: nn.Module, homes: Homes, undo: contextlib.ExitStack) -> None:
    """Let copies of the model lie where `homes` would put it, until undone or until the model is gone."""
    for kind in (torch.Tensor, nn.Parameter):
        undo_with(model, intercept(kind, "__reduce_ex__", _Pickling(homes).answer), undo)
    by_table: dict[int, list[tuple[Slot, torch.device]]] = {}
    for slot, came_from in homes.displaced():
        by_table.setdefault(id(slot.table()), []).append((slot, came_from))
    for places in by_table.values():
        _replace(places, homes, undo)


def _replace(places: list[tuple[Slot, torch.device]], homes: Homes, undo: contextlib.ExitStack) -> None:
    first, _ = places[0]
    module = first.module()
    assert module is not None, "a slot with a tensor has a module"
    attribute = "_buffers" if first.is_buffer else "_parameters"
    original = vars(module)[attribute]
    table = _Table(original, homes, places)
    vars(module)[attribute] = table
    undo.callback(_put_back, weakref.ref(module), attribute, table, original)


def _put_back(module_ref: weakref.ref[nn.Module], attribute: str, table: _Table, original: dict[str, Any]) -> None:
    module = module_ref()
    if module is None or vars(module).get(attribute) is not table:
        return  # somebody else has put a table of their own there
    original.clear()
    original.update(table)
    vars(module)[attribute] = original


class _Table(dict[str, Any]):
    """A module's parameters or buffers. Whoever copies or saves it gets a plain dict."""

    __slots__ = ("_homes", "_places")

    def __init__(self, content: dict[str, Any], homes: Homes, places: list[tuple[Slot, torch.device]]) -> None:
        super().__init__(content)
        self._homes, self._places = homes, {slot.name: (slot, came_from) for slot, came_from in places}

    def __deepcopy__(self, memo: dict[Any, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        memo[id(self)] = copied
        for name, tensor in list(self.items()):
            if name in self._places and tensor is not None and id(tensor) not in memo:
                slot, came_from = self._places[name]
                device = self._homes.destination(slot, tensor, came_from)
                if device != tensor.device:
                    memo[id(tensor)] = _copied(tensor, device)
            copied[name] = copy.deepcopy(tensor, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[()], None, None, Iterator[tuple[str, Any]]]:
        return dict, (), None, None, iter(list(self.items()))


class _Pickling:
    """How the tensors of one streamed model are pickled."""

    def __init__(self, homes: Homes) -> None:
        self._homes = homes

    def answer(self, pass_on: Callable[..., Any], tensor: torch.Tensor, protocol: Any) -> Any:
        device, reduced = self._homes.goes_to(tensor), pass_on(tensor, protocol)
        return reduced if device is None else private.pickled_as_on(device, reduced)


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a deep copy on another device. A parameter is never there twice on the device that it leaves."""
    if type(tensor) is nn.Parameter:
        return nn.Parameter(tensor.detach().to(device, copy=True), tensor.requires_grad)
    twin: torch.Tensor = copy.deepcopy(tensor)
    twin.data = twin.detach().to(device)
    return twin
