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

from torch import nn

from memscale._profile.operator_costs import tensors_of
from memscale._torch.each_operator import EachOperator
from memscale._torch.overrides import OwnHook


class ReadingWatch(EachOperator):
    """Sees operators of a rehearsal, and of nothing else."""


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
        return ReadingWatch(self._see) if self._is_watching else contextlib.nullcontext()

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in tensors_of((*args, *kwargs.values())):
            if id(leaf) in self._seen:
                running = frozenset(key for key, count in self._running.items() if count)
                self._seen[id(leaf)].add(running)
        return func(*args, **kwargs)

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


class _Step(OwnHook):
    """A module begins to run, or ends."""

    def __init__(self, running: dict[int, int], change: int) -> None:
        self._running, self._change = running, change

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self._running[id(module)] = self._running.get(id(module), 0) + self._change
