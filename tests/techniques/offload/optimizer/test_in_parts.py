"""Optimizers of a model with streamed parameters: their steps are those of the whole model, in every type."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._errors import OffloadError
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OffloadOptimizer, QuantizeOptimizer, StreamParameters
from memscale.techniques.offload.optimizer import in_parts
from memscale.techniques.offload.optimizer.adoption import adopt_optimizer
from memscale.techniques.offload.optimizer.implementations import devices_of_streamed
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.parameters import streaming
from tests.parity import plan_of
from tests.techniques.offload.runs import DEVICE, same, weights
from tests.techniques.offload.tiers import opened
from tests.techniques.offload.training import no_hooks_left

O = torch.optim  # noqa: E741
Make = Callable[[Any], O.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda ps: O.SGD(ps, 0.05),
    "SGD momentum": lambda ps: O.SGD(ps, 0.05, momentum=0.9),
    "SGD nesterov": lambda ps: O.SGD(ps, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda ps: O.Adam(ps, 1e-2, weight_decay=0.1),
    "Adam amsgrad": lambda ps: O.Adam(ps, 1e-2, amsgrad=True, maximize=True),
    "AdamW": lambda ps: O.AdamW(ps, 1e-2),
    "AdamW fused": lambda ps: O.AdamW(ps, 1e-2, fused=True),
    "AdamW loop": lambda ps: O.AdamW(ps, 1e-2, foreach=False),
    "AdamW foreach": lambda ps: O.AdamW(ps, 1e-2, foreach=True),
    "RMSprop": lambda ps: O.RMSprop(ps, 1e-3),
    "RMSprop centered": lambda ps: O.RMSprop(ps, 1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda ps: O.Adagrad(ps, 1e-2),
    "Adamax": lambda ps: O.Adamax(ps, 1e-2),
    "Adadelta": lambda ps: O.Adadelta(ps, 1e-2),
    "NAdam": lambda ps: O.NAdam(ps, 1e-2),
    "RAdam": lambda ps: O.RAdam(ps, 1e-2),
    "ASGD": lambda ps: O.ASGD(ps, 1e-2),
    "Rprop": lambda ps: O.Rprop(ps, 1e-2),
    "Adafactor": lambda ps: O.Adafactor(ps, 1e-2),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SENSITIVE = "ASGD"
"""Rounds differently in its two implementations from the first step on, in any type."""


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*layers).to(DEVICE, dtype)


@contextlib.contextmanager
def streamed(model: nn.Module, *module_fqns: str) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        streaming.attach([StreamParameters(fqn) for fqn in module_fqns or ("1",)], model, DEVICE, undo)
        yield


def backward(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step), device="cpu")
    loss = model(x.to(DEVICE, next(model.parameters()).dtype)).float().square().mean()
    loss.backward()
    return loss.detach().cpu()


def steps(model: nn.Module, optimizer: O.Optimizer, count: int = 6, first: int = 0) -> None:
    for step in range(first, first + count):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def reference(name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    plain = build(dtype)
    steps(plain, OPTIMIZERS[name](plain.parameters()))
    return weights(plain)


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_the_whole_model(name: str, dtype: torch.dtype):
    model = build(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    with streamed(model):
        steps(model, optimizer)
    assert same(weights(model), reference(name, dtype))


@pytest.mark.parametrize("module_fqns", [("0",), ("0", "2"), ("0", "1", "2")])
def test_whatever_is_streamed(module_fqns: tuple[str, ...]):
    model = build()
    with streamed(model, *module_fqns):
        steps(model, OPTIMIZERS[SENSITIVE](model.parameters()))
    assert same(weights(model), reference(SENSITIVE))


def test_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch):
    model = build()
    monkeypatch.setattr(in_parts, "BYTES_AT_ONCE", 100)
    with streamed(model):
        optimizer = OPTIMIZERS[SENSITIVE](model.parameters())
        assert [len(part) for part in in_parts.parts_of(optimizer)] == [4, 1, 1], "those on the device at once"
        steps(model, optimizer)
    assert same(weights(model), reference(SENSITIVE))


@pytest.mark.parametrize(
    "actions",
    [
        (OffloadOptimizer(1500),),
        (OffloadOptimizer(1500), QuantizeOptimizer(1500, min_elements=1 << 20)),
        (QuantizeOptimizer(1500, min_elements=1 << 20),),
    ],
    ids=["offloaded", "both", "quantized"],
)
def test_with_state_that_waits_in_buckets(actions: tuple[Any, ...]):
    model = build(torch.bfloat16)
    plan = plan_of([StreamParameters("1"), *actions], device_type="simgpu")
    executor = execute(model, plan, ExecutionSettings(device=DEVICE))
    steps(model, OPTIMIZERS["Adagrad"](model.parameters()))
    executor.detach()
    assert same(weights(model), reference("Adagrad", torch.bfloat16))


def test_a_bucket_is_stepped_as_its_group_even_if_nothing_is_streamed(tmp_path: pathlib.Path):
    """The user has put one layer on the host: PyTorch steps the whole group in its loop, on the device, too."""
    plain, model = build(), build()
    for either in (plain, model):
        either.add_module("beside", nn.Linear(16, 16, bias=False, device="cpu"))
        nn.init.zeros_(either.beside.weight)
    theirs, ours = (OPTIMIZERS[SENSITIVE](either.parameters()) for either in (plain, model))
    with opened("simgpu host sync", tmp_path) as transfers, contextlib.ExitStack() as undo:
        adopt_optimizer(ours, transfers.store, transfers, 1500, undo)
        for step in range(4):
            for either, optimizer in ((plain, theirs), (model, ours)):
                backward(either[:3], step)
                either.beside.weight.grad = torch.ones(16, 16)
                optimizer.step()
                optimizer.zero_grad()
    assert same(weights(model), weights(plain))


# ------------------------------------------------------------------------------------------------- the user's loop


def test_groups_closures_schedulers_and_hooks():
    results = []
    for is_streamed in (True, False):
        model = build(torch.bfloat16)
        groups = [{"params": list(model[:2].parameters()), "lr": 1e-2}, {"params": list(model[2].parameters())}]
        optimizer = O.RMSprop(groups, lr=1e-3, momentum=0.9)
        scheduler = O.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        with streamed(model) if is_streamed else contextlib.nullcontext():
            for step in range(3):
                losses.append(optimizer.step(lambda step=step, model=model: backward(model, step)).item())
                scheduler.step()
                optimizer.zero_grad()
            optimizer.register_step_pre_hook(_halve)  # later than ours, and yet it comes first
            steps(model, optimizer, 2, first=3)
        assert all(group["foreach"] is None for group in optimizer.param_groups)
        results.append((weights(model), losses, scheduler.get_last_lr()))
    assert same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def _halve(optimizer: O.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def test_a_learning_rate_in_a_tensor():
    """Adam takes its loop for one on any device, and has nothing else; SGD does not."""
    for kind in (O.AdamW, O.SGD):
        results = []
        for is_streamed in (True, False):
            model = build(torch.bfloat16)
            with streamed(model) if is_streamed else contextlib.nullcontext():
                options = {"momentum": 0.9} if kind is O.SGD else {}
                steps(model, kind(model.parameters(), lr=torch.tensor(0.01), **options), 4)
            results.append(weights(model))
        assert same(*results)


def test_gradients_that_come_only_sometimes_and_parameters_that_come_later():
    results = []
    for is_streamed in (True, False):
        model = build(torch.bfloat16)
        optimizer = O.RMSprop(model[:2].parameters(), 1e-3)
        with streamed(model) if is_streamed else contextlib.nullcontext():
            steps(model, optimizer, 2)
            model[1].requires_grad_(False)
            steps(model, optimizer, 2, first=2)
            model[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters())})
            steps(model, optimizer, 2, first=4)
        results.append(weights(model))
    assert same(*results)


def test_checkpoints_and_copies_are_as_ever():
    model, plain = build(), build()
    ours, theirs = OPTIMIZERS[SENSITIVE](model.parameters()), OPTIMIZERS[SENSITIVE](plain.parameters())
    steps(plain, theirs, 3)
    with streamed(model):
        steps(model, ours, 1)
        entry = ours.state[model[0][0].weight]
        saved = ours.state_dict()
        assert saved["param_groups"][0]["foreach"] is None
        steps(model, ours, 2, first=1)
        assert entry is ours.state[model[0][0].weight], "the same entry as ever"
        copied = copy.deepcopy(ours)
        assert not copied._optimizer_step_pre_hooks
        for key, values in theirs.state_dict()["state"].items():
            for name, value in values.items():
                assert torch.equal(ours.state_dict()["state"][key][name].cpu(), value.cpu()), (key, name)


# ------------------------------------------------------------------------------------------------ coming and going


def test_nothing_is_left_behind():
    model = build()
    optimizer = OPTIMIZERS[SENSITIVE](model.parameters())
    with streamed(model):
        steps(model, optimizer, 1)
        assert optimizer._optimizer_step_pre_hooks
        assert set(devices_of_streamed().values()) == {DEVICE}
    no_hooks_left(optimizer)
    assert not devices_of_streamed()


def test_the_optimizer_dies_with_its_last_reference():
    model = build()
    with streamed(model):
        optimizer = OPTIMIZERS[SENSITIVE](model.parameters())
        steps(model, optimizer, 1)
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert reference() is None


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW loop", "AdamW foreach", "Adafactor"])
def test_who_does_not_choose_by_device_is_left_alone(name: str):
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    with streamed(model):
        steps(model, optimizer, 1)
        assert not optimizer._optimizer_step_pre_hooks


class ByNorm(O.SGD):
    """Its update of one parameter depends on all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        present = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(p.grad.float().norm().item() for p in present)
        for parameter in present:
            parameter.grad.div_(total)
        return super().step(closure)


def test_who_cannot_be_split_is_left_alone_with_a_word():
    model = build()
    with streamed(model):
        optimizer = ByNorm(model.parameters(), lr=0.1, momentum=0.9)
        backward(model, 0)
        with pytest.warns(UserWarning, match="ByNorm is left as it is .*one by one"):
            optimizer.step()
        optimizer.step()
        assert not optimizer._optimizer_step_pre_hooks


def test_who_joins_all_gradients_is_refused_before_anything_has_changed():
    model = build()
    with streamed(model):
        optimizer = O.LBFGS(model.parameters(), max_iter=3)
        before = weights(model)
        with pytest.raises(OffloadError, match=r"LBFGS joins the gradients of all 6 parameters .* cpu and simgpu"):
            optimizer.step(lambda: backward(model, 0))
        assert same(weights(model), before)
        assert all(parameter.grad is None for parameter in model.parameters())
    plain = build()
    for net in (model, plain):  # without streamed layers it steps as ever
        optimizer = O.LBFGS(net.parameters(), max_iter=3)
        optimizer.step(lambda: net.zero_grad() or backward(net, 0))  # noqa: B023
    assert same(weights(model), weights(plain))


def test_who_joins_all_gradients_is_refused_at_once_where_it_is_known():
    model = build()
    optimizer = O.LBFGS(model.parameters(), max_iter=3)
    before = weights(model)
    with pytest.raises(OffloadError, match=r"LBFGS joins the gradients of all 6 parameters"), streamed(model):
        raise AssertionError("it was attached")
    assert all(parameter.device.type == DEVICE.type for parameter in model.parameters())
    assert same(weights(model), before)
    optimizer.step(lambda: backward(model, 0))


def test_who_joins_all_gradients_steps_where_all_is_streamed_and_afterwards():
    """Its state is lists of tensors, which follow the parameters back to the device, too."""
    results = []
    for is_streamed in (True, False):
        model = build()
        optimizer = O.LBFGS(model.parameters(), max_iter=3)
        with streamed(model, "0", "1", "2") if is_streamed else contextlib.nullcontext():
            for number in range(2):
                optimizer.step(lambda: model.zero_grad() or backward(model, number))  # noqa: B023
        optimizer.step(lambda: model.zero_grad() or backward(model, 2))  # noqa: B023
        results.append(weights(model))
    assert same(*results)


def test_a_wrapped_model_in_16_bits(simgpu_device: Any):
    """The whole way: planned, streamed, trained."""
    results = []
    for is_wrapped in (True, False):
        model = build(torch.bfloat16)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE, torch.bfloat16)
        if is_wrapped:
            config = Config(force_optimize=True, enable_logging=False, enable_tiling=False, async_offload=False)
            memscale.wrap(model, config, x)
            assert any(isinstance(a, StreamParameters) for a in model._memscale_executor.plan.actions)
        steps(model, O.SGD(model.parameters(), 0.05, momentum=0.9))
        if is_wrapped:
            memscale.detach(model)
        results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("on_device", [False, True])
def test_products_that_the_host_rounds_otherwise_are_spoken_of_once(
    on_device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Muon multiplies in bfloat16. On the device its step is that of the plain model."""
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    model, twin = copy.deepcopy(twin), twin.to(DEVICE)
    actions: list[Any] = [StreamParameters(str(number)) for number in range(3)]
    plan = plan_of([*actions, *([StepOnDevice(1 << 20)] if on_device else [])], device_type="simgpu")
    executor = execute(model, plan, ExecutionSettings(device=DEVICE))
    with caplog.at_level(logging.WARNING, logger="memscale"):
        for each in (model, twin):
            optimizer = O.Muon(each.parameters(), lr=1e-2)
            for _ in range(2):
                each(torch.ones(4, 16, device=DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    executor.detach()
    assert caplog.text.count("Muon multiplies matrices of 16 bits") == (not on_device)
    assert same(weights(model), weights(twin)) or not on_device
