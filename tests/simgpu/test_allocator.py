"""Reserved bytes by a model of a caching allocator: memscale's, held against PyTorch's own for CUDA."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale import Config, Hardware
from memscale._decide.allocator import CachingAllocator, OutOfMemoryError
from memscale._decide.allocator.settings import parse_settings
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs

A = torch.accelerator
MIB = 1 << 20
SERIES: list[dict[str, Any]] = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "allocator_series.json").read_text()
)["series"]
WITH_ROOM = [each for each in SERIES if all(step[5] < 1e9 for step in each["steps"]) and not each.get("switches")]
"""Those whose card is not full, and whose settings stay: what simgpu has no part in."""


DEVICE = 1
"""Not the first: what other tests keep there would be a part of every figure."""


@pytest.fixture(autouse=True)
def on_the_other_device(simgpu_device: torch.device) -> None:
    A.set_device_index(DEVICE)
    A.empty_cache()


def drive(model: CachingAllocator) -> None:
    simgpu.set_allocator(model, DEVICE)


def bytes_of(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"simgpu:{DEVICE}")


def request(live: list[torch.Tensor], streams: list[torch.Stream], action: str, number: int, stream: int) -> None:
    if action == "allocate":
        with streams[stream]:
            live.append(bytes_of(number))
    elif action == "free":
        live.pop(number)
    elif action == "use":
        live[number].record_stream(streams[stream])
    elif action == "empty":
        A.empty_cache()


def test_most_series_are_played() -> None:
    assert len(WITH_ROOM) >= 8
    assert sum(step[0] == "use" for each in WITH_ROOM for step in each["steps"]) > 100


@pytest.mark.parametrize("recorded", WITH_ROOM, ids=lambda recorded: recorded["name"])
def test_reserved_bytes_are_those_of_pytorch_request_by_request(recorded: dict[str, Any]) -> None:
    simgpu.set_poison(False)
    drive(
        CachingAllocator(
            parse_settings(recorded["conf"]), recorded["capacity_bytes"], total_bytes=recorded["total_bytes"]
        )
    )
    live: list[torch.Tensor] = []
    streams = [A.current_stream(), *(torch.Stream(f"simgpu:{DEVICE}") for _ in range(2))]
    highest = 0
    for index, (action, number, stream, _, _, _, reserved_bytes) in enumerate(recorded["steps"]):
        request(live, streams, action, number, stream)
        highest = max(highest, reserved_bytes)
        assert (A.memory_reserved(), A.max_memory_reserved()) == (reserved_bytes, highest), (index, action, number)


def test_nobody_need_read_what_is_reserved_in_between() -> None:
    drive(CachingAllocator())
    passing = bytes_of(33 * MIB)
    del passing
    A.empty_cache()
    kept = bytes_of(MIB)
    assert A.max_memory_reserved() == 34 * MIB
    assert A.memory_reserved() == 2 * MIB
    A.reset_peak_memory_stats()
    assert A.max_memory_reserved() == 2 * MIB
    assert A.get_memory_info()[0] == simgpu.get_cap(DEVICE) - 2 * MIB
    assert kept.nbytes == MIB


def test_a_model_begins_with_what_is_there_and_the_ideal_one_goes_on_from_there() -> None:
    kept = [bytes_of(size) for size in (3 * MIB, 512, 18 * MIB)]
    assert A.memory_reserved() == 22 * MIB
    drive(CachingAllocator())
    assert A.memory_reserved() == (20 + 2 + 18) * MIB
    del kept[0]
    A.empty_cache()
    assert A.memory_reserved() == (2 + 18) * MIB
    kept.append(bytes_of(2 * MIB))
    assert A.memory_reserved() == (2 + 18 + 20) * MIB
    simgpu.set_allocator(None, DEVICE)
    assert A.memory_reserved() == A.max_memory_reserved() == 22 * MIB


def test_a_block_that_another_stream_still_uses_is_not_free() -> None:
    drive(CachingAllocator())
    side = torch.Stream(f"simgpu:{DEVICE}")
    host = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    device = bytes_of(3 * MIB)
    side.wait_stream(A.current_stream())
    with side:
        host.copy_(device, non_blocking=True)
    device.record_stream(side)
    del device
    A.empty_cache()
    assert A.memory_reserved() == 20 * MIB
    side.synchronize()
    A.empty_cache()
    assert A.memory_reserved() == 0
    assert simgpu.take_reports() == []


def test_a_model_that_runs_out_says_so_where_it_is_asked() -> None:
    drive(CachingAllocator(capacity_bytes=20 * MIB))
    kept = bytes_of(21 * MIB)
    with pytest.raises(OutOfMemoryError, match="no room for a block of"):
        A.memory_reserved()
    assert kept.nbytes == 21 * MIB


@pytest.mark.parametrize("width", [300, 1100])
def test_a_plain_step_reserves_what_is_predicted(width: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(3))
        )
    config = Config(async_offload=False, enable_logging=False)
    hardware = dataclasses.replace(Hardware.from_name("RTX 3090"), workspace_bytes=0)  # simgpu's kernels take none
    batch = torch.zeros(64, width)
    held = Planner(Job(model, config, hardware, "sgd"), Inputs((batch,), {})).held((), config)
    assert held is not None

    drive(CachingAllocator())
    model = model.to_empty(device=f"simgpu:{DEVICE}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batch.to(f"simgpu:{DEVICE}")
    A.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()
    assert A.max_memory_reserved() == held.reserved_bytes
    assert A.max_memory_allocated() <= held.allocated_bytes
