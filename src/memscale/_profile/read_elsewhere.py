"""Which modules' parameters a rehearsed step reads while the module itself does not run.

    self.lm_head.weight          # read by a fused loss (TRL, Liger), which never calls `lm_head`

A module that is streamed has its parameters on the device while it runs, and only then. A weight that others read must
therefore stay there. Such code may well run with a weight on the host (TRL moves the hidden states to where the weight
is), and would then compute its loss there, in silence.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from memscale._profile.operator_costs import tensors_of
from memscale._torch.each_operator import EachOperator
from memscale._torch.overrides import OwnHook


class ReadingWatch:
    """Watches one forward of a model: the operators, and which modules without children are running."""

    def __init__(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        self._model = model
        # Modules are compared by id, because a user's module may define its own equality.
        self._owners: dict[int, list[int]] = {}
        self._running: dict[int, int] = {}
        self._read: set[int] = set()
        leaves = [module for module in model.modules() if not any(True for _ in module.children())]
        for module in leaves:
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(id(module))
        for module in {id(module): module for module in (model, *leaves)}.values():
            undo.callback(module.register_forward_pre_hook(_Step(self._running, 1)).remove)
            undo.callback(module.register_forward_hook(_Step(self._running, -1), always_call=True).remove)
        self._mode = EachOperator(self._see)
        undo.callback(model.register_forward_pre_hook(self._begin).remove)
        undo.callback(model.register_forward_hook(self._end, always_call=True).remove)

    def _begin(self, model: nn.Module, args: Any) -> None:
        """The mode is above those that were active before, and gone when backward runs: modes take time."""
        if self._running[id(model)] == 1:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._running[id(model)]:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for key in map(id, tensors_of((*args, *kwargs.values()))):
            owners = self._owners.get(key)
            if owners is not None and not any(self._running.get(owner) for owner in owners):
                self._read.add(key)
        return func(*args, **kwargs)

    def found(self) -> frozenset[str]:
        """The names of the modules that own what was read so."""
        owners = {owner for key in self._read for owner in self._owners[key]}
        return frozenset(name for name, module in self._model.named_modules() if id(module) in owners)


class _Step(OwnHook):
    """A module begins to run, or ends."""

    def __init__(self, running: dict[int, int], change: int) -> None:
        self._running, self._change = running, change

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self._running[id(module)] = self._running.get(id(module), 0) + self._change
