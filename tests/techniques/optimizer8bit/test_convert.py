"""bitsandbytes' own class in the place of the user's: same groups, options and state, schedulers that go on, undone."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from memscale import MemScaleError
from memscale.techniques.optimizer8bit.blocks import dequantize, quantize
from memscale.techniques.optimizer8bit.convert import Conversion, NoCounterpart, convert, counterpart_of
from tests.techniques.optimizer8bit.test_in_place import Lion

O = torch.optim  # noqa: E741

MAKES: dict[str, tuple[Any, type]] = {
    "AdamW": (lambda p: O.AdamW(p, lr=1e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1), bnb.optim.AdamW8bit),
    "Adam": (lambda p: O.Adam(p, lr=1e-3), bnb.optim.Adam8bit),
    "SGD": (lambda p: O.SGD(p, lr=1e-2, momentum=0.8, weight_decay=0.1), bnb.optim.SGD8bit),
    "RMSprop": (lambda p: O.RMSprop(p, lr=1e-3, alpha=0.9, weight_decay=0.1), bnb.optim.RMSprop8bit),
    "Adagrad": (lambda p: O.Adagrad(p, lr=1e-2, weight_decay=0.1), bnb.optim.Adagrad8bit),
    "Lion": (Lion, bnb.optim.Lion8bit),
}


class Net(nn.Module):
    """An embedding of 8-bit size, a matrix of 8-bit size, small ones."""

    def __init__(self, width: int = 80) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.line = nn.Linear(width, width)
        self.small = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.small(torch.tanh(self.line(self.embedding(tokens))))


def build(width: int = 80) -> Net:
    torch.manual_seed(0)
    return Net(width)


def step(net: Net, optimizer: O.Optimizer, number: int) -> float:
    tokens = torch.randint(0, 64, (8, 4), generator=torch.Generator().manual_seed(number))
    loss = net(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def converted(name: str, net: Net, steps: int = 0) -> tuple[O.Optimizer, Conversion]:
    optimizer = MAKES[name][0](net.parameters())
    for number in range(steps):
        step(net, optimizer, number)
    return optimizer, convert(optimizer, net)


# ----------------------------------------------------------------------------------------------- groups and options


@pytest.mark.parametrize("name", MAKES)
def test_the_class_is_bitsandbytes_own_and_the_groups_are_the_users(name: str) -> None:
    net = build()
    optimizer = MAKES[name][0](net.parameters())
    groups, options = optimizer.param_groups, copy.copy(optimizer.param_groups[0])
    conversion = convert(optimizer, net)
    assert type(conversion.optimizer) is MAKES[name][1]
    assert conversion.optimizer.param_groups is groups
    for option in ("lr", "weight_decay", "betas"):
        if option in options:
            assert groups[0][option] == options[option]
    conversion.undo()
    assert optimizer.param_groups is groups
    assert set(groups[0]) == set(options)
    step(net, optimizer, 0)


@pytest.mark.parametrize("name", MAKES)
def test_small_models_train_as_with_torch(name: str) -> None:
    """All parameters are too small for 8 bits: what is left is whether options and state mean the same."""
    theirs, ours = build(12), build(12)
    reference = MAKES[name][0](theirs.parameters())
    for number in range(3):
        step(theirs, reference, number)
    _, conversion = converted(name, ours, steps=3)
    for number in range(3, 8):
        step(theirs, reference, number)
        step(ours, conversion.optimizer, number)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    conversion.undo()


@pytest.mark.parametrize("name", MAKES)
def test_large_models_train_close_to_torch(name: str) -> None:
    theirs, ours = build(), build()
    reference = MAKES[name][0](theirs.parameters())
    optimizer, conversion = converted(name, ours)
    losses = [(step(theirs, reference, n), step(ours, conversion.optimizer, n)) for n in range(20)]
    assert conversion.optimizer.state[ours.line.weight]["state1"].dtype == torch.uint8
    assert losses[-1][1] == pytest.approx(losses[-1][0], rel=0.05)
    assert losses[-1][1] < losses[0][1]
    conversion.undo()
    assert not hasattr(optimizer, "_memscale_shadow")


# ------------------------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("name", MAKES)
def test_state_is_converted_and_comes_back(name: str) -> None:
    net = build()
    reference = MAKES[name][0](net.parameters())
    for number in range(3):
        step(net, reference, number)
    before = {p: dict(entry) for p, entry in reference.state.items()}
    conversion = convert(reference, net)
    moments = conversion.counterpart.moments
    ours = conversion.optimizer.state
    assert not reference.state
    assert ours[net.line.weight]["state1"].dtype == torch.uint8
    assert ours[net.embedding.weight]["state1"].dtype == torch.float32
    assert torch.equal(ours[net.embedding.weight]["state1"], before[net.embedding.weight][moments[0]])
    conversion.undo()
    for parameter, entry in before.items():
        back = reference.state[parameter]
        assert set(back) == set(entry)
        for number, moment in enumerate(moments, start=1):
            expected = entry[moment]
            if parameter is net.line.weight:
                line = dequantize(*quantize(expected.view(-1), number == 1, 256), number == 1, 256)
                expected = line.view(expected.shape)
            assert torch.equal(back[moment], expected)
        if "step" in entry:
            assert torch.equal(torch.as_tensor(back["step"]), torch.as_tensor(entry["step"]))
    step(net, reference, 9)


def test_embeddings_are_in_32_bits_from_the_start_and_no_global_settings_are_made() -> None:
    net = build()
    _, conversion = converted("AdamW", net)
    step(net, conversion.optimizer, 0)
    state = conversion.optimizer.state
    assert state[net.embedding.weight]["state1"].dtype == torch.float32
    assert state[net.line.weight]["state1"].dtype == torch.uint8
    manager = bnb.optim.GlobalOptimManager.get_instance()
    assert not manager.pid2config
    assert not manager.index2config
    assert not manager.module_weight_config_triple


def test_state_dict_resumes_bit_for_bit() -> None:
    net, again = build(), build()
    _, conversion = converted("AdamW", net)
    for number in range(3):
        step(net, conversion.optimizer, number)
    saved = copy.deepcopy([net.state_dict(), conversion.optimizer.state_dict()])
    expected = [step(net, conversion.optimizer, number) for number in range(3, 6)]
    _, resumed = converted("AdamW", again)
    again.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert [step(again, resumed.optimizer, number) for number in range(3, 6)] == expected


# --------------------------------------------------------------------------------------------- schedulers and guards


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_scheduler_that_was_bound_before_goes_on(name: str) -> None:
    net = build()
    optimizer = MAKES[name][0](net.parameters())
    scheduler = O.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    conversion = convert(optimizer, net)
    seen = []
    for number in range(5):
        step(net, conversion.optimizer, number)
        scheduler.step()  # would warn if it had not seen a step
        group = conversion.optimizer.param_groups[0]
        seen.append(group["lr"])
        if name == "SGD":
            step(net, conversion.optimizer, number)
            assert group["betas"][0] == group["momentum"] != 0.8
    assert len(set(seen)) == 5
    assert scheduler.get_last_lr() == [seen[-1]]
    conversion.undo()


def test_a_scheduler_goes_on_after_a_state_was_loaded() -> None:
    net = build()
    optimizer, conversion = converted("AdamW", net)
    scheduler = O.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(net, conversion.optimizer, 0)
    saved = copy.deepcopy(conversion.optimizer.state_dict())
    scheduler.step()
    conversion.optimizer.load_state_dict(saved)
    step(net, conversion.optimizer, 1)
    assert conversion.optimizer.param_groups[0]["lr"] == 1e-3
    scheduler.step()
    assert conversion.optimizer.param_groups[0]["lr"] == 5e-4


def test_groups_that_are_added_are_the_users_too() -> None:
    net = build()
    optimizer, conversion = converted("AdamW", net)
    other = nn.Linear(4, 4)
    conversion.optimizer.add_param_group({"params": list(other.parameters()), "lr": 7.0})
    assert optimizer.param_groups[1]["lr"] == 7.0
    other(torch.randn(1, 4)).sum().backward()
    step(net, conversion.optimizer, 0)
    conversion.undo()


@pytest.mark.parametrize("to_the_users", [True, False])
@pytest.mark.parametrize("name", MAKES)
def test_groups_that_are_added_to_either_train_and_come_back(name: str, to_the_users: bool) -> None:
    net = build()
    optimizer = MAKES[name][0](net.line.parameters())
    options = set(optimizer.param_groups[0])
    conversion = convert(optimizer, net)
    target = optimizer if to_the_users else conversion.optimizer
    target.add_param_group({"params": [*net.embedding.parameters(), *net.small.parameters()]})
    before = net.embedding.weight.detach().clone()
    step(net, conversion.optimizer, 0)
    assert not torch.equal(net.embedding.weight, before)
    assert conversion.optimizer.state[net.embedding.weight]["state1"].dtype == torch.float32
    conversion.undo()
    step(net, optimizer, 1)
    assert [set(group) for group in optimizer.param_groups] == [options, options]


def test_embeddings_that_are_trained_later_are_in_32_bits() -> None:
    net = build()
    net.embedding.requires_grad_(False)
    _, conversion = converted("AdamW", net)
    step(net, conversion.optimizer, 0)
    net.embedding.requires_grad_(True)
    step(net, conversion.optimizer, 1)
    assert conversion.optimizer.state[net.embedding.weight]["state1"].dtype == torch.float32


@pytest.mark.parametrize("change", [{"weight_decay": 0.1}, {"amsgrad": True}])
def test_a_group_that_comes_to_ask_for_something_else_is_refused(change: dict[str, Any]) -> None:
    net = build()
    optimizer, conversion = converted("Adam", net)
    optimizer.param_groups[0].update(change)
    with pytest.raises(MemScaleError, match="Adam8bit cannot go on"):
        step(net, conversion.optimizer, 0)


@pytest.mark.parametrize("name", MAKES)
def test_a_plain_checkpoint_is_loaded(name: str) -> None:
    nets, results = [build(), build()], []
    plain = MAKES[name][0](nets[0].parameters())
    for number in range(2):
        step(nets[0], plain, number)
    nets[1].load_state_dict(nets[0].state_dict())
    saved = copy.deepcopy(plain.state_dict())
    kept, loaded = convert(plain, nets[0]), converted(name, nets[1])[1]
    loaded.optimizer.load_state_dict(saved)
    for net, conversion in zip(nets, (kept, loaded), strict=True):
        results.append([step(net, conversion.optimizer, number) for number in range(2, 5)])
    assert results[0] == results[1]


@pytest.mark.parametrize("name", MAKES)
def test_the_replaced_optimizers_checkpoint_is_what_undoing_gives(name: str) -> None:
    net = build()
    optimizer, conversion = converted(name, net, steps=1)
    step(net, conversion.optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    conversion.undo()
    expected = optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert entry.keys() == saved["state"][index].keys()
        for key, value in entry.items():
            assert torch.equal(value, saved["state"][index][key])


def test_state_of_16_bit_parameters_comes_back_in_16_bits() -> None:
    net = build().bfloat16()
    optimizer, conversion = converted("AdamW", net, steps=1)
    step(net, conversion.optimizer, 1)
    conversion.undo()
    assert optimizer.state[net.line.weight]["exp_avg"].dtype == torch.bfloat16
    step(net, optimizer, 2)


def test_the_replaced_optimizer_refuses_to_step_and_to_load() -> None:
    net = build()
    optimizer, conversion = converted("AdamW", net)
    with pytest.raises(MemScaleError, match=r"AdamW was replaced.*detach"):
        step(net, optimizer, 0)
    with pytest.raises(MemScaleError, match=r"AdamW was replaced.*detach"):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    conversion.undo()
    step(net, optimizer, 0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_replaced_optimizer_that_nobody_has_is_freed() -> None:
    net = build()
    optimizer, conversion = converted("AdamW", net)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    step(net, conversion.optimizer, 0)
    conversion.undo()
    step(net, conversion.optimizer, 1)


# ---------------------------------------------------------------------------------------------------- no counterpart


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: O.Adam(p, weight_decay=0.1), "use AdamW"),
        (lambda p: O.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: O.AdamW(p, maximize=True), "maximize"),
        (lambda p: O.AdamW(p, lr=torch.tensor(1e-3)), "tensor"),
        (lambda p: O.SGD(p, lr=0.1), "no state"),
        (lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: O.RMSprop(p, centered=True), "centered"),
        (lambda p: O.Adagrad(p, lr_decay=0.1), "lr_decay"),
        (lambda p: O.NAdam(p), "no such class"),
        (lambda p: bnb.optim.Lion(p, optim_bits=8), "bitsandbytes' own"),
        (lambda p: type("AdamW", (O.AdamW,), {"__module__": "mine"})(p), "no such class"),
    ],
)
def test_what_bitsandbytes_does_otherwise_is_no_counterpart(make: Any, why: str) -> None:
    net = build()
    optimizer = make(net.parameters())
    options = copy.copy(optimizer.param_groups[0])
    with pytest.raises(NoCounterpart, match=why):
        convert(optimizer, net)
    assert list(optimizer.param_groups[0]) == list(options)
    step(net, optimizer, 0)


def test_parameters_keep_their_memory_format() -> None:
    """bitsandbytes makes every parameter contiguous that it steps."""
    net = nn.Sequential(nn.Conv2d(8, 16, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(NoCounterpart, match="channels_last"):
        convert(torch.optim.AdamW(net.parameters()), net)


def test_a_device_without_the_kernel_has_no_counterpart(simgpu_device: Any) -> None:
    optimizer = O.AdamW(build().to("simgpu").parameters())
    with pytest.raises(NoCounterpart, match="no 8-bit step for simgpu"):
        counterpart_of(optimizer)
