"""Which modules' parameters a rehearsed step reads while the module itself does not run.

    self.lm_head.weight          # read by a fused loss (TRL, Liger), which never calls `lm_head`
    F.linear(x, self.blocks[0].fc.weight)

A module that is streamed has its parameters on the device while it runs, and only then. A weight that others read must
therefore stay there. Such code may well run with a weight on the host (TRL moves the hidden states to where the weight
is), and would then compute there, in silence.

Known limits: what the rehearsed forward does not read, nobody knows of: the loop's own code (a penalty over all
parameters, beside the forward) finds streamed parameters on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._profile.operator_costs import tensors_of
from memscale._torch.overrides import OwnHook


class Readings:
    """Which parameters the forwards of a model have read, and which modules were running then."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Modules are compared by id, because a user's module may define its own equality.
        self._running: dict[int, int] = {}
        self._is_watching = False
        self._seen: dict[int, set[frozenset[int]]] = {}
        """The modules that ran when an operator read a parameter, by the id of the parameter."""

    def watch(self, undo: contextlib.ExitStack) -> None:
        """Take down what is read in forwards that are run `during()` this, until undone.

        Who calls `module.forward` does not let the module run.
        """
        self._seen = {id(parameter): self._seen.get(id(parameter), set()) for parameter in self._model.parameters()}
        self._running.clear()
        for module in self._model.modules():
            undo.callback(module.register_forward_pre_hook(_Step(self._running, 1)).remove)
            undo.callback(module.register_forward_hook(_Step(self._running, -1), always_call=True).remove)
        self._is_watching = True
        undo.callback(setattr, self, "_is_watching", False)

    def during(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward that is watched: the operators inside are seen. It ends before backward: modes take time.

        A hook could not end it: none is called when the forward ends with what is no `Exception`.
        """
        return ReadingWatch(self) if self._is_watching else contextlib.nullcontext()

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are read by an operator."""
        for leaf in tensors:
            if id(leaf) in self._seen:
                running = frozenset(key for key, count in self._running.items() if count)
                self._seen[id(leaf)].add(running)

    def outside(self, module_fqns: Iterable[str]) -> frozenset[str]:
        """The modules among these with a parameter that was read while none of its owners among them ran."""
        owners: dict[int, dict[int, str]] = {}
        for module_fqn in module_fqns:
            module = self._model.get_submodule(module_fqn)
            for parameter in module.parameters():
                owners.setdefault(id(parameter), {})[id(module)] = module_fqn
        return frozenset(
            module_fqn
            for key, names in owners.items()
            if any(running.isdisjoint(names) for running in self._seen.get(key, ()))
            for module_fqn in names.values()
        )


class ReadingWatch(TorchDispatchMode):
    """Shows the tensors that each operator is given, in rehearsals alone."""

    def __init__(self, readings: Readings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._readings = readings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._readings.see(tensors_of((*args, *kwargs.values())))
        return func(*args, **kwargs)


class _Step(OwnHook):
    """A module begins to run, or ends."""

    def __init__(self, running: dict[int, int], change: int) -> None:
        self._running, self._change = running, change

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self._running[id(module)] = self._running.get(id(module), 0) + self._change
