"""Allocations of whole steps in order: what the log holds, and what the allocator makes of it."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import pytest
import torch
from torch import nn

import memscale
from memscale import zoo
from memscale._decide.allocator import OutOfMemoryError
from memscale._decide.allocator.settings import AllocatorSettings, parse_settings
from memscale._hardware import Hardware
from memscale._hardware.allocator_environment import SMALL_PAGES
from memscale._plan import AllocatorUse
from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Arrival, Event, Freed, Multiplied
from memscale._planning.reserved.allocations import WORKSPACE_BYTES, Reserved, reserved_of
from memscale._planning.reserved.beginning import Beginning, beginning_of
from memscale._planning.reserved.found_memory import PlacedBefore
from memscale._planning.reserved.recording import record_steps
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch.live_bytes import LiveBytes
from tests.conftest import freeze_what_is_left
from tests.models import WIDTH, features, small, square_loss

MIB = 1 << 20
CARD = dataclasses.replace(Hardware.from_name("RTX 3090"), present=True)


@pytest.fixture(autouse=True)
def _no_old_models() -> None:
    """What earlier tests left would be counted here."""
    freeze_what_is_left()


def log_of(
    model: nn.Module, optimizer: str | torch.optim.Optimizer = "adamw", device_type: str = "cuda", num_steps: int = 2
) -> AllocationLog:
    rehearsal = FakeRehearsal(model, Inputs((features(0),), {}), device_type)
    return record_steps(rehearsal, model, optimizer, num_steps=num_steps)


def left_bytes(events: list[Event], live: dict[int, int]) -> int:
    """Play events on a table of what lives; the bytes that live afterwards."""
    for event in events:
        if isinstance(event, Allocated):
            assert event.serial not in live
            live[event.serial] = event.num_bytes
        elif isinstance(event, Freed):
            del live[event.serial]
    return sum(live.values())


# ---- the log


def test_storages_in_order() -> None:
    log = AllocationLog()
    books = LiveBytes("cpu", 512)
    books.log = log
    with books:
        first = torch.ones(100)
        log.begin_step()
        second = first + 1
        del first
        second.resize_(1000)
        del second
    assert log.before == [Allocated(0, 400)]
    assert log.steps == [[Allocated(1, 400), Freed(0), Allocated(2, 4000), Freed(1), Freed(2)]]


def test_what_is_only_renamed_is_not_allocated_again() -> None:
    log = AllocationLog()
    books = LiveBytes("cpu", 512)
    books.log = log
    tensor = torch.ones(100)
    books.see(tensor)
    books.see(tensor[:10], "gradients")
    assert log.before == [Allocated(0, 400)]
    books.log = None
    del tensor
    assert log.before == [Allocated(0, 400)]


def test_what_is_forgotten_was_never_there() -> None:
    log = AllocationLog()
    log.allocate(10, 4)
    log.allocate(11, 400)
    log.begin_step()
    log.forget([10])
    log.free(10)
    log.free(11)
    log.allocate(10, 40)
    assert log.before == [Allocated(1, 400)]
    assert log.steps == [[Freed(1), Allocated(2, 40)]]


def test_a_thread_multiplies_for_the_first_time_once() -> None:
    events = log_of(small()).steps[0]
    assert [event.thread for event in events if isinstance(event, Multiplied)] == ["forward", "backward"]
    index = events.index(Multiplied("forward"))
    assert events[index - 1] == Allocated(events[index - 1].serial, 8 * 2 * WIDTH * 4), "the result comes first"


class Meeting(nn.Module):
    """Two gradients of one tensor meet, both in memory of their own, or both as views."""

    def __init__(self, are_views: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.are_views = are_views

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        first, second = (y.view(-1), y.view(-1)) if self.are_views else (y, y)
        return (first.sin() + second.cos()).sum()


@pytest.mark.parametrize(("are_views", "num_allocations"), [(False, 10), (True, 11)])
def test_gradients_that_meet_are_summed_into_one_of_them(are_views: bool, num_allocations: int) -> None:
    """PyTorch's CUDA build allocates as many on the emulated card: only a sum of views is memory of its own."""
    events = log_of(Meeting(are_views), "none").steps[0]
    assert sum(isinstance(event, Allocated) and event.num_bytes == 8 * WIDTH * 4 for event in events) == num_allocations


def test_a_step_leaves_what_it_should() -> None:
    model = small()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    log, live = log_of(model), dict[int, int]()
    assert left_bytes(log.before, live) == parameter_bytes + features(0).nbytes
    assert left_bytes(log.steps[0], live) == 3 * parameter_bytes + features(0).nbytes, "counters are on the host"
    assert left_bytes(log.steps[1], live) == 3 * parameter_bytes + features(0).nbytes


@pytest.mark.parametrize("inputs_first", [True, False])
def test_what_is_there_before_a_step_comes_in_its_order(inputs_first: bool) -> None:
    """A model that is on the host yet is placed behind a batch that is on the device: other holes are left."""
    model = small()
    rehearsal = FakeRehearsal(model, Inputs((features(0),), {}), "cuda")
    log = record_steps(rehearsal, model, "sgd", beginning=Beginning(inputs_first=inputs_first))
    phases = [event.place.phase for event in log.before if isinstance(event, Allocated) and event.place is not None]
    assert phases == sorted(phases, reverse=not inputs_first)
    assert set(phases) == {"inputs", "parameters"}


def log_with_a_batch() -> AllocationLog:
    """A weight, then a batch, then steps that make an activation."""
    log = AllocationLog()
    log.before = [Allocated(0, 4 * MIB), Allocated(1, 30 * MIB)]
    log.origins = {0: ("parameter", 0), 1: ("input", 0)}
    log.steps = [[Allocated(2, 3 * MIB), Freed(2)]]
    return log


def test_a_batch_may_come_after_the_plan_and_with_each_step() -> None:
    log = log_with_a_batch()
    weight, batch, step = log.before[0], log.before[1], log.steps[0]
    assert log.played(2) == [[weight, batch], step, step]
    assert log.played(2, "once") == [[weight], [batch, *step], step]
    assert log.played(2, "each step") == [[weight], [batch, *step], [batch, *step]]


def test_the_arrival_that_reserves_most_is_told() -> None:
    """A new batch comes before the old one goes: two are there."""
    log = log_with_a_batch()
    found = {}
    for arrivals in [("before",), ("once",), ("each step",), ("before", "each step")]:
        log.arrivals = arrivals
        found[arrivals] = reserved_of(log)
    assert found["before",] == found["once",]
    assert found["each step",].reserved_peak_bytes == found["before",].reserved_peak_bytes + 30 * MIB
    assert found["each step",].allocated_peak_bytes == 64 * MIB
    assert found["before", "each step"] == found["each step",]


@pytest.mark.parametrize(
    ("batch", "card", "arrivals"),
    [
        (torch.empty(1024, 257), CARD, ("once", "each step")),
        (torch.empty(1024, 256), CARD, ("before",)),
        (torch.empty(1024, 257, device="meta"), dataclasses.replace(CARD, device_type="meta"), ("before", "each step")),
        (torch.empty(1024, 257), dataclasses.replace(CARD, present=False), ("before", "each step")),
    ],
    ids=["on the host", "small", "on the device", "a card that is elsewhere"],
)
def test_when_large_batches_come_is_not_known(
    batch: torch.Tensor, card: Hardware, arrivals: tuple[Arrival, ...]
) -> None:
    assert beginning_of(small(), Inputs.from_sample(batch), card).arrivals == arrivals


def test_counters_of_a_fused_step_are_on_the_device() -> None:
    model = small()
    plain = torch.optim.AdamW(model.parameters(), foreach=False)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    sizes = []
    for optimizer in (plain, fused):
        log, live = log_of(model, optimizer), dict[int, int]()
        left_bytes(log.before, live)
        sizes.append(left_bytes(log.steps[0], live))
    assert sizes[1] - sizes[0] == 4 * len(list(model.parameters()))


class SortsRows(nn.Module):
    """As a tiled head does, with an operator whose arguments have names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return hidden[torch.sort(x.detach().sum(1), stable=True, dim=0).indices]


def test_a_step_that_sorts_stably_is_recorded() -> None:
    log = log_of(SortsRows())
    sizes = [event.num_bytes for event in log.steps[0] if isinstance(event, Allocated)]
    assert sizes.count(len(features(0)) * 8) >= 2, "the indices, and what the kernel takes for as many"


def test_the_users_optimizer_is_not_touched() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    assert reserved_of(log_of(model, optimizer)) == reserved_of(log_of(model, "adamw"))
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_of_some_parameters_steps_those() -> None:
    model = small()
    optimizer = torch.optim.AdamW([*model.head.parameters(), nn.Parameter(torch.ones(3))])
    log, live = log_of(model, optimizer), dict[int, int]()
    before = left_bytes(log.before, live)
    state_bytes = 2 * sum(parameter.nbytes for parameter in model.head.parameters())
    assert left_bytes(log.steps[0], live) == before + state_bytes


def test_without_an_optimizer_nothing_stays() -> None:
    log, live = log_of(small(), "none"), dict[int, int]()
    before = left_bytes(log.before, live)
    assert left_bytes(log.steps[0], live) == before


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "adafactor"])
def test_the_requested_peak_is_that_of_real_training(name: str) -> None:
    """On a CPU, where every storage of a real step can be measured."""
    model, x = small(), features(0)
    predicted = reserved_of(log_of(model, name, "cpu"), workspace_bytes=0)
    optimizers = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
    make = optimizers.get(name, lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    optimizer = make(model.parameters())
    gc.collect()  # what other tests have left must not be counted, nor go away in between
    with memscale.measure("cpu") as measured:
        for _ in range(3):
            loss = square_loss(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    assert predicted.requested_peak_bytes == measured.peak_bytes - measured.breakdown["other"] + x.nbytes


# ---- what the allocator makes of it


def by_hand() -> AllocationLog:
    """25 MiB that stay; a step of 30 and 4 MiB that leaves 2 MiB the first time."""
    log = AllocationLog()
    log.allocate(1, 25 * MIB)
    for index in range(2):
        log.begin_step()
        log.allocate(2, 30 * MIB)
        log.multiply("forward")
        log.allocate(3, 4 * MIB)
        if index == 0:
            log.allocate(4, 2 * MIB)
        log.free(2)
        log.free(3)
    return log


def test_by_hand() -> None:
    assert reserved_of(by_hand(), workspace_bytes=0) == Reserved(61 * MIB, 62 * MIB, (26 + 30 + 20) * MIB)


def test_the_workspace_is_taken_once_a_thread() -> None:
    plain, with_it = (reserved_of(by_hand(), workspace_bytes=size) for size in (0, WORKSPACE_BYTES))
    assert with_it.requested_peak_bytes - plain.requested_peak_bytes == WORKSPACE_BYTES
    model_log = log_of(small())
    plain, with_it = (reserved_of(model_log, workspace_bytes=size) for size in (0, 32 * MIB))
    assert with_it.requested_peak_bytes - plain.requested_peak_bytes == 2 * 32 * MIB
    assert with_it.reserved_peak_bytes - plain.reserved_peak_bytes == 2 * 32 * MIB


def test_settings_count() -> None:
    expandable = reserved_of(by_hand(), parse_settings("expandable_segments:True"), workspace_bytes=0)
    assert expandable == Reserved(61 * MIB, 61 * MIB, 80 * MIB)


def test_weights_may_lie_in_segments_of_an_earlier_kind() -> None:
    """Beside weights in ordinary segments there is room that a large piece cannot use, where pages would grow on."""
    log = AllocationLog()
    for key in range(3):
        log.allocate(key, 11 * MIB)
    log.leave([1])
    log.begin_step()
    log.allocate(3, 30 * MIB)
    log.free(3)
    pages = parse_settings(SMALL_PAGES)
    alone = reserved_of(log, pages, workspace_bytes=0).reserved_peak_bytes
    both = reserved_of(log, pages, workspace_bytes=0, start=AllocatorSettings()).reserved_peak_bytes
    from_ordinary = reserved_of(log, AllocatorSettings(), workspace_bytes=0, use=AllocatorUse(SMALL_PAGES))
    assert both == max(alone, from_ordinary.reserved_peak_bytes) > min(alone, from_ordinary.reserved_peak_bytes)


def test_more_steps_than_were_recorded() -> None:
    log = log_of(small())
    figures = [reserved_of(log, num_steps=num_steps) for num_steps in (2, 3, 10)]
    assert figures[0].requested_peak_bytes == figures[1].requested_peak_bytes == figures[2].requested_peak_bytes
    assert figures[1].reserved_peak_bytes == figures[2].reserved_peak_bytes
    assert reserved_of(log_of(small(), num_steps=5), num_steps=5) == reserved_of(log, num_steps=5)


def test_what_a_repeated_step_leaves_is_replaced() -> None:
    log = AllocationLog()
    log.begin_step()
    log.allocate(1, 30 * MIB)  # as a variable that holds the last output
    assert reserved_of(log, num_steps=5).requested_peak_bytes == 2 * 30 * MIB


def test_what_has_left_before_the_first_step_does_not_count() -> None:
    log = AllocationLog()
    log.allocate(1, 100 * MIB)
    log.allocate(2, 30 * MIB)
    log.leave([1])
    log.begin_step()
    log.allocate(3, 30 * MIB)
    log.free(1)  # when the stand-in dies at last
    log.free(3)
    assert reserved_of(log, workspace_bytes=0) == Reserved(60 * MIB, 60 * MIB, 60 * MIB)


def test_what_a_kernel_takes_inside_itself_is_cached() -> None:
    log = AllocationLog()
    log.begin_step()
    log.pass_by([30 * MIB, 512])
    log.allocate(1, 40 * MIB)
    assert reserved_of(log, workspace_bytes=0, num_steps=1) == Reserved(40 * MIB, 40 * MIB, 72 * MIB)


def test_what_a_kernel_needs_twice_stays_between() -> None:
    log = AllocationLog()
    events = log.begin_step()
    log.pass_by([30, 7, 7], [7, 20])
    sizes = {event.serial: event.num_bytes for event in events if isinstance(event, Allocated)}
    shown = [(type(event).__name__, sizes[event.serial]) for event in events if isinstance(event, Allocated | Freed)]
    allocated, freed = "Allocated", "Freed"
    assert shown[:3] == [(allocated, 30), (allocated, 7), (allocated, 7)]
    assert shown[3:6] == [(freed, 7), (freed, 30), (allocated, 20)], "the 7 that came last is there with the 20"
    assert shown[6:] == [(freed, 7), (freed, 20)]
    serials = [event.serial for event in events if isinstance(event, Freed)]
    assert serials == [1, 0, 2, 3]


def test_weights_are_placed_under_the_settings_of_their_time() -> None:
    """Two of 12 MiB: in segments of their own, or one behind the other where segments grow."""
    log = AllocationLog()
    for key in range(2):
        log.allocate(key, 12 * MIB + 512)
    log.origins = {key: ("parameter", key) for key in range(2)}
    log.begin_step()
    before, now = AllocatorSettings(), parse_settings("expandable_segments:True,large_segment_size_mb:2")
    sizes = {frozenset({0, 1}): 26, frozenset({0}): 28, frozenset[int](): 28}
    for later, mib in sizes.items():
        start = PlacedBefore(before, frozenset(("parameter", position) for position in later))
        assert reserved_of(log, now, workspace_bytes=0, start=start).reserved_peak_bytes == mib * MIB


def test_a_card_that_is_too_small() -> None:
    with pytest.raises(OutOfMemoryError, match="no room"):
        reserved_of(by_hand(), capacity_bytes=60 * MIB)


# ---- whole models, against PyTorch's own allocator

MEASURED = {
    ("bert-base", ""): Reserved(3_361_689_280, 3_368_066_560, 3_508_535_296),
    ("bert-base", "expandable_segments:True"): Reserved(3_361_689_280, 3_361_691_136, 3_380_609_024),
    ("gpt2-medium", ""): Reserved(11_673_337_864, 11_673_670_656, 12_360_613_888),
    ("gpt2-medium", "expandable_segments:True"): Reserved(11_673_337_864, 11_673_338_880, 11_689_525_248),
}
"""Three steps of AdamW with torch 2.13.0+cu130 on an RTX 3090 whose driver is emulated; models that were built on the
host and moved. Built on the device, which leaves freed blocks in the cache, they reserve 0.2 % more and 3.7 % less.
What is predicted differs by a page of 20 MiB in the last row, and not at all in the others."""
BATCHES = {"bert-base": (16, 128), "gpt2-medium": (4, 512)}


@pytest.mark.full
@pytest.mark.parametrize("name", list(BATCHES))
def test_whole_models(name: str) -> None:
    """`make test` holds a whole step of GPT-2 against the emulated card in test_cuda_results.py."""
    model = zoo.build(name)
    ids = torch.zeros(BATCHES[name], dtype=torch.long)
    rehearsal = FakeRehearsal(model, Inputs((), {"input_ids": ids, "labels": ids}), "cuda")
    log = record_steps(rehearsal, model, "adamw")
    for (measured_name, conf), measured in MEASURED.items():
        if measured_name == name:
            predicted = reserved_of(log, parse_settings(conf))
            assert predicted.reserved_peak_bytes == pytest.approx(measured.reserved_peak_bytes, rel=0.002)
            assert predicted.requested_peak_bytes == pytest.approx(measured.requested_peak_bytes, abs=1024)
            assert predicted.allocated_peak_bytes == pytest.approx(measured.allocated_peak_bytes, rel=0.0005)


class Attending(nn.Module):
    """Scores as a matrix: backward of their softmax has a second matrix for itself, on a card."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return square_loss((hidden @ hidden.t()).softmax(-1) @ hidden)


def passing_bytes(device_type: str) -> list[int]:
    """What comes and goes at once."""
    events = log_of(Attending(), device_type=device_type).steps[-1]
    return [
        event.num_bytes
        for event, after in itertools.pairwise(events)
        if isinstance(event, Allocated) and after == Freed(event.serial)
    ]


def test_what_kernels_allocate_inside_themselves_is_in_the_log_of_a_card() -> None:
    matrix_bytes = len(features(0)) ** 2 * 4
    assert passing_bytes("cuda").count(matrix_bytes) == passing_bytes("cpu").count(matrix_bytes) + 1
