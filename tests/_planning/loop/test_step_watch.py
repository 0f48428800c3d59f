"""A step that takes more than its plan has promised is noticed, on devices that count their bytes."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_internals

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from memscale._planning.loop.step_watch import StepWatch
from tests.models import square_loss
from tests.parity import attached_plan, seed

QUIET = Config(enable_logging=False, mode="conservative", warmup_steps=1)
ROWS = 512


class Crops(nn.Module):
    """Trains on as many rows as an attribute says, which no plan knows of."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(depth)
        )
        self.num_rows = ROWS // 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[: self.num_rows]
        for block in self.blocks:
            x = x + block(x)
        return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """A training step, and the device's peak in it. The statistics are the user's, who resets them."""
    torch.accelerator.reset_peak_memory_stats()
    x = torch.full((ROWS, 32), 0.1).to("simgpu")
    square_loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.accelerator.max_memory_allocated()


def run(model: Crops, num_rows: int, num_steps: int, optimizer: torch.optim.Optimizer) -> list[int]:
    model.num_rows = num_rows
    return [step(model, optimizer) for _ in range(num_steps)]


@pytest.fixture
def largest_bytes() -> int:
    """What the largest step takes without any technique."""
    gc.collect()
    model = Crops().to("simgpu")
    model.num_rows = ROWS
    before = torch.accelerator.memory_allocated() - sum(p.nbytes for p in model.parameters())
    return max(run(model, ROWS, 2, torch.optim.AdamW(model.parameters()))) - before


def test_within_the_budget_the_promise_is_corrected(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Crops().to("simgpu"), QUIET)
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, ROWS // 8, 3, optimizer)
    promised = attached_plan(model)
    assert "peaked" not in caplog.text
    peak_bytes = max(run(model, ROWS, 4, optimizer))
    assert caplog.text.count("a training step peaked at") == 1, "once, not at every step"
    plan = attached_plan(model)
    assert plan.actions == promised.actions == ()
    assert plan.predicted_peak_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert plan.fits


def test_above_the_budget_steps_are_observed_and_planned_for(
    caplog: pytest.LogCaptureFixture, largest_bytes: int
) -> None:
    seed(1)
    model = Crops().to("simgpu")
    twin = copy.deepcopy(model)
    memscale.wrap(model, QUIET.replace(memory_budget_gb=0.8 * largest_bytes / 1e9))
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, twin)]
    run(model, ROWS // 8, 3, optimizers[0])
    assert attached_plan(model).profile_source == "static"
    assert attached_plan(model).actions == ()
    run(model, ROWS, 5, optimizers[0])
    plan = attached_plan(model)
    assert caplog.text.count("a training step peaked at") == 1
    assert plan.profile_source == "empirical"
    assert plan.actions
    assert plan.fits
    run(twin, ROWS // 8, 3, optimizers[1])
    run(twin, ROWS, 5, optimizers[1])
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    memscale.detach(model)


def test_large_steps_that_come_when_nobody_observes_leave_the_careful_plan(
    caplog: pytest.LogCaptureFixture, largest_bytes: int
) -> None:
    config = QUIET.replace(use_static_profiling=False, memory_budget_gb=0.8 * largest_bytes / 1e9)
    model = memscale.wrap(Crops().to("simgpu"), config)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        run(model, ROWS // 8, 4, optimizer)
        assert attached_plan(model).actions == (), "made from small steps"
        run(model, ROWS, 1, optimizer)
    assert caplog.text.count("a training step peaked at") == 2, "the last one is said when the next step begins"
    peaks = run(model, ROWS, 3, optimizer)
    assert attached_plan(model).provisional
    assert attached_plan(model).actions
    assert max(peaks) <= attached_plan(model).budget_bytes
    assert caplog.text.count("not observed any more") == 1
    memscale.detach(model)


def test_memory_of_others_is_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    others = [torch.ones(1 << 18, device="simgpu")]
    model = memscale.wrap(Crops().to("simgpu"), QUIET)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        run(model, ROWS // 8, 1, optimizer)
        others.append(torch.ones(1 << 18, device="simgpu"))
        with torch.no_grad():
            run_rows, model.num_rows = model.num_rows, ROWS
            model(torch.ones(64 * ROWS, 32, device="simgpu"))
            model.num_rows = run_rows
    assert "peaked" not in caplog.text


def test_gradients_of_earlier_batches_are_no_excess(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Crops().to("simgpu"), QUIET)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.full((ROWS, 32), 0.1).to("simgpu")
    for _ in range(3):
        for _ in range(3):
            square_loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "peaked" not in caplog.text


def test_statistics_are_the_users_and_no_hook_stays() -> None:
    torch.ones(1 << 22, device="simgpu")
    before = torch.accelerator.max_memory_allocated()
    num_hooks = len(optimizer_internals._global_optimizer_post_hooks)
    model = memscale.wrap(Crops().to("simgpu"), QUIET)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        square_loss(model(torch.ones(ROWS, 32, device="simgpu"))).backward()
        optimizer.step()
    assert torch.accelerator.max_memory_allocated() == before
    assert len(optimizer_internals._global_optimizer_post_hooks) == num_hooks + 1
    memscale.detach(model)
    assert len(optimizer_internals._global_optimizer_post_hooks) == num_hooks


class Halves(torch.optim.Optimizer):
    """Stands for both: the loop steps one after the other."""

    def __init__(self, *both: torch.optim.Optimizer) -> None:
        self.both = both

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.both:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.both:
            each.zero_grad(set_to_none)


def test_state_of_a_second_optimizer_hides_no_excess(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Crops().to("simgpu"), QUIET)
    halves = Halves(*(torch.optim.AdamW(half.parameters()) for half in (model.blocks[:2], model.blocks[2:])))
    run(model, ROWS // 8, 3, halves)
    assert "peaked" not in caplog.text
    run(model, ROWS // 8 + 16, 2, halves)  # more than is tolerated, and less than the state of one half
    assert "a training step peaked at" in caplog.text


def test_state_that_a_replaced_optimizer_still_holds_is_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Crops().to("simgpu"), QUIET)
    first, second = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    for optimizer in (first, second, first):
        run(model, ROWS // 8, 3, optimizer)
    assert "peaked" not in caplog.text


@pytest.mark.parametrize("num_steps", [0, 2], ids=["before a plan", "under a plan"])
def test_functional_transforms_go_by(num_steps: int) -> None:
    model = Crops().to("simgpu")
    x = torch.full((ROWS, 32), 0.1).to("simgpu")

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x * 2,)).square().mean()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = torch.func.grad(loss)(parameters)
    memscale.wrap(model, QUIET)
    run(model, ROWS // 8, num_steps, torch.optim.SGD(model.parameters(), lr=0.0))
    found = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_cpu_is_not_watched() -> None:
    """But for what becomes of outputs, in the first steps."""
    num_hooks = len(optimizer_internals._global_optimizer_post_hooks)
    model = memscale.wrap(Crops(), QUIET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(9):
        square_loss(model(torch.ones(ROWS, 32))).backward()
        optimizer.step()
    assert not model._forward_hooks
    assert len(optimizer_internals._global_optimizer_post_hooks) == num_hooks
    assert StepWatch(model).end() is None
