"""Loops that add up gradients over several batches: a budget holds for them, too (`counted_gradients.py`)."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from memscale._planning import make_plan
from memscale._planning.job import open_job
from memscale._planning.loop import counted_gradients
from memscale._profile.inputs import Inputs
from tests.models import square_loss

BATCH = torch.Size((256, 64))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)) for _ in range(5))
    )


def budget(share: float) -> Config:
    """So far from the lowest plan's peak to the plain one's."""
    forced = Config(force_optimize=True, enable_logging=False, enable_offloading=False)
    model = build()
    plan = make_plan(open_job(model, forced, sgd(model)), Inputs.from_sample(torch.zeros(BATCH)))
    wanted = plan.predicted_peak_bytes + share * (plan.baseline_peak_bytes - plan.predicted_peak_bytes)
    return forced.replace(force_optimize=False, memory_budget_gb=wanted / 1e9)


def train(model: nn.Module, num_batches: int, *, clears_late: bool = False) -> list[torch.Tensor]:
    """Two steps of SGD, of so many batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(2):
        for _ in range(num_batches):
            loss = square_loss(model(torch.randn(BATCH)))
            if clears_late:
                optimizer.zero_grad()
            loss.backward()
            del loss
        optimizer.step()
        if not clears_late:
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def peak_of(config: Config, num_batches: int, **loop: bool) -> tuple[int, list[torch.Tensor], Any, Any]:
    """Measured bytes of the model's own, its weights, and the plans before and after."""
    gc.collect()
    with memscale.measure("cpu") as strangers:
        pass
    model = build()
    with memscale.optimize(model, sgd(model), config, torch.zeros(BATCH)) as executor:
        before = executor.plan
        with memscale.measure("cpu") as measured:
            weights = train(model, num_batches, **loop)
        return measured.peak_bytes - strangers.peak_bytes, weights, before, executor.plan


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("num_batches", "clears_late"), [(3, False), (1, True)], ids=["accumulated", "cleared late"])
def test_a_budget_holds_where_gradients_are_held(num_batches: int, clears_late: bool) -> None:
    config = budget(0.6)
    assert config.memory_budget_gb is not None
    peak, weights, before, after = peak_of(config, num_batches, clears_late=clears_late)
    assert after.predicted_peak_bytes > before.predicted_peak_bytes or after.actions != before.actions
    # What the loop itself holds beside the step: the weights that it returns do not count, they come after the peak.
    assert peak <= config.memory_budget_gb * 1e9
    assert all(map(torch.equal, weights, train(build(), num_batches, clears_late=clears_late)))


def test_a_loop_that_clears_its_gradients_is_planned_once() -> None:
    _, _, before, after = peak_of(budget(0.6), 1)
    assert after is before


ROOMY = Config(memory_budget_gb=1, enable_logging=False)
LOOPS = [(3, False), (1, True), (2, True)]
LOOP_NAMES = ["accumulated", "cleared late", "accumulated and cleared late"]


def third_step(config: Config, num_batches: int, *, clears_late: bool, device: str = "cpu") -> tuple[int, Any, Any]:
    """Its measured bytes, and the plans before the first step and after it."""
    gc.collect()
    with memscale.measure(device) as strangers:
        pass
    model = build().to(device)
    optimizer = sgd(model)
    with memscale.optimize(model, optimizer, config, torch.zeros(BATCH, device=device)) as executor:
        before = executor.plan
        for _ in range(3):
            with memscale.measure(device) as measured:
                for batch in range(num_batches):
                    loss = square_loss(model(torch.randn(BATCH).to(device)))
                    if clears_late and not batch:
                        optimizer.zero_grad()
                    loss.backward()
                    del loss
                optimizer.step()
                if not clears_late:
                    optimizer.zero_grad()
        return measured.peak_bytes - strangers.peak_bytes, before, executor.plan


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize(("num_batches", "clears_late"), LOOPS, ids=LOOP_NAMES)
def test_where_there_is_room_the_same_is_done_and_the_number_counts_them(
    num_batches: int, clears_late: bool, device: str
) -> None:
    peak, before, after = third_step(ROOMY, num_batches, clears_late=clears_late, device=device)
    assert after.actions == before.actions
    assert peak == after.predicted_peak_bytes > before.predicted_peak_bytes


@pytest.mark.parametrize(("num_batches", "clears_late"), LOOPS, ids=LOOP_NAMES)
def test_the_number_is_right_where_it_is_planned_again(num_batches: int, clears_late: bool) -> None:
    peak, _, after = third_step(budget(0.6), num_batches, clears_late=clears_late)
    assert peak == after.predicted_peak_bytes <= after.budget_bytes


def test_less_is_done_where_gradients_go_before_backward() -> None:
    config = budget(0.9)
    through_backward, through_forward = (
        third_step(config, 3, clears_late=False),
        third_step(config, 1, clears_late=True),
    )
    assert len(through_forward[2].actions) < len(through_backward[2].actions)
    assert through_forward[0] == through_forward[2].predicted_peak_bytes <= through_forward[2].budget_bytes


def test_a_smaller_batch_promises_no_less_for_the_larger_one() -> None:
    """The second batch is smaller than the one that was planned for: numbers go up by all gradients, until one of that
    size comes with gradients."""
    model = build()
    optimizer = sgd(model)
    with memscale.optimize(model, optimizer, ROOMY, torch.zeros(BATCH)) as executor:
        first = executor.plan.predicted_peak_bytes
        gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
        for num_rows, expected in ((BATCH[0], 0), (BATCH[0] // 2, gradient_bytes), (BATCH[0] // 4, gradient_bytes)):
            square_loss(model(torch.randn(num_rows, BATCH[1]))).backward()
            assert executor.plan.predicted_peak_bytes == first + expected
        square_loss(model(torch.randn(BATCH))).backward()
        assert first < executor.plan.predicted_peak_bytes <= first + gradient_bytes
        optimizer.step()


def test_where_no_plan_counts_them_training_goes_on_and_says_so() -> None:
    model = build()
    config = budget(0.0)
    with memscale.optimize(model, sgd(model), config, torch.zeros(BATCH)) as executor:
        before = executor.plan
        with pytest.warns(
            UserWarning, match=r"keeps gradients between batches \([\d.]+ [Mk]B\).*no plan that counts them"
        ):
            weights = train(model, 2)
        after = executor.plan
        assert after.actions == before.actions
        assert after.predicted_peak_bytes > after.budget_bytes
        assert not after.fits
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, 2)  # once is enough
    assert all(map(torch.equal, weights, train(build(), 2)))


def test_where_the_device_cannot_hold_them_that_is_said_instead_of_running_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_gradients, "could_hold", lambda *_: False)
    model = build()
    with memscale.optimize(model, sgd(model), budget(0.0), torch.zeros(BATCH)) as executor:
        before = executor.plan
        with pytest.raises(
            memscale.DoesNotFitError, match=r"keeps gradients.*would run out of memory.*lower the batch"
        ):
            train(model, 2)
        assert executor.plan is before


@pytest.mark.parametrize(
    ("device_type", "free_bytes", "could"), [("cuda", 99, False), ("cuda", 100, True), ("cpu", 0, True)]
)
def test_a_device_could_hold_what_it_has(device_type: str, free_bytes: int, could: bool) -> None:
    hardware: Any = SimpleNamespace(device_type=device_type, free_bytes=free_bytes)
    plan: Any = SimpleNamespace(predicted_peak_bytes=90, predicted_allocated_bytes=100)
    assert counted_gradients.could_hold(hardware, plan) is could
