"""Gradients that wait in host memory until the step: the bits, what it frees, what is refused, and its waits."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale import Config, ConfigError, MemScaleError, OffloadError, StoreFullError
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._hardware import Hardware
from memscale._plan import OPTIMIZER_BUCKET_BYTES, Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._torch.waiting_gradients import is_waiting
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.gradient_homes import choose_waiting
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.optimizer.waiting_gradients import OffloadGradients
from tests._planning.test_optimizer_trials import LARGE, config_of
from tests._planning.test_optimizer_trials import train as train_planned
from tests.lanes import in_turns
from tests.models import Mlp
from tests.parity import plan_of
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.runs import DEVICE, Boom, explode, let_autograd_finish
from tests.techniques.offload.tiers import on_host, same
from tests.techniques.offload.training import O, Training, no_hooks_left, plain
from tests.techniques.offload.transfer.wait_scenarios import left_out

BUCKET_BYTES = 25_000
SMALL = 5_000
PLANS: dict[str, tuple[Any, ...]] = {
    "all": (OffloadOptimizer(BUCKET_BYTES), OffloadGradients("body"), OffloadGradients("head")),
    "half": (OffloadOptimizer(BUCKET_BYTES), OffloadGradients("body", 0.5)),
    "state stays": (OffloadOptimizer(BUCKET_BYTES, 0.9), OffloadGradients("body")),
    "stretches": (OffloadOptimizer(SMALL), OffloadGradients("body", bucket_bytes=SMALL)),
    "other stretches": (OffloadOptimizer(SMALL), OffloadGradients("body", bucket_bytes=7_000)),
    "stretches of what stays": (OffloadOptimizer(SMALL, 0.9), OffloadGradients("body", bucket_bytes=SMALL)),
    "guests": (
        StreamParameters("head"),
        StepOnDevice(BUCKET_BYTES),
        OffloadOptimizer(BUCKET_BYTES),
        OffloadGradients("body"),
        OffloadGradients("head"),
    ),
    "recomputed": (Checkpoint("body"), OffloadActivations("body"), OffloadOptimizer(SMALL), OffloadGradients("body")),
    "early": (OffloadOptimizer(BUCKET_BYTES), FetchStateEarly("body", 30_000), OffloadGradients("body")),
}


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def wrapped(net: nn.Module, *actions: Any, asynchronous: bool = True, **settings: Any) -> Iterator[Executor]:
    made = ExecutionSettings(asynchronous=asynchronous, device=DEVICE, **settings)
    executor = execute(net, plan_of(list(actions), device_type="simgpu"), made)
    try:
        yield executor
    finally:
        executor.detach()
    torch.accelerator.synchronize()
    assert simgpu.take_reports() == []


def stats(executor: Executor) -> Any:
    return executor.stats().transfers["gradients"]


def waiting(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if is_waiting(parameter.grad)]


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("plan", "asynchronous"), in_turns(list(PLANS), [True, False]))
def test_the_bits_are_those_of_plain_training(plan: str, asynchronous: bool):
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    reference.run()
    with wrapped(training.net, *PLANS[plan], asynchronous=asynchronous) as executor:
        training.run()
        assert same(training.result(), reference.result())
        assert stats(executor).num_sent > 0
        assert stats(executor).num_brought >= stats(executor).num_sent
    assert same(training.run().result(), reference.run().result())
    no_hooks_left(training.optimizer)


@pytest.mark.parametrize(("name", "plan"), in_turns(list(OPTIMIZERS), ["all", "stretches", "state stays"]))
def test_with_every_optimizer(name: str, plan: str):
    def make(net: nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference, training = Training("simgpu", make).run(), Training("simgpu", make)
    with wrapped(training.net, *PLANS[plan]) as executor:
        assert same(training.run().result(), reference.result())
        assert stats(executor).num_sent > 0


@pytest.mark.parametrize(
    ("mode", "plan"),
    in_turns(["closure", "accumulate", "accumulate keep", "schedule keep"], ["all", "half", "stretches", "guests"]),
)
def test_loops_that_accumulate_and_zero(mode: str, plan: str):
    reference, training = Training("simgpu", plain(O.AdamW), mode).run(), Training("simgpu", plain(O.AdamW), mode)
    with wrapped(training.net, *PLANS[plan]) as executor:
        assert same(training.run().result(), reference.result())
        assert stats(executor).num_sent > 0


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_in_16_bits(share: float):
    reference, training = (Training("simgpu", plain(O.AdamW), dtype=torch.bfloat16) for _ in range(2))
    actions = OffloadOptimizer(BUCKET_BYTES), OffloadGradients("body", share), OffloadGradients("head", share)
    with wrapped(training.net, *actions) as executor:
        assert same(training.run().result(), reference.run().result())
        assert stats(executor).num_sent > 0


# ------------------------------------------------------------------------------------- what the training loop does


def half_a_step(training: Training) -> None:
    training.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(training.num_steps)
    training.backward(torch.randn(16, 64, generator=generator, device="cpu").to("simgpu"))


LOOKS: dict[str, Any] = {
    "clip by norm": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.5),
    "clip by value": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.5),
    "norm": lambda net: waiting(net)[0].grad.norm(),
    "data": lambda net: waiting(net)[0].grad.data.mul_(2),
    "scale": lambda net: waiting(net)[0].grad.mul_(2),
    "add": lambda net: torch._foreach_add_([p.grad for p in waiting(net)], 1.0),
    "add another": lambda net: net.body[4].weight.grad.clone().add_(waiting(net)[0].grad),
    "copy": lambda net: copy.deepcopy(waiting(net)[0].grad),
    "host": lambda net: waiting(net)[0].grad.cpu(),
    "finite": lambda net: torch.isfinite(waiting(net)[0].grad).all(),
    "divide": lambda net: torch._foreach_div_([p.grad for p in waiting(net)], 2.0),
}


@pytest.mark.parametrize("look", list(LOOKS))
def test_looking_at_a_gradient_that_waits_raises_and_changes_nothing(look: str):
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS["all"]):
        for one in (reference, training):
            half_a_step(one)
        assert len(waiting(training.net)) == 4, "three matrices of the body, and the head's"
        with pytest.raises(OffloadError, match="enable_gradient_offload=False"):
            LOOKS[look](training.net)
        for one in (reference, training):
            one.update()
            one.run(2)
        assert same(training.result(), reference.result())


@pytest.mark.parametrize("mode", ["scaler", "scaler unscale"])
def test_a_gradient_scaler_raises_before_anything_changes(mode: str):
    training = Training("simgpu", plain(O.AdamW), mode).run(1)
    with wrapped(training.net, *PLANS["all"]):
        before = on_host(training.net.state_dict())
        half_a_step(training)
        with pytest.raises(OffloadError, match="enable_gradient_offload=False"):
            training.update()
        assert same(on_host(training.net.state_dict()), before)


def _freeze(training: Training) -> None:
    for parameter in training.net.body.parameters():
        parameter.grad = None


def _zero(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)


def _zero_one(training: Training) -> None:
    training.net.body[0].weight.grad.zero_()


def _replace(training: Training) -> None:
    weight = training.net.body[0].weight
    weight.grad = torch.ones_like(weight)


def _add(training: Training) -> None:
    training.backward(torch.ones(16, 64, device="simgpu"))


def _part_of_it(training: Training) -> None:
    """Some gradients are added to, and others are zeros from here on."""
    _zero(training)
    training.net.head(torch.ones(16, 64, device="simgpu")).square().mean().backward()


def _keep_a_graph(training: Training) -> None:
    loss = training.net(torch.ones(4, 64, device="simgpu")).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _evaluate(training: Training) -> None:
    with torch.no_grad():
        training.net(torch.ones(2, 64, device="simgpu"))


def _save_and_load(training: Training) -> None:
    training.optimizer.load_state_dict(on_host(copy.deepcopy(training.optimizer.state_dict())))
    training.net.load_state_dict(on_host(copy.deepcopy(training.net.state_dict())))


def _step_twice(training: Training) -> None:
    training.update()


BETWEEN: dict[str, Any] = {
    "a part without gradients": _freeze,
    "zeros": _zero,
    "zeros in one": _zero_one,
    "another gradient": _replace,
    "another batch": _add,
    "a part of it": _part_of_it,
    "two backwards of a graph": _keep_a_graph,
    "evaluate": _evaluate,
    "save and load": _save_and_load,
    "step twice": _step_twice,
}


@pytest.mark.parametrize(("between", "plan"), in_turns(list(BETWEEN), ["all", "stretches", "guests", "half"]))
def test_whatever_happens_between_backward_and_the_step(between: str, plan: str):
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS[plan]):
        for one in (reference, training):
            one.run(1)
            half_a_step(one)
            assert bool(waiting(one.net)) == (one is training)
            BETWEEN[between](one)
            one.update()
            one.run(2)
        assert same(training.result(), reference.result())
    assert same(training.run(2).result(), reference.run(2).result())


@pytest.mark.parametrize("is_flat", [True, False])
def test_gradients_that_the_loop_holds_stay(is_flat: bool):
    """It zeroes what it holds, in place, and nobody else hears of that."""
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS["all"]):
        for one in (reference, training):
            parameters = [parameter for parameter in one.net.parameters() if parameter is not one.net.unused.weight]
            flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device="simgpu")
            sizes = [parameter.numel() for parameter in parameters]
            parts = flat.split(sizes) if is_flat else [torch.zeros(size, device="simgpu") for size in sizes]
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            for number in range(3):
                one.backward(torch.full((16, 64), 0.1 * number, device="simgpu"))
                assert not waiting(one.net)
                one.update()
                for part in parts:
                    part.zero_()
            one.optimizer.zero_grad()
            one.run(1)
        assert waiting(training.net)
        assert same(training.result(), reference.result())


@pytest.mark.parametrize(
    "keep", [lambda gradient: gradient, lambda gradient: gradient.view(-1), lambda gradient: gradient.detach()]
)
def test_gradients_that_a_hook_keeps_stay(keep: Any):
    """The loop scales them later, and nobody else hears of that."""
    reference, training = (Training("simgpu", plain(O.AdamW)) for _ in range(2))
    weight, kept = training.net.body[0].weight, []
    for one in (reference, training):
        one.net.body[0].weight.register_post_accumulate_grad_hook(lambda p: kept.append(keep(p.grad)))
    with wrapped(training.net, *PLANS["all"]) as executor:
        for _ in range(3):
            for one in (reference, training):
                half_a_step(one)
                assert not is_waiting(weight.grad)
                kept.pop().mul_(3.0)
                one.update()
                one.num_steps += 1
        assert stats(executor).num_sent > 0
        assert same(training.result(), reference.result())


def test_copies_of_the_model_are_plain():
    training = Training("simgpu", plain(O.AdamW)).run(1)
    with wrapped(training.net, *PLANS["all"]):
        half_a_step(training)
        copied = copy.deepcopy(training.net)
        torch.save(training.net, io.BytesIO())
        assert not any(parameter._backward_hooks for parameter in copied.parameters())
        assert not waiting(copied)
        training.update()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_stay():
    training = Training("simgpu", plain(O.AdamW)).run(1)
    training.optimizer.zero_grad()
    with wrapped(training.net, *PLANS["all"]):
        training.net(torch.ones(4, 64, device="simgpu")).square().mean().backward(create_graph=True)
        assert not waiting(training.net)
        training.optimizer.zero_grad()
    gc.collect()  # a gradient's graph and its parameter hold each other


@pytest.mark.parametrize("plan", ["all", "stretches"])
def test_the_plan_is_taken_off_between_backward_and_the_step(plan: str):
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    for one in (reference, training):
        with contextlib.ExitStack() as undo:
            if one is training:
                undo.enter_context(wrapped(one.net, *PLANS[plan]))
            one.run(1)
            half_a_step(one)
        assert not waiting(one.net)
        one.update()
    gradients = [[on_host(p.grad) for p in one.net.parameters() if p.grad is not None] for one in (reference, training)]
    assert same(*gradients)
    assert same(training.result(), reference.result())
    no_hooks_left(training.optimizer)


def test_another_plan_takes_over_between_backward_and_the_step():
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS["all"]) as executor:
        for one in (reference, training):
            half_a_step(one)
            if one is training:
                executor.apply(plan_of([OffloadOptimizer(BUCKET_BYTES)], device_type="simgpu"))
                assert not waiting(one.net)
            one.update()
            one.run(2)
        assert same(training.result(), reference.result())


def test_a_backward_that_fails():
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS["all"]):
        for one in (reference, training):
            handle = one.net.body[0].weight.register_hook(explode)
            with pytest.raises(Boom):
                half_a_step(one)
            let_autograd_finish()
            handle.remove()
            assert bool(waiting(one.net)) == (one is training), "those of later layers were final"
            one.run(2)
        assert same(training.result(), reference.result())


# ------------------------------------------------------------------------------------------------ what it takes


class Stack(nn.Sequential):
    """Equal layers, of which each has a bucket."""

    def __init__(self, num_layers: int = 8, width: int = 128) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))


LAYER_BYTES = 128 * 128 * 4


def bytes_here() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def stack_plan(*layers: int) -> list[Any]:
    waits = [OffloadGradients(str(number), bucket_bytes=LAYER_BYTES) for number in layers]
    return [OffloadOptimizer(LAYER_BYTES), *waits]


@pytest.mark.parametrize(("layers", "asynchronous"), in_turns([(), (3,), (0, 2, 7), tuple(range(8))], [True, False]))
def test_so_many_bytes_are_free_between_backward_and_the_step(layers: tuple[int, ...], asynchronous: bool):
    net = Stack().to("simgpu")
    optimizer = O.AdamW(net.parameters())
    with wrapped(net, *stack_plan(*layers), asynchronous=asynchronous) as executor:
        for _ in range(3):
            before = bytes_here()
            net(torch.ones(2, 128, device="simgpu")).square().mean().backward()
            assert bytes_here() - before == (8 - len(layers)) * LAYER_BYTES
            if layers:
                assert stats(executor).transfers.bytes_sent > 0
            optimizer.step()
            assert bytes_here() - before == (8 - len(layers)) * LAYER_BYTES
            optimizer.zero_grad()


def test_the_largest_parameters_of_a_layer_are_chosen():
    sizes = (100_000, 50_000, 50_000, 4_000, 1_000)
    parameters = [torch.empty(size) for size in sizes]

    def chosen(share: float) -> list[int]:
        return [one.numel() for one in choose_waiting(parameters, share)]

    assert chosen(1.0) == [100_000, 50_000, 50_000], "small ones stay"
    assert chosen(0.5) == [100_000]
    assert chosen(0.3) == [50_000]
    assert chosen(0.01) == []
    assert choose_waiting([], 1.0) == []


@pytest.mark.parametrize("share", [0.0, -1, 1.5, float("nan"), "all"])
def test_a_share_is_a_part_of_one(share: Any):
    with pytest.raises(ConfigError, match=r"must be a number in \(0, 1\]"):
        OffloadGradients("body", share)


def test_a_full_host_is_said_in_backward_and_nothing_is_lost():
    room = 3 * 64 * 1024
    net = Stack().to("simgpu")
    optimizer = O.SGD(net.parameters(), lr=0.1)
    with wrapped(net, *stack_plan(*range(8)), host_budget_bytes=room):
        with pytest.raises(StoreFullError):
            net(torch.ones(2, 128, device="simgpu")).square().mean().backward()
        let_autograd_finish()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------ waits and failures


WAITS = ("out after compute", "in after compute", "compute after arrival", "reuse after sent")


def train_stack() -> None:
    net = Stack().to("simgpu")
    optimizer = O.AdamW(net.parameters())
    settings = ExecutionSettings(asynchronous=True, device=DEVICE)
    executor = execute(net, plan_of(stack_plan(*range(8)), device_type="simgpu"), settings)
    for _ in range(3):
        for _ in range(2):
            net(torch.ones(64, 128, device="simgpu")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    executor.detach()
    torch.accelerator.synchronize()


def test_there_is_no_race():
    train_stack()
    assert simgpu.take_reports() == []


@pytest.mark.parametrize("why", WAITS)
def test_each_wait_is_needed(why: str, monkeypatch: pytest.MonkeyPatch):
    with left_out(why, monkeypatch):
        train_stack()
    assert simgpu.take_reports() != []


@pytest.mark.parametrize(("nth", "where"), in_turns([1, 2, 3, 5, 8, 12], ["step", "backward"]))
def test_a_copy_that_fails_is_said_and_the_weights_are_whole(nth: int, where: str):
    """Nothing is stepped with a gradient that did not come; a checkpoint goes on where it was saved."""
    reference, training = (Training("simgpu", plain(O.AdamW)).run(2) for _ in range(2))
    with wrapped(training.net, *PLANS["all"]):
        saved = copy.deepcopy((training.net.state_dict(), training.optimizer.state_dict()))
        if where == "step":
            half_a_step(training)
        with simgpu.fail_copy(nth) as injected:
            try:
                if where == "backward":
                    half_a_step(training)
                training.update()
            except (RuntimeError, MemScaleError) as error:
                caught: BaseException | None = error.with_traceback(None)
            else:
                caught = None
        assert injected.fired
        if caught is not None:
            let_autograd_finish()
            training.net.load_state_dict(saved[0])
            training.optimizer.load_state_dict(saved[1])
            half_a_step(training)
            training.update()
        half_a_step(reference)
        reference.update()
        assert same(training.run(1).result(), reference.run(1).result())


# ------------------------------------------------------------------------------------------------ what is rehearsed


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_plan_with_them_promises_no_less_than_the_peak_of_the_run(asynchronous: bool):
    """Nothing is streamed: the lowest plan sends all that it can of state and gradients away. The peak is in the step,
    where those that come are counted with whatever else needs most."""
    config = config_of(async_offload=asynchronous, enable_gradient_offload=True)
    plan, peaks = train_planned(LARGE, config)
    assert OffloadGradients in {type(action) for action in plan.actions}
    assert max(peaks) <= plan.predicted_peak_bytes
    at_most = OPTIMIZER_BUCKET_BYTES * (2 if asynchronous else 1)
    assert plan.predicted_peak_bytes <= max(peaks) + at_most, "gradients of two turns, in the step that needs most"
    without, _ = train_planned(LARGE, config.replace(enable_gradient_offload=False))
    assert plan.predicted_peak_bytes < without.predicted_peak_bytes


@pytest.mark.parametrize(("share", "asynchronous"), in_turns([0.5, 1.0], [True, False]))
def test_forward_and_backward_peak_as_rehearsed_to_the_byte(share: float, asynchronous: bool):
    config = Config(device="simgpu", enable_logging=False, async_offload=asynchronous, enable_gradient_offload=True)
    model, x = Mlp(width=256, depth=6), torch.randn(4, 256)
    actions = [OffloadGradients(fqn, share) for fqn in find_blocks(model)]
    planner = Planner(Job(model, config, Hardware.detect("simgpu"), "adamw"), Inputs((x,)))
    trace = planner.trace_of(tuple(actions), config)
    model, x = model.to("simgpu"), x.to("simgpu")
    with wrapped(model, *actions, asynchronous=asynchronous) as executor:
        for _ in range(2):
            before = bytes_here()
            torch.accelerator.reset_peak_memory_stats()
            model(x).square().mean().backward()
            torch.accelerator.synchronize()
            assert torch.accelerator.max_memory_allocated() - before == trace.peak_bytes
            assert bytes_here() - before == trace.end_bytes
            model.zero_grad()
        assert stats(executor).num_sent > 0
    del model
