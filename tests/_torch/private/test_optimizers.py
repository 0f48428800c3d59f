"""Says when a PyTorch release changes what `_torch/private/optimizers.py` relies on."""

from __future__ import annotations

import contextlib
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


class _Calls(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_that_makes_no_state_gathers_it_unseen() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, foreach=True)

    def calls(around: int = 0) -> list[str]:
        with contextlib.ExitStack() as modes:
            for _ in range(around):
                modes.enter_context(_Calls())
            with _Calls() as mode, private.gathering_unseen(optimizer):
                type(optimizer).step.__wrapped__(optimizer)
        assert "_init_group" not in vars(optimizer)
        return mode.names

    weights[0].grad = torch.ones(2)
    assert "zeros_like" in calls()
    seen = calls()
    assert "is_complex" not in seen
    assert "_foreach_add_" in seen
    assert "is_complex" in calls(around=1), "another mode sees what it would have seen"
    weights[1].grad = torch.ones(2)
    assert "zeros_like" in calls(), "state that is made in a later step"


def test_loaded_state_is_cast_as_the_optimizer_casts_it() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight])
    groups, loaded = optimizer.state_dict()["param_groups"], torch.ones(2)
    assert private.cast_optimizer_value(optimizer, weight, loaded, 0, groups, "exp_avg").dtype == torch.float64
    assert private.cast_optimizer_value(optimizer, weight, loaded, 0, groups, "step").dtype == torch.float32


def test_a_scaler_copies_its_scale_with_this_class() -> None:
    replicator = private.scale_replicator()(torch.tensor(2.0))
    assert replicator.get(torch.device("cpu")) == 2.0
