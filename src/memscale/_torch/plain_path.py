"""Who looks at operators, so that ours must not be among them."""

from __future__ import annotations

import torch

from memscale._torch import private


def is_plain_path() -> bool:
    """Whether someone looks at the operators who would not understand ours: a compiler, `torch.func`, forward mode."""
    return (
        torch.compiler.is_compiling()
        or private.is_tracing()
        or private.inside_functional_transform()
        or private.in_forward_mode()
    )
