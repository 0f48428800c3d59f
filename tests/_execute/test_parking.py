"""A parked model holds nothing on its device, and trains on as if it had never left."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale._errors import OffloadError, ParkedError, StoreFullError
from memscale._execute import parking
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import (
    Action,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    StepInBuckets,
    StreamParameters,
)
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests._torch.test_overrides import snapshot
from tests.parity import plan_of
from tests.techniques.offload.runs import DEVICE, Gpt, backward, pair, same, weights
from tests.techniques.offload.tiers import on_host

BUCKET_BYTES = 8192
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
STREAMED = tuple(StreamParameters(fqn) for fqn in BLOCKS)
STATE_AWAY = OffloadOptimizer(BUCKET_BYTES)
PLANS: dict[str, Sequence[Action] | None] = {
    "plain": None,
    "nothing": (),
    "checkpoints": (Checkpoint("blocks.1"), OffloadActivations("blocks.0"), STATE_AWAY),
    "share": (OffloadOptimizer(BUCKET_BYTES, resident_share=0.5),),
    "buckets": (StepInBuckets(BUCKET_BYTES),),
    "streamed": (*STREAMED[:2], STATE_AWAY),
    "guests": (*STREAMED, StepOnDevice(BUCKET_BYTES), STATE_AWAY),
}
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


def live_bytes() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@contextlib.contextmanager
def under(actions: Sequence[Action] | None, model: nn.Module, **settings: Any) -> Iterator[Executor | None]:
    """The model on its device, wrapped with these actions; None: not wrapped."""
    if actions is None:
        model.to(DEVICE)
        yield None
        return
    executor = Executor(model, ExecutionSettings(device=DEVICE, **settings))
    executor.adopt()
    executor.apply(plan_of(actions))
    try:
        yield executor
    finally:
        executor.detach()


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    between: Callable[[str], Any] = lambda moment: None,
) -> None:
    """Two batches a step, with a call between all that a loop does."""
    for step in steps:
        backward(model, 2 * step)
        between("accumulating")
        backward(model, 2 * step + 1)
        between("before the step")
        optimizer.step()
        between("after the step")
        optimizer.zero_grad()


def trained_plainly(model: nn.Module, num_steps: int = 3) -> dict[str, torch.Tensor]:
    loop(model, adamw(model), range(num_steps))
    return weights(model)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return trained_plainly(pair(Gpt)[0])


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [*((name, name in ("nothing", "buckets", "streamed")) for name in PLANS), ("checkpoints", True), ("guests", True)],
)
def test_a_parked_model_holds_nothing_and_trains_on_bit_for_bit(
    name: str, asynchronous: bool, expected: dict[str, torch.Tensor], simgpu_device: Any
) -> None:
    model = pair(Gpt)[1]
    before, left = live_bytes(), []

    def rest(moment: str) -> None:
        parameters = list(model.parameters())
        with memscale.parked(model) as num_bytes:
            left.append((moment, live_bytes() - before))
            assert num_bytes > 0
            assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))

    with under(PLANS[name], model, asynchronous=asynchronous):
        optimizer = adamw(model)
        loop(model, optimizer, [0])
        loop(model, optimizer, [1], rest)
        loop(model, optimizer, [2])
        assert same(weights(model), expected)
    assert left == [("accumulating", 0), ("before the step", 0), ("after the step", 0)]
    del optimizer


def test_the_allocators_cache_is_emptied_and_the_model_is_on_its_device_again(simgpu_device: Any) -> None:
    model = pair(Gpt)[0]
    homes = [parameter.device for parameter in model.parameters()]
    assert memscale.park(model) > 0
    assert torch.accelerator.memory_reserved() == 0
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert memscale.resume(model) > 0
    assert [parameter.device for parameter in model.parameters()] == homes


def test_parking_and_resuming_twice_is_as_good_as_once(expected: dict[str, torch.Tensor], simgpu_device: Any) -> None:
    model = pair(Gpt)[0]
    optimizer = adamw(model)
    assert memscale.resume(model) == 0
    loop(model, optimizer, range(2))
    moved = memscale.park(model)
    assert memscale.park(model) == 0
    with memscale.parked(model) as further:  # one that was parked before stays so
        assert further == 0
    assert parking.is_parked(model)
    assert memscale.resume(model) == moved
    assert memscale.resume(model) == 0
    loop(model, optimizer, [2])
    assert same(weights(model), expected)


def test_state_on_disk_and_packed_state_come_back(tmp_path: pathlib.Path, simgpu_device: Any) -> None:
    runs = []
    for rests in (False, True):
        model = pair(Gpt)[1]
        before = live_bytes()
        with under((STATE_AWAY,), model, offload_dir=str(tmp_path), host_budget_bytes=0):
            optimizer = adamw(model)
            loop(model, optimizer, range(2))
            if rests:
                with memscale.parked(model):
                    assert live_bytes() == before
            loop(model, optimizer, [2])
        runs.append(weights(model))
        del optimizer
    assert same(*runs)


def test_an_exception_inside_resumes_the_model(simgpu_device: Any) -> None:
    model = pair(Gpt)[0]
    with pytest.raises(KeyError), memscale.parked(model):
        raise KeyError
    assert not parking.is_parked(model)
    backward(model)


@pytest.mark.parametrize("name", ["plain", "streamed"])
def test_a_parked_model_refuses_to_run_and_to_step(name: str, simgpu_device: Any) -> None:
    model = pair(Gpt)[1]
    ids = torch.zeros(1, 4, dtype=torch.long, device="cpu")
    with under(PLANS[name], model):
        optimizer = adamw(model)
        backward(model)
        with memscale.parked(model):
            before = weights(model)
            for call in (lambda: model(ids), lambda: model.blocks[0](ids), optimizer.step):
                with pytest.raises(ParkedError, match=r"this Gpt is parked.*memscale\.resume\(model\)"):
                    call()
            with pytest.raises(ParkedError, match="before it is wrapped"):
                memscale.wrap(model)
            assert same(weights(model), before)
        optimizer.step()
        assert not same(weights(model), before)
    del optimizer


def test_hooks_and_copies_are_those_of_before(simgpu_device: Any) -> None:
    model = pair(Gpt)[0]
    before = snapshot(model)
    memscale.park(model)
    copied = copy.deepcopy(model)
    memscale.resume(model)
    assert snapshot(model) == before
    copied(torch.zeros(1, 4, dtype=torch.long))
    assert same(weights(copied), weights(model))


@pytest.mark.parametrize("name", ["plain", "checkpoints", "streamed"])
def test_saving_while_parked_gives_what_saving_before_gave(name: str, simgpu_device: Any) -> None:
    model = pair(Gpt)[1]
    with under(PLANS[name], model):
        optimizer = adamw(model)
        loop(model, optimizer, range(2))
        state = on_host(optimizer.state_dict()["state"])
        before = live_bytes()
        saved, file = weights(model), io.BytesIO()
        with memscale.parked(model):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            assert live_bytes() == 0 < before
        loaded = torch.load(io.BytesIO(file.getvalue()), map_location="cpu")
        assert same(loaded["model"], saved)
        for index, values in state.items():
            assert same(values, loaded["optimizer"]["state"][index])
    del optimizer


@pytest.mark.parametrize("name", ["plain", "checkpoints", "streamed"])
def test_what_is_loaded_while_parked_is_trained_on(
    name: str, expected: dict[str, torch.Tensor], simgpu_device: Any
) -> None:
    donor = pair(Gpt)[0]
    donors = adamw(donor)
    loop(donor, donors, range(2))
    model = pair(Gpt)[1]
    with under(PLANS[name], model):
        optimizer = adamw(model)
        loop(model, optimizer, [7])
        with memscale.parked(model):
            model.load_state_dict(donor.state_dict())
            optimizer.load_state_dict(donors.state_dict())
        loop(model, optimizer, [2])
        assert same(weights(model), expected)
    del optimizer


def test_assigned_parameters_go_to_the_device_of_those_before(simgpu_device: Any) -> None:
    model = pair(Gpt)[0]
    with memscale.parked(model):
        fresh = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(fresh, assign=True)
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}


@pytest.mark.parametrize("name", ["checkpoints", "streamed"])
def test_detaching_a_parked_model_brings_it_back_first(
    name: str, expected: dict[str, torch.Tensor], simgpu_device: Any
) -> None:
    model = pair(Gpt)[0]
    plain = snapshot(model)
    with under(PLANS[name], model) as executor:
        optimizer = adamw(model)
        loop(model, optimizer, range(2))
        memscale.park(model)
        assert executor is not None
        executor.detach()
    assert not parking.is_parked(model)
    assert snapshot(model) == plain
    loop(model, optimizer, [2])
    assert same(weights(model), expected)


class Odd(nn.Module):
    """Memory that is shared, expanded, and kept in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.line = nn.Linear(8, 8)
        self.register_buffer("wide", torch.ones(1, 8).expand(4, 8))
        flat = torch.zeros(8)
        self.register_buffer("flat", flat)
        self.register_buffer("part", flat[2:4])
        self.table = {"scale": [torch.full((8,), 2.0)]}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.line(self.embed(ids)) * self.table["scale"][0] * self.wide[0] + self.flat


def test_shared_and_expanded_memory_is_as_before(simgpu_device: Any) -> None:
    before = live_bytes()
    model = Odd().to(DEVICE)
    model.part, model.wide = model.flat[2:4], torch.ones(1, 8, device=DEVICE).expand(4, 8)
    model.table["scale"][0] = model.table["scale"][0].to(DEVICE)
    model(torch.tensor([1, 2, 1], device=DEVICE)).sum().backward()
    with memscale.parked(model):
        assert live_bytes() == before
    assert model.wide.stride() == (0, 1)
    assert model.table["scale"][0].device == DEVICE
    model.flat.fill_(3.0)
    assert torch.equal(model.part.cpu(), torch.full((2,), 3.0))


def test_a_sparse_gradient_is_moved_as_it_is() -> None:
    """The simulated device has none."""
    gradient = torch.eye(3).to_sparse()
    parking.relocate([gradient], torch.device("cpu"))
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), torch.eye(3))


def test_memory_that_others_share_is_named(simgpu_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(64, 64, bias=False).to(DEVICE)
    with memscale.parked(model):
        pass
    assert not caplog.records
    kept = model.state_dict()
    with memscale.parked(model):
        pass
    assert "16.4 kB of a parked Linear stay on the device" in caplog.text
    del kept


def test_a_device_without_room_leaves_the_model_parked(cap: Any) -> None:
    model = pair(Gpt)[0]
    saved = weights(model)
    memscale.park(model)
    others = torch.empty(1024, device=DEVICE)
    simgpu.set_cap(torch.accelerator.memory_allocated() + 2048)
    with pytest.raises(OffloadError, match=r"do not fit back on simgpu:0: the model stays parked"):
        memscale.resume(model)
    assert parking.is_parked(model)
    assert live_bytes() == others.nbytes
    simgpu.set_cap(1 << 30)
    memscale.resume(model)
    assert same(weights(model), saved)


def test_a_host_without_room_leaves_the_model_alone(simgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair(Gpt)[0]
    monkeypatch.setattr(parking, "host_memory", lambda: (1 << 30, 1000))
    with pytest.raises(StoreFullError, match=r"host memory has 1\.0 kB left.*Nothing was moved"):
        memscale.park(model)
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    backward(model)


def test_an_error_half_way_moves_everything_back(simgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair(Gpt)[0]
    moves: list[Any] = []

    def failing(group: list[torch.Tensor], device: torch.device) -> None:
        moves.append(device)
        if len(moves) == 5:
            raise MemoryError
        relocate(group, device)

    relocate = parking.relocate
    monkeypatch.setattr(parking, "relocate", failing)
    with pytest.raises(MemoryError):
        memscale.park(model)
    assert not parking.is_parked(model)
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    backward(model)


def test_a_model_on_the_cpu_has_nothing_to_give_back_and_does_not_run_either() -> None:
    model = nn.Linear(2, 2)
    assert memscale.park(model) == 0
    with pytest.raises(ParkedError):
        model(torch.zeros(1, 2))
    memscale.resume(model)
    model(torch.zeros(1, 2))


def test_a_model_that_dies_parked_leaves_nothing(simgpu_device: Any) -> None:
    before = live_bytes()
    memscale.park(pair(Gpt)[0])
    gc.collect()
    assert live_bytes() == before


@pytest.mark.parametrize("verb", [memscale.park, memscale.resume])
def test_what_is_no_model_is_refused(verb: Any) -> None:
    with pytest.raises(TypeError, match=r"an nn\.Module or a transformers\.Trainer, not int"):
        verb(3)
