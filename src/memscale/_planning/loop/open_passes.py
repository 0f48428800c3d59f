"""Forwards whose backward is still to come: as long as there is one, the plan in force must stay.

    passes = OpenPasses(model)
    if passes.are_open: ...                 # when a training forward begins
    passes.follow()                         # that one and all later ones are followed

A loss over several forwards (pairs of sentences, of images; several parts of a batch) runs the model more than once
before it calls `backward()`. What a plan took away in the first of these forwards only that plan brings back, so a
batch of another shape must not change the plan in between.

A forward is open while something holds the graph of its outputs, until a backward that does not keep its graph has
come to one of them or an optimizer has stepped on the model's parameters: such a graph is of no use any more.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import private
from memscale._torch.optimizer_steps import StepWatcher, owns_any, watch_steps
from memscale._torch.outputs import tensors_in
from memscale._torch.overrides import OwnHook, undo_with


class OpenPasses(StepWatcher):
    """The forwards of one model that await their backward."""

    def __init__(self, model: nn.Module, *, in_training: bool = True) -> None:
        """`in_training`: the forwards of a model in training; else those in evaluation mode that record a graph."""
        self._model = weakref.ref(model)
        self.in_training = in_training
        self._open: list[weakref.ref[_Pass]] = []
        self._undo = contextlib.ExitStack()
        self._is_hooked = False

    def follow(self) -> None:
        """From the forward on that begins now. A second call does nothing."""
        model = self._model()
        if model is not None and not self._is_hooked:
            self._is_hooked = True
            self._undo.callback(model.register_forward_hook(_Returned(self)).remove)
            undo_with(model, watch_steps(self), self._undo)

    def stop(self) -> None:
        """Follow nothing any more."""
        self._undo.close()
        self._open, self._is_hooked = [], False

    @property
    def are_open(self) -> bool:
        """Whether there is such a forward."""
        self._open = [reference for reference in self._open if (one := reference()) is not None and one.is_open]
        return bool(self._open)

    def add(self, output: Any) -> None:
        """A forward has returned this."""
        nodes = {id(node): node for tensor in tensors_in(output) if (node := private.node_of(tensor)) is not None}
        if nodes:
            new = _Pass()
            for node in nodes.values():
                node.register_prehook(new.close)  # the graph holds the pass, and nothing else does
            self._open.append(weakref.ref(new))

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return model is not None and owns_any(optimizer, model.parameters())

    def after_step(self, optimizer: Optimizer) -> None:
        if private.graph_task_id() < 0:  # otherwise it steps in the middle of a backward, and others may be open
            self._open = []


class _Pass:
    """One forward."""

    is_open = True

    def close(self, gradients: Any) -> None:
        self.is_open = private.keeps_graph()


class _Returned(OwnHook):
    """A forward hook that tells of outputs."""

    def __init__(self, passes: OpenPasses) -> None:
        self._passes = passes

    @private.never_compiled
    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        is_followed = model.training == self._passes.in_training and torch.is_grad_enabled()
        if is_followed and private.graph_task_id() < 0 and not private.inside_functional_transform():
            self._passes.add(output)
