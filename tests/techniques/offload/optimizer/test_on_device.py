"""Streamed parameters are stepped on the device: the bits of a model that is not streamed, and the host has no part."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import simgpu
from memscale._errors import PartialStepError
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OffloadOptimizer, QuantizeOptimizer, StepInBuckets, StreamParameters
from memscale.techniques.offload.optimizer.bucket_transfers import Visits
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.runs import DEVICE
from tests.techniques.offload.tiers import on_host, same
from tests.techniques.offload.training import O, Training, no_hooks_left, plain
from tests.techniques.offload.transfer.wait_scenarios import left_out

BUCKET_BYTES = 20_000
WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def on_device(
    training: Training, *more: Any, asynchronous: bool = False, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Executor]:
    settings = ExecutionSettings(asynchronous=asynchronous, device=DEVICE)
    plan = plan_of([StreamParameters("body"), StepOnDevice(bucket_bytes), *more], device_type="simgpu")
    executor = execute(training.net, plan, settings)
    try:
        yield executor
    finally:
        executor.detach()
    torch.accelerator.synchronize()
    assert simgpu.take_reports() == []


# --------------------------------------------------------------------------------------------------------- parity


@WAYS
@pytest.mark.parametrize(("name", "dtype"), in_turns(list(OPTIMIZERS), [torch.float32, torch.bfloat16]))
def test_the_bits_are_those_of_the_model_on_the_device(name: str, dtype: torch.dtype, asynchronous: bool):
    def make(net: torch.nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference = Training("simgpu", make, dtype=dtype).run()
    training = Training("simgpu", make, dtype=dtype)
    with on_device(training, asynchronous=asynchronous) as executor:
        training.run()
        assert executor.stats().transfers["optimizer"].num_buckets > 5
        assert all(p.device.type == "cpu" for p in training.net.body.parameters())
        assert same(training.result(), reference.result())
    assert same(training.run().result(), reference.run().result())
    no_hooks_left(training.optimizer)


@pytest.mark.parametrize(
    ("mode", "asynchronous"),
    in_turns(["closure", "accumulate", "schedule keep", "scaler unscale", "scaler overflow"], [False, True]),
)
def test_loops_of_every_kind(mode: str, asynchronous: bool):
    reference = Training("simgpu", plain(O.AdamW), mode).run()
    training = Training("simgpu", plain(O.AdamW), mode)
    with on_device(training, asynchronous=asynchronous):
        assert same(training.run().result(), reference.result())


BESIDE: dict[str, tuple[Any, ...]] = {
    "buckets": (StepInBuckets(5_000),),
    "offloaded": (OffloadOptimizer(5_000),),
    "a share": (OffloadOptimizer(5_000, 0.5),),
    "quantized": (QuantizeOptimizer(5_000, min_elements=1 << 20),),
    "both": (OffloadOptimizer(5_000), QuantizeOptimizer(5_000, min_elements=1 << 20)),
}


@pytest.mark.parametrize(("beside", "asynchronous"), in_turns(list(BESIDE), [False, True]))
def test_whatever_is_done_to_resident_parameters(beside: str, asynchronous: bool):
    make = plain(O.AdamW if "QuantizeOptimizer" in str(BESIDE[beside]) else O.ASGD)
    reference = Training("simgpu", make).run()
    training = Training("simgpu", make)
    with on_device(training, *BESIDE[beside], asynchronous=asynchronous):
        assert same(training.run().result(), reference.result())
    assert same(training.run().result(), reference.run().result())


class Watched(O.SGD):
    """Notes where the parameters are that it steps, and decays those without a gradient, too."""

    seen: ClassVar[list[tuple[str, str]]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel():
                    gradient = parameter.grad
                    Watched.seen.append((parameter.device.type, "" if gradient is None else gradient.device.type))
                    parameter.mul_(0.9)
                    if gradient is not None:
                        parameter.sub_(gradient, alpha=0.1)


@WAYS
def test_the_host_steps_nothing(asynchronous: bool):
    reference = Training("simgpu", plain(Watched)).run()
    training = Training("simgpu", plain(Watched))
    with on_device(training, asynchronous=asynchronous):
        training.run(1)
        Watched.seen.clear()
        training.run(4)
        assert len(Watched.seen) == 4 * len(list(training.net.parameters()))
        assert set(Watched.seen) == {("simgpu", "simgpu"), ("simgpu", "")}
        assert same(training.result(), reference.result())


def test_parameters_that_share_memory_are_stepped_where_it_is():
    def shared() -> torch.nn.Module:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3))).to("simgpu")
        net[1].weight.data = net[0].weight.data.view(8, 8)
        return net

    def train(net: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = O.SGD(net.parameters(), 0.1)
        for number in range(3):
            net(torch.full((2, 8), number + 1.0, device="simgpu")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in net.parameters()]

    plain_net, net = shared(), shared()
    actions = [StreamParameters("0"), StreamParameters("1"), StreamParameters("2"), StepOnDevice(BUCKET_BYTES)]
    executor = execute(net, plan_of(actions, device_type="simgpu"), ExecutionSettings(device=DEVICE))
    ours = train(net)
    executor.detach()
    assert same(ours, train(plain_net))


ELEMENT_BY_ELEMENT = [name for name in OPTIMIZERS if name != "Adafactor"]


@pytest.mark.parametrize(("name", "asynchronous"), in_turns(ELEMENT_BY_ELEMENT, [False, True]))
def test_a_large_parameter_comes_a_stretch_at_a_time(name: str, asynchronous: bool):
    def make(net: torch.nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference = Training("simgpu", make).run(3)
    training = Training("simgpu", make)
    with on_device(training, asynchronous=asynchronous, bucket_bytes=5_000) as executor:
        training.run(3)
        stats = executor.stats().transfers["optimizer"]
        # What is resident, a matrix, its bias, another matrix, three small ones, and a last matrix.
        assert stats.num_buckets == 3 * (1 + 6 + 1 + 6 + 1 + 4)
        assert same(training.result(), reference.result())
        for one in (reference, training):
            entry = one.optimizer.state[one.net.body[0].weight]
            for value in entry.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(2)
        assert same(training.run(2).result(), reference.run(2).result())
    assert same(training.run(2).result(), reference.run(2).result())


# ------------------------------------------------------------------------------------------- each device its own step


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each multi-tensor operator is called, and by which device's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("_foreach"):
            key = func.__name__, args[0][0].device.type
            self.sizes.setdefault(key, []).append(len(args[0]))
        return func(*args, **(kwargs or {}))


def launches(training: Training) -> dict[tuple[str, str], list[int]]:
    training.run(1)
    with Launches() as counted:
        training.optimizer.step()
    return counted.sizes


@pytest.mark.parametrize("steps", ["host", "device"])
def test_resident_parameters_keep_their_multi_tensor_step(steps: str):
    """One layer of three streamed; the others are stepped together, with as many launches as if they were alone."""
    whole = launches(Training("simgpu", plain(O.AdamW)))
    training = Training("simgpu", plain(O.AdamW))
    trained = [p for name, p in training.net.named_parameters() if not name.startswith("unused")]
    num_streamed = len(list(training.net.body[2].parameters()))
    actions: list[Any] = [StreamParameters("body.2"), *([StepOnDevice(BUCKET_BYTES)] if steps == "device" else [])]
    executor = execute(training.net, plan_of(actions, device_type="simgpu"), ExecutionSettings(device=DEVICE))
    found = launches(training)
    executor.detach()
    of_parameters = {name: sizes for (name, device), sizes in whole.items() if device == "simgpu"}
    for name, sizes in of_parameters.items():  # the others are of counters, which are on the host
        assert sizes == [len(trained)] * len(sizes)
        assert found[name, "simgpu"].count(len(trained) - num_streamed) == len(sizes)
        assert ((name, "cpu") in found) == (steps == "host")


# --------------------------------------------------------------------------------------------------------- checkpoints


@WAYS
def test_a_checkpoint_is_a_plain_one_and_loads_as_ever(asynchronous: bool):
    reference = Training("simgpu", plain(O.AdamW)).run(2)
    saved = copy.deepcopy([reference.net.state_dict(), reference.optimizer.state_dict()])
    training = Training("simgpu", plain(O.AdamW))
    with on_device(training, asynchronous=asynchronous):
        training.run(1)
        training.net.load_state_dict(saved[0])
        training.optimizer.load_state_dict(saved[1])
        training.num_steps, training.losses = 2, list(reference.losses)
        assert same(training.run(2).result(), reference.run(2).result())
        saved = copy.deepcopy([training.net.state_dict(), training.optimizer.state_dict()])
    fresh = Training("simgpu", plain(O.AdamW))
    fresh.net.load_state_dict(saved[0])
    fresh.optimizer.load_state_dict(saved[1])
    fresh.num_steps, fresh.losses = 4, list(reference.losses)
    assert same(fresh.run(2).result(), reference.run(2).result())


@WAYS
def test_state_that_somebody_looks_at_is_used_as_it_is_left(asynchronous: bool):
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    with on_device(training, asynchronous=asynchronous):
        for one in (reference.run(2), training.run(2)):
            one.optimizer.state[one.net.body[0].weight]["exp_avg"].mul_(2)
        assert same(training.run(2).result(), reference.run(2).result())


@WAYS
def test_an_optimizer_that_has_state_when_it_begins(asynchronous: bool):
    reference, training = (Training("simgpu", plain(O.AdamW, fused=True)).run(2) for _ in range(2))
    with on_device(training, asynchronous=asynchronous):
        assert same(training.run(2).result(), reference.run(2).result())
    for parameter, entry in training.optimizer.state.items():
        assert all(value.device == parameter.device for value in entry.values())
    assert same(training.run(1).result(), reference.run(1).result())


# ------------------------------------------------------------------------------------------------------------ failures


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket of this number is stepped, and its state cannot be packed."""
    park, calls = Visits.park, []

    def fail(self: Visits, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            raise RuntimeError("out of memory")
        park(self, *args, **kwargs)

    monkeypatch.setattr(Visits, "park", fail)


@WAYS
def test_a_step_that_fails_leaves_parameters_stepped_or_untouched(asynchronous: bool, monkeypatch: pytest.MonkeyPatch):
    reference, training = (Training("simgpu", plain(O.AdamW)).run(1) for _ in range(2))
    before = [p.detach().cpu().clone() for p in training.net.body.parameters()]
    with on_device(training, asynchronous=asynchronous, bucket_bytes=30_000):
        saved = copy.deepcopy(training.optimizer.state_dict())
        with monkeypatch.context() as patched:
            fail_at(3, patched)
            with pytest.raises(PartialStepError, match="failed after 2 of"):
                training.step()
        reference.step()
        after = [p.detach().cpu().clone() for p in training.net.body.parameters()]
        stepped = [p.detach().cpu() for p in reference.net.body.parameters()]
        for now, old, new in zip(after, before, stepped, strict=True):
            assert torch.equal(now, old) or torch.equal(now, new)
        assert any(torch.equal(now, old) for now, old in zip(after, before, strict=True))
        training.optimizer.load_state_dict(saved)
        training.step()


@WAYS
def test_state_that_is_loaded_right_after_a_step_stays(asynchronous: bool):
    """The host writes it to memory that copies of the last step may still be on their way to."""
    training = Training("simgpu", lambda net: O.AdamW(net.body.parameters())).run(1)
    saved = on_host(copy.deepcopy(training.optimizer.state_dict()))
    with on_device(training, asynchronous=asynchronous):
        training.run(2)
        training.optimizer.load_state_dict(saved)
        torch.accelerator.synchronize()
        assert same(training.optimizer.state_dict()["state"], saved["state"])


# ----------------------------------------------------------------------------------------------------------- mutations

WAITS = (
    "in after compute",
    "compute after arrival",
    "out after compute",
    "reuse after sent",
    "host after stepped weights",
)
"""Those that nothing else in a step covers for."""


def scale(training: Training) -> None:
    """The host reads and writes all parameters at once."""
    with torch.no_grad():
        for parameter in training.net.body.parameters():
            parameter.data.mul_(1.01)


def steps_without(why: str | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Weights after steps in which nobody waits for this reason, the last of which fails; and races."""
    training = Training("simgpu", plain(O.AdamW))
    settings = ExecutionSettings(asynchronous=True, device=DEVICE)
    plan = plan_of([StreamParameters("body"), StepOnDevice(12_000)], device_type="simgpu")
    executor = execute(training.net, plan, settings)
    training.run(1)
    step = training.optimizer.step
    with monkeypatch.context() as patched:
        patched.setattr(training, "update", lambda: None)
        for is_last in (False, False, True):
            training.step()
            with left_out(str(why), patched), monkeypatch.context() as failing:
                if is_last:
                    fail_at(2, failing)
                with pytest.raises(PartialStepError) if is_last else contextlib.nullcontext():
                    step()
            scale(training)
    weights = [p.detach().cpu().clone() for p in training.net.parameters()]
    torch.accelerator.synchronize()
    executor.detach()
    return weights, len(simgpu.take_reports())


@pytest.mark.parametrize("why", [None, *WAITS])
def test_every_wait_is_needed(why: str | None, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as blocking:
        expected, num_races = steps_without(None, blocking)
    assert num_races == 0
    weights, num_races = steps_without(why, monkeypatch)
    assert (same(weights, expected) and num_races == 0) == (why is None), f"{num_races} races"
