"""Says when a PyTorch release changes what `_torch/private/fake_tensors.py` relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._torch import private


def test_fake_tensors_have_no_memory_and_run_a_training_step() -> None:
    mode = private.fake_tensor_mode()
    assert private.active_fake_mode() is None
    with mode:
        assert private.active_fake_mode() is not None
        weight = nn.Parameter(torch.empty(1 << 20, 1 << 20))
        (weight[0, :8] * 2).sum().backward()
    assert private.is_fake(weight)
    assert private.is_fake(weight.grad)
    assert private.device_type_of(weight) == "cpu"
    assert not private.is_fake(torch.ones(1))
    assert private.device_type_of(torch.ones(1, device="meta")) == "meta"


def test_fake_tensors_say_where_a_value_decides() -> None:
    with private.fake_tensor_mode():
        numbers = torch.empty(4)
        assert type(numbers) is private.fake_tensor_class()
        for question in (numbers.nonzero, numbers.sum().item):
            with pytest.raises(private.data_dependent_errors()):
                question()


def test_questions_where_a_fake_tensor_is_reach_modes_as_an_operator() -> None:
    class Listens(TorchDispatchMode):
        heard: list[torch.device]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if private.is_device_question(func):
                self.heard.append(private.device_answer(args[0]))
            return func(*args, **(kwargs or {}))

    mode = Listens()
    mode.heard = []
    with private.fake_tensor_mode():
        weight = nn.Parameter(torch.empty(3))
        with mode:
            (weight * 2).sum().backward()
    assert set(mode.heard) == {torch.device("cpu")}


def test_errors_that_ask_for_values_are_told_from_errors_about_inputs() -> None:
    mode = private.fake_tensor_mode()
    errors: list[Exception] = []
    for function in (
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x @ torch.ones(7, 7),
        lambda x: x.no_such_name,
    ):
        with mode:
            try:
                function(torch.ones(3, 3))
            except Exception as error:
                errors.append(error)
    assert [private.asks_for_values(error) for error in errors] == [True, True, False, False]


def test_a_fake_tensor_knows_its_mode() -> None:
    with private.fake_tensor_mode() as mode:
        assert private.fake_mode_of(torch.empty(2)) is mode
