"""Says when a PyTorch release changes what `_torch/private/optimizers.py` relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale._torch import private


def test_foreach_devices() -> None:
    assert "cuda" in private.foreach_device_types()
    assert "cpu" not in private.foreach_device_types()


def test_optimizers_that_choose_their_implementation_by_device() -> None:
    class Mine(torch.optim.RMSprop):
        """A subclass still asks PyTorch."""

    class Foreign(torch.optim.Optimizer):
        """Has an option of the same name and a rule of its own."""

    def chooses(kind: Any, **options: Any) -> bool:
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = kind([{"params": [weight], **options}], **({"defaults": {}} if kind is Foreign else {}))
        return private.chooses_by_device(optimizer, optimizer.param_groups[0])

    names = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
    assert all(chooses(getattr(torch.optim, name)) for name in names)
    assert chooses(Mine)
    assert not chooses(Foreign, foreach=None)
    assert not chooses(torch.optim.AdamW, foreach=True)
    assert not chooses(torch.optim.AdamW, foreach=False)
    assert not chooses(torch.optim.AdamW, fused=True)
    assert not chooses(torch.optim.AdamW, fused=False), "then it takes the loop on any device"
    assert not chooses(torch.optim.AdamW, lr=torch.tensor(0.1))
    assert chooses(torch.optim.AdamW, lr=torch.tensor(0.1), capturable=True)
    assert chooses(torch.optim.SGD, lr=torch.tensor(0.1))


def test_what_pytorch_chooses_for_parameters_on_the_host() -> None:
    assert not private.is_foreach_by_default([nn.Parameter(torch.ones(2))], differentiable=False)
    assert private.is_foreach_by_default([], differentiable=False)
    assert not private.is_foreach_by_default([], differentiable=True)


def test_loaded_state_is_cast_as_the_optimizer_casts_it() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight])
    groups, loaded = optimizer.state_dict()["param_groups"], torch.ones(2)
    assert private.cast_optimizer_value(optimizer, weight, loaded, 0, groups, "exp_avg").dtype == torch.float64
    assert private.cast_optimizer_value(optimizer, weight, loaded, 0, groups, "step").dtype == torch.float32


def test_a_scaler_copies_its_scale_with_this_class() -> None:
    replicator = private.scale_replicator()(torch.tensor(2.0))
    assert replicator.get(torch.device("cpu")) == 2.0
