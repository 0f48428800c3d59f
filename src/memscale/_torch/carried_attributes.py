"""What somebody has put on a parameter (`weight.scale = ...`), which copies of a tensor leave behind.

lent = lend_attributes(parameter, stand_in)     # the stand-in carries what the parameter does
...                                             # a forward reads and changes it
return_attributes(parameter, stand_in, lent)    # and the parameter carries what was put on the stand-in
"""

from __future__ import annotations

from typing import Any

import torch

_MISSING = object()


def attributes_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return what a tensor carries; None for classes with a dispatch of their own, whose attributes are their own."""
    is_plain = getattr(type(tensor), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
    return vars(tensor) if is_plain else None


def lend_attributes(parameter: torch.Tensor, stand_in: torch.Tensor) -> dict[str, Any] | None:
    """Let the stand-in carry what the parameter does. Returns what it carries then; None where nothing is lent."""
    lent, theirs = attributes_of(parameter), attributes_of(stand_in)
    if lent is None or theirs is None:
        return None
    theirs.update(lent)
    return dict(theirs)


def return_attributes(parameter: torch.Tensor, stand_in: torch.Tensor, lent: dict[str, Any]) -> None:
    """Put on the parameter what was put on the stand-in since, and take off what was taken off."""
    now, real = vars(stand_in), vars(parameter)
    for name in lent.keys() - now.keys():
        real.pop(name, None)
    for name, value in now.items():
        if lent.get(name, _MISSING) is not value:
            real[name] = value
