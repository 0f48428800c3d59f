"""Operators that fill a tensor after autograd has saved it: what was copied when it was saved would be garbage.

Of PyTorch's operators this is `rrelu` in training: it saves its noise, and then draws it, past the version counter.
"""

from __future__ import annotations

import torch
from torch import nn

from memscale._torch.named_in_code import code_names_any

_NAMES = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "RReLU"})


def may_fill_later(module: nn.Module) -> bool:
    """Whether a part of the module is such an operator, or code of its classes names one.

    Known limit: code that is reached through functions of other Python modules is not read.
    """
    return code_names_any(module, _NAMES) or any(map(_is_one, module.modules()))


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor may be such a one: nobody has written to it, and it is no result."""
    return not tensor.requires_grad and tensor._version == 0 and tensor.is_floating_point()


def _is_one(part: nn.Module) -> bool:
    values = [value for value in vars(part).values() if callable(value)]
    return isinstance(part, nn.RReLU) or any(getattr(value, "__name__", "") in _NAMES for value in values)
