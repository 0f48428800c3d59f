"""The norm of a streamed model's gradients is that of the plain model, to the last bit.

    gradient_norms.attach(model, homes, undo)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # and `get_total_norm`

PyTorch takes the norm of each gradient and then the norm of these norms. The gradients of streamed parameters are on
the host, where another kernel would take their norms, and where they would form a group of their own, whose place in
the sum differs. So each of them visits the device, one at a time, and the norms are put into the order that they have
where all gradients are on one device, also where several streamed models are clipped together. Where the device has no
room for a visit, the host takes the norm, and a warning says that the last bit may differ.

Known limit: PyTorch's kernel for many tensors goes another way if one of them has gaps; where a gradient has, norms may
differ in their last bit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.interception import intercept
from memscale._torch.overrides import undo_with
from memscale.techniques.offload.parameters.parameter_homes import Homes

logger = logging.getLogger("memscale")


_STREAMED: weakref.WeakSet[Homes] = weakref.WeakSet()
"""The homes of all models whose norms are taken so: these models may be clipped together."""


def attach(model: nn.Module, homes: Homes, undo: contextlib.ExitStack) -> None:
    """Let norms be taken so until undone, or until the model is gone."""
    norms = _Norms()
    _STREAMED.add(homes)
    undo.callback(_STREAMED.discard, homes)
    for owner, name in private.norm_functions():
        undo_with(model, intercept(owner, name, norms.answer), undo)


class _Norms:
    """The norms of gradients, some of which are those of streamed parameters."""

    def __init__(self) -> None:
        self._has_said_so = False

    @torch.no_grad()
    def answer(
        self,
        pass_on: Callable[..., torch.Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """The total norm, as PyTorch would take it of gradients that are all on the device."""
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        at_home = {gradient: homes.device for homes in [*_STREAMED] for gradient in homes.gradients_at_home()}
        visits = [at_home.get(id(gradient)) for gradient in gradients]
        is_plain = all(type(g) is torch.Tensor and g.layout is torch.strided for g in gradients)
        if not any(visits) or not is_plain:
            return pass_on(gradients, norm_type, error_if_nonfinite, foreach)
        shown = [
            gradient if device is None else torch.empty(0, dtype=gradient.dtype, device=device)
            for gradient, device in zip(gradients, visits, strict=True)
        ]
        norms: list[torch.Tensor] = []
        for positions, together in private.norm_groups(shown, foreach):
            take = functools.partial(private.norms_of, norm_type=float(norm_type), together=together)
            there = take([gradients[position] for position in positions if visits[position] is None])
            for position in positions:
                device = visits[position]
                norms.append(there.pop(0) if device is None else self._of_visitor(gradients[position], device, take))
        norms = [norm.to(shown[0].device) for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        # For one number the total is that number, and the error that its caller asked for is PyTorch's own.
        return pass_on([total], norm_type, True, False) if error_if_nonfinite and not total.isfinite() else total

    def _of_visitor(
        self, gradient: torch.Tensor, device: torch.device, take: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    ) -> torch.Tensor:
        try:
            visitor = gradient.to(device)
        except torch.OutOfMemoryError:
            visitor = gradient
            if not self._has_said_so:
                self._has_said_so = True
                logger.warning(
                    "%s has no room for a gradient whose norm is taken, so the host takes it: clipped gradients may "
                    "differ from those of the plain model in their last bit",
                    device,
                )
        return take([visitor])[0]
