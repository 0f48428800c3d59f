"""Plans made by hand, attached and taken off; all or nothing."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Plan, PlanError
from memscale._execute.executor import execute, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadOptimizer, StreamParameters
from memscale._planning import make_plan
from memscale._planning.job import open_job
from memscale._profile.inputs import Inputs
from tests._torch.test_overrides import snapshot
from tests.models import Mlp, case, square_loss
from tests.parity import checkpoint_all, plan_of
from tests.techniques.offload.store.test_disk import flip_a_byte

pytestmark = pytest.mark.unit


def test_a_saved_plan_is_executed() -> None:
    model = Mlp()
    plan = Plan.from_json(plan_of([Checkpoint("blocks.1"), Checkpoint("blocks.4", keep=("matmul",))]).to_json())
    executor = execute(model, plan)
    assert executor.plan == plan
    assert executor_of(model) is executor
    assert executor.model is model
    square_loss(model(torch.randn(4, 64))).backward()
    assert executor.stats().num_recomputes == 2
    executor.detach()
    assert executor_of(model) is None


def test_what_is_no_plan_leaves_the_one_in_force() -> None:
    model = Mlp()
    executor = execute(model, plan_of([Checkpoint("blocks.1")]))
    before = executor.plan
    with pytest.raises(TypeError, match=r"memscale\.Plan.*not NoneType"):
        executor.apply(None)
    assert executor.plan is before
    executor.detach()


def test_a_plan_for_another_model_leaves_no_trace() -> None:
    model = Mlp()
    before = snapshot(model)
    with pytest.raises(PlanError, match=r"blocks\.9.*Mlp"):
        execute(model, plan_of([Checkpoint("blocks.0"), Checkpoint("blocks.9")]))
    assert snapshot(model) == before


def test_a_plan_for_another_model_with_the_same_names_is_refused() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    config = memscale.Config(force_optimize=True, enable_logging=False)
    plan = Plan.from_json(make_plan(open_job(model, config), Inputs.from_sample(torch.zeros(64, 8))).to_json())
    other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    before = snapshot(other)
    with pytest.raises(PlanError, match="'0' is a Linear here, a Sequential there"):
        execute(other, plan)
    assert snapshot(other) == before
    execute(model, plan).detach()


def test_apply_replaces_the_plan_before() -> None:
    model = Mlp()
    executor = execute(model, plan_of([Checkpoint("blocks.0")]))
    executor.apply(plan_of([Checkpoint("blocks.1")]))
    assert "forward" not in vars(model.blocks[0])
    assert "forward" in vars(model.blocks[1])
    executor.suspend()
    assert executor.plan is None
    assert "forward" not in vars(model.blocks[1])
    assert executor_of(model) is executor


def test_detach_twice_does_nothing() -> None:
    model = Mlp()
    executor = checkpoint_all(model)
    executor.detach()
    other = checkpoint_all(model)
    executor.detach()
    assert executor_of(model) is other


def test_stats_of_a_cpu() -> None:
    stats = checkpoint_all(Mlp()).stats()
    assert stats.device_type == "cpu"
    assert stats.peak_bytes is None
    assert stats.reserved_peak_bytes is None
    assert stats.total_peak_bytes is None
    assert stats.host_bytes == stats.disk_bytes == 0
    assert stats.num_recomputes == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_stats_and_measurements_have_what_the_card_and_the_host_hold(overlaps: bool, simgpu_device: Any) -> None:
    model = Mlp().to("simgpu")
    streamed, state_bytes = model.blocks[0], 2 * sum(p.nbytes for p in model.blocks[1:].parameters())
    streamed_bytes = sum(p.nbytes for p in streamed.parameters())
    actions = [StreamParameters("blocks.0"), OffloadOptimizer(1 << 24)]
    settings = ExecutionSettings(device=torch.device("simgpu"), asynchronous=overlaps)
    executor = execute(model, plan_of(actions, device_type="simgpu"), settings)
    optimizer = torch.optim.AdamW(model.parameters())
    with memscale.measure() as measured:
        square_loss(model(torch.randn(4, 64, device="simgpu"))).backward()
        optimizer.step()
    stats = executor.stats()
    assert measured.total_peak_bytes == stats.total_peak_bytes
    assert stats.total_peak_bytes >= stats.reserved_peak_bytes >= stats.peak_bytes > 0
    assert stats.host_bytes >= state_bytes + streamed_bytes
    assert stats.disk_bytes == 0
    executor.detach()


def test_the_whole_model_may_be_one_checkpoint() -> None:
    model = Mlp()
    executor = execute(model, plan_of([Checkpoint("")]))
    square_loss(model(torch.randn(4, 64))).backward()
    assert executor.stats().num_recomputes == 1


def test_verify_finds_state_that_changes_elsewhere() -> None:
    """A counter in a class: beyond what is reproduced, so verification must see it."""

    class Box:
        value = 1.0

    class Sly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Box.value += 1
            return torch.tanh(self.linear(x)) * Box.value

    model = Mlp()
    model.blocks[0] = Sly()
    executor = execute(model, plan_of([Checkpoint("blocks.0")]), ExecutionSettings(verify=True))
    loss = square_loss(model(torch.randn(4, 64)))
    with pytest.raises(memscale.VerificationError, match=r"blocks\.0"):
        loss.backward()
    executor.detach()


@pytest.mark.parametrize("name", ["mlp", "resnet", "bert", "nested", "albert"])
def test_verify_is_content_with_what_is_right(name: str) -> None:
    entry = case(name)
    model = entry.build()
    executor = checkpoint_all(model, verify=True)
    for step in range(2):
        entry.loss(model(**entry.batch(step))).backward()
    assert executor.stats().num_recomputes > 0


@pytest.mark.parametrize("verify", [True, False])
def test_what_comes_back_from_the_disk_is_verified_where_that_is_asked_for(
    verify: bool, tmp_path: pathlib.Path
) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    config = memscale.Config(verify_correctness=verify, offload_dir=str(tmp_path), enable_logging=False)
    executor: Any = memscale.execute(model, plan_of([OffloadOptimizer(1 << 20)]), config, optimizer)
    try:
        square_loss(model(torch.ones(2, 64))).backward()
        optimizer.step()
        (disk,) = executor._offloading.users["optimizer"].store.leaves()
        flip_a_byte(disk, 0)
        with pytest.raises(memscale.ChecksumError) if verify else contextlib.nullcontext():
            optimizer.step()
    finally:
        with contextlib.suppress(memscale.OffloadError):  # state that is lost is said again
            executor.detach()
