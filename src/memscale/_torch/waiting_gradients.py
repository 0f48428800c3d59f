"""What stands in `.grad` while a gradient waits elsewhere: it has the gradient's shape, and knows how to get it back.

    parameter.grad = WaitingGradient(parameter, home)
    loss.backward()                                         # adds to it: it comes, is added to, and may leave again
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)        # raises OffloadError, and so does any other look
    optimizer.zero_grad()                                   # works in either form

A `None` there would be wrong without a word: clipping, norms and logging pass over parameters without a gradient.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from memscale._errors import OffloadError
from memscale._torch import private

_aten = torch.ops.aten
_ZEROING = frozenset({_aten.zero_.default, _aten._foreach_zero_.default})


class Home(Protocol):
    """Where a gradient waits."""

    def bring(self) -> torch.Tensor:
        """Return the gradient, for the current stream. It goes on waiting, too."""

    def free(self) -> None:
        """Let go of what waits."""


class WaitingGradient(torch.Tensor):
    """Stands in the place of a gradient that waits elsewhere."""

    home: Home | None
    """None: the gradient is here, or is zeros."""
    here: torch.Tensor | None
    """The gradient, when backward has added to it and it has not left again."""
    parameter: weakref.ref[torch.Tensor]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, home: Home | None) -> WaitingGradient:
        self: WaitingGradient = private.wrapper_tensor(cls, parameter.detach(), parameter.device)
        self.home, self.here = home, None
        self.parameter = weakref.ref(parameter)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WaitingGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        waiting = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func in _ZEROING:
            for one in waiting:
                one.become_zeros()
            for other in (leaf for leaf in tree_leaves(args) if not isinstance(leaf, cls)):
                other.zero_()
            return args[0]
        if func is _aten.add_.Tensor and len(waiting) == 1 and args[0] is waiting[0]:
            args[0].add_here(*args[1:], **(kwargs or {}))
            return args[0]
        raise OffloadError(
            f"The gradient of shape {tuple(waiting[0].shape)} waits in host memory until the optimizer steps, because "
            "enable_gradient_offload=True. It can be accumulated in backward and zeroed, and not be read, clipped, "
            "scaled or changed before the step; nothing was changed. Set enable_gradient_offload=False to do that."
        )

    def gradient(self) -> torch.Tensor:
        """Return the gradient itself, for the current stream."""
        if self.here is not None:
            return self.here
        if self.home is not None:
            return self.home.bring()
        parameter = self.parameter()
        assert parameter is not None, "who asks for its gradient has it"
        return torch.zeros_like(parameter, requires_grad=False)

    def add_here(self, other: torch.Tensor, alpha: Any = 1) -> None:
        """Add to the gradient as backward adds to one that never left."""
        gradient = self.gradient()
        gradient.add_(other, alpha=alpha)
        self._let_go()
        self.here = gradient

    def wait_at(self, home: Home) -> None:
        """Note that the gradient waits there from now on."""
        self.home, self.here = home, None

    def become_zeros(self) -> None:
        """Let go of the gradient: what it is from now on takes no memory."""
        self._let_go()
        self.here = None

    def _let_go(self) -> None:
        home, self.home = self.home, None
        if home is not None:
            home.free()


def is_waiting(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, WaitingGradient)


def waiting_elsewhere(parameter: torch.Tensor) -> WaitingGradient:
    """Return what stands in `.grad` on a stage where nobody brings it back."""
    return WaitingGradient(parameter, None)
