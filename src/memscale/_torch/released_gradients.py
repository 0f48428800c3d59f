"""What stands in `.grad` after a parameter was stepped in backward: it has the gradient's shape, and nothing in it.

    parameter.grad = ReleasedGradient(parameter)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)        # raises StepInBackwardError, and so does any other look
    optimizer.zero_grad()                                   # works in either form

A `None` there would be wrong without a word: clipping, norms and logging pass over parameters without a gradient.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memscale._errors import StepInBackwardError
from memscale._torch import private
from memscale._torch.waiting_gradients import is_waiting

_aten = torch.ops.aten
_ZEROING = frozenset({_aten.zero_.default, _aten._foreach_zero_.default})
_ADDING = frozenset({_aten.add_.Tensor, _aten.add.Tensor})


class ReleasedGradient(torch.Tensor):
    """Stands in the place of a gradient whose parameter was stepped."""

    parameter: weakref.ref[torch.Tensor]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> ReleasedGradient:
        self: ReleasedGradient = private.wrapper_tensor(cls, parameter.detach(), parameter.device)
        self.parameter = weakref.ref(parameter)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        released = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func in _ZEROING:
            for one in released:
                one.leave()
            for other in (leaf for leaf in tree_leaves(args) if not isinstance(leaf, cls)):
                other.zero_()
            return args[0]
        shape = tuple(released[0].shape)
        if func in _ADDING:
            raise StepInBackwardError(
                f"A gradient of shape {shape} cannot be added to the one before: with step_in_backward=True that one "
                "was used up in backward. Call optimizer.zero_grad() before every backward; to accumulate gradients "
                "over several batches, set step_in_backward=False."
            )
        raise StepInBackwardError(
            f"The gradient of shape {shape} is gone: with step_in_backward=True a parameter is stepped as soon as its "
            "gradient is final, in backward. So gradients cannot be read, clipped or changed afterwards; set "
            "step_in_backward=False to do that."
        )

    def leave(self) -> None:
        """The parameter has no gradient any more, as after `zero_grad()`."""
        parameter = self.parameter()
        if parameter is not None and parameter.grad is self:
            parameter.grad = None


def is_released(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, ReleasedGradient)


def held_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter's gradient, if it takes memory where the parameter is."""
    return None if is_released(parameter.grad) or is_waiting(parameter.grad) else parameter.grad
