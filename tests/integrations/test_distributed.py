"""DDP and FSDP2: ranks plan together, planning issues no collective, and training is that of plain ranks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale import Config
from tests.lanes import some

PROGRAM = pathlib.Path(__file__).with_name("ranks.py")
HANGS_AFTER_S = 1200
"""A guard against a hang, and no more: a busy machine is slow."""
CONFIG = Config(force_optimize=True, enable_logging=False, mode="conservative")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    some(
        (
            "ddp fsdp2 fsdp1 communicating waiting",
            "ddp-inner ddp-before ddp-no-sync ddp-static-graph fsdp2-before fsdp2-no-sync dcp",
        ),
        "ddp fsdp2 fsdp1 communicating waiting",
    ),
)
def test_ranks_whose_batches_differ_train_as_plain_ones(kinds: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    answer = subprocess.run(
        [*command, *kinds.split()],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    for kind in kinds.split():
        for rank in (0, 1):
            assert f"{kind}: the same on rank {rank}" in answer.stdout


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def planned(target: nn.Module) -> memscale.Plan:
    plan = target._memscale_executor.plan
    assert isinstance(plan, memscale.Plan)
    return plan


def test_plan_of_a_replica_counts_the_buckets_of_ddp(alone: None) -> None:
    batch, trained_bytes = torch.randn(4, 32), 3 * (32 * 32 + 32) * 4
    model = small()
    expected = planned(memscale.wrap(model, CONFIG, sample_input=batch)).predicted_peak_bytes + trained_bytes
    replica = DistributedDataParallel(memscale.wrap(model, CONFIG, sample_input=batch))  # before
    replica(batch).sum().backward()
    assert planned(model).predicted_peak_bytes == expected
    memscale.detach(model)
    memscale.wrap(replica, CONFIG, sample_input=batch)  # after
    assert planned(replica).predicted_peak_bytes == expected
    memscale.detach(replica)


def test_gradients_that_are_views_of_buckets_exist_all_the_time(alone: None) -> None:
    batch = torch.randn(512, 32)
    replica = DistributedDataParallel(small(), gradient_as_bucket_view=True)
    memscale.wrap(replica, CONFIG, sample_input=batch)
    model = small()
    with memscale.optimize(model, config=CONFIG, sample_input=batch) as executor:
        assert executor.plan is not None
        assert planned(replica).baseline_peak_bytes > executor.plan.baseline_peak_bytes
    memscale.detach(replica)


def test_executor_is_found_on_the_replica_and_taken_off_it(alone: None) -> None:
    replica = DistributedDataParallel(small())
    memscale.wrap(replica, CONFIG, sample_input=torch.randn(4, 32))
    assert replica._memscale_executor is replica.module._memscale_executor
    memscale.detach(replica)
    assert "_memscale_executor" not in {*vars(replica), *vars(replica.module)}


class Communicates(nn.Module):
    """As SyncBatchNorm and losses over all ranks do."""

    def __init__(self, collective: str) -> None:
        super().__init__()
        self.linear, self.collective = nn.Linear(32, 32), collective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        match self.collective:
            case "all_reduce":
                dist.all_reduce(mean)
            case "all_gather":
                dist.all_gather([torch.empty_like(mean)], mean)
            case "broadcast":
                dist.broadcast(mean, 0)
        out: torch.Tensor = self.linear(x) - mean
        return out


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_a_forward_that_communicates_is_refused_and_a_part_of_it_is_not(alone: None, collective: str) -> None:
    """Nothing is sent while it is planned, not even on fake tensors."""
    batch = torch.randn(4, 32)
    replica = DistributedDataParallel(nn.Sequential(small(), Communicates(collective)))
    with pytest.raises(memscale.MemScaleError, match=r"communicates with other processes .*c10d"):
        memscale.wrap(replica, CONFIG, sample_input=batch)
    assert not hasattr(replica, "_memscale_executor")
    memscale.wrap(replica, CONFIG)
    with pytest.raises(memscale.MemScaleError, match="communicates with other processes"):
        replica(batch)  # the first training forward plans
    memscale.detach(replica)
    part = memscale.wrap(replica.module[0], CONFIG, sample_input=batch)  # type: ignore[index]
    replica(batch).sum().backward()
    memscale.detach(part)


def test_data_parallel_on_several_devices_is_refused(simgpu_device: torch.device) -> None:
    replicas = nn.DataParallel(small().to(simgpu_device), device_ids=[0, 1])
    for target in (replicas, nn.Sequential(replicas)):
        with pytest.raises(memscale.MemScaleError, match=r"nn\.DataParallel.*torchrun.*CUDA_VISIBLE_DEVICES"):
            memscale.wrap(target, CONFIG)
        assert not hasattr(target, "_memscale_executor")
    alone = memscale.wrap(nn.DataParallel(small().to(simgpu_device), device_ids=[0]), CONFIG)
    memscale.detach(alone)  # it calls the model itself


def test_copies_of_a_wrapped_model_that_data_parallel_makes_are_refused() -> None:
    """Each of its threads would plan, and compute with the parameters of the first device."""
    batch = torch.randn(4, 32)
    for sample in (batch, None):
        model = memscale.wrap(small(), CONFIG, sample_input=sample)
        replica = model._replicate_for_data_parallel()
        with pytest.raises(memscale.MemScaleError, match=r"Sequential runs in nn\.DataParallel"):
            replica(batch)
        with torch.no_grad():
            assert torch.equal(replica(batch), small()(batch)), "what does not train needs no plan"
        model(batch).sum().backward()
        memscale.detach(model)
