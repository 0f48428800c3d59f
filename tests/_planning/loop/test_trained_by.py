"""Plans count the optimizer that trains the model, whether it is there before `wrap` or comes after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from tests.models import square_loss
from tests.parity import attached_plan

CONFIG = Config(enable_logging=False, async_offload=False)
WIDTH = 256


@pytest.fixture
def others_bytes(simgpu_device: Any) -> Iterator[int]:
    """What is on the device that is not the test's."""
    gc.collect()
    yield torch.accelerator.memory_allocated()
    gc.collect()


def model_of() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to("simgpu")


def sample() -> torch.Tensor:
    return torch.ones(8, WIDTH, device="simgpu")


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def peak_of_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> int:
    """Of those after the first, in which a plan may be made."""
    for step in range(4):
        if step == 1:
            gc.collect()
            torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        square_loss(model(batch)).backward()
        optimizer.step()
    return torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("comes_first", [True, False], ids=["optimizer first", "wrap first"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["sgd", "momentum"])
def test_the_promise_is_that_of_the_optimizer(options: dict[str, Any], comes_first: bool, others_bytes: int) -> None:
    model = model_of()
    optimizer = sgd(model, **options) if comes_first else None
    batch = sample()
    memscale.wrap(model, CONFIG, batch)
    assert attached_plan(model).optimizer_name == ("SGD" if comes_first else "adamw")
    optimizer = optimizer or sgd(model, **options)
    measured = peak_of_steps(model, optimizer, batch) - others_bytes
    assert attached_plan(model).optimizer_name == "SGD"
    assert attached_plan(model).predicted_peak_bytes == measured
    memscale.detach(model)


def test_what_fits_only_with_less_state_is_not_refused(others_bytes: int) -> None:
    """AdamW keeps twice the parameters, and SGD nothing."""
    model = model_of()
    config = CONFIG.replace(mode="conservative", memory_budget_gb=3.2 * sum(p.nbytes for p in model.parameters()) / 1e9)
    with pytest.raises(memscale.DoesNotFitError):
        memscale.wrap(model, config, sample())
    optimizer = sgd(model)
    batch = sample()
    memscale.wrap(model, config, batch)
    assert peak_of_steps(model, optimizer, batch) - others_bytes <= attached_plan(model).budget_bytes
    memscale.detach(model)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_what_was_assumed_is_not_planned_again(optimizer_class: Any, others_bytes: int) -> None:
    model = memscale.wrap(model_of(), CONFIG, sample())
    planned = attached_plan(model)
    optimizer = optimizer_class(model.parameters())
    square_loss(model(sample())).backward()
    optimizer.step()
    assert attached_plan(model) is planned
    memscale.detach(model)


def test_of_several_optimizers_none_is_taken(others_bytes: int) -> None:
    model = model_of()
    several = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    memscale.wrap(model, CONFIG, sample())
    assert attached_plan(model).optimizer_name == "adamw"
    square_loss(model(sample())).backward()
    assert attached_plan(model).optimizer_name == "adamw"
    memscale.detach(model)
    del several


def test_a_found_optimizer_is_not_kept_alive(others_bytes: int) -> None:
    model = model_of()
    optimizer = sgd(model)
    memscale.wrap(model, CONFIG, sample())
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    memscale.detach(model)
