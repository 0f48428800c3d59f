"""Steps in backward as a rehearsal runs them: on fake parameters, with a stand-in of the optimizer.

    held = rehearse_steps(model, optimizer, bucket_bytes, undo)     # its state, which exists before the step

The trace of a plan therefore shows, to the byte, when gradients are freed and what the optimizer's temporaries take in
between. It also shows a parameter that is read in backward after it was stepped, so that the result would come from its
new value. Autograd notices this where the old value was saved, but not where a recomputed block gives the parameter no
gradient (`weight.detach()` in an early block, tied to a late one). A plan for such a model is refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale._errors import StepInBackwardError
from memscale._torch import private
from memscale._torch.fake_numbers import AnyValue
from memscale._torch.optimizer_steps import parameters_of
from memscale._torch.quiet_steps import quiet_steps
from memscale.techniques.offload.optimizer.backward_steps import BackwardPass


def rehearse_steps(
    model: nn.Module, optimizer: Optimizer, bucket_bytes: int, undo: contextlib.ExitStack
) -> list[torch.Tensor]:
    """Let this optimizer step the fake model's parameters in backward, until undone. Return the state that it has."""
    _make_state(optimizer)
    steps = _StagedSteps(model, optimizer, bucket_bytes)
    for parameter in parameters_of(optimizer):
        undo.callback(parameter.register_post_accumulate_grad_hook(steps.on_gradient).remove)
    undo.enter_context(steps)
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]


def _make_state(optimizer: Optimizer) -> None:
    """Make the optimizer's state, by a step on gradients of zeros: the rehearsed step finds it, as all later steps do.

    The first real step makes its state bucket by bucket, and is nowhere higher.
    """
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    with quiet_steps(), AnyValue():
        optimizer.step()
    for parameter in parameters_of(optimizer):
        parameter.grad = None


class _StagedSteps(TorchDispatchMode):
    """Sees every operator of the step, and raises if one reads a parameter that was stepped."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, bucket_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._under_way: BackwardPass | None = None
        self._stepped: dict[int, str] = {}
        """The parameters that have their new values, by the keys of their storages."""
        self._is_stepping = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stepped and not self._is_stepping and not private.is_device_question(func):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._refuse_stepped(leaf)
        return func(*args, **(kwargs or {}))

    def _refuse_stepped(self, tensor: torch.Tensor) -> None:
        name = self._stepped.get(private.storage_key(tensor.untyped_storage()))
        if name is not None:
            raise StepInBackwardError(
                f"{name} is read in backward after its gradient is final, where the model uses it without giving it a "
                "gradient. Stepped in backward, it would have its new value there. Set step_in_backward=False."
            )

    def on_gradient(self, parameter: torch.Tensor) -> None:
        if self._under_way is None:
            self._under_way = BackwardPass(self._optimizer, self._bucket_bytes, self._let_go)
            private.at_end_of_backward(self._end)
        if parameter.grad is not None:
            self._step(lambda one: one.take(parameter))

    def _step(self, act: Any) -> None:
        assert self._under_way is not None
        self._is_stepping = True
        try:
            with AnyValue():
                act(self._under_way)
        finally:
            self._is_stepping = False

    def _let_go(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        self._stepped[private.storage_key(parameter.untyped_storage())] = self._names[id(parameter)]

    def _end(self) -> None:
        self._step(BackwardPass.step)
        self._under_way = None
        self._stepped.clear()
