"""Says when a PyTorch release changes what `_torch/private/ranks.py` relies on."""

from __future__ import annotations

from memscale._torch import private


def test_ddp_looks_for_nodes_of_outputs_in_one_method():
    kind, name = private.ddp_looks_at_outputs()
    assert name in kind.forward.__code__.co_names
    assert "grad_fn" in getattr(kind, name).__code__.co_names
