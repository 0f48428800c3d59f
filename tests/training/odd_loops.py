"""Loops that real training has and examples leave out, each run by a plain model and by one under a plan.

    difference = compare(LOOPS["step twice"], TECHNIQUES["optimizer"], asynchronous=True, early=False, directory=path)

A loop is a function of a `Side`: it trains `side.model` and notes what must be the same on both sides.
"""

from __future__ import annotations

import copy
import io
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from tests.techniques.offload.runs import DEVICE, VOCABULARY, Block, Gpt, gradients, loss_of, tokens, weights
from tests.techniques.offload.tiers import on_host
from tests.training.nth_failure import Actions

O = torch.optim  # noqa: E741


class Side:
    """A model and an optimizer, and what a loop noted of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.optimizers = [optimizer]
        self.noted: list[Any] = []

    def forward(self, number: int) -> torch.Tensor:
        torch.manual_seed(number)
        return loss_of(self.model, number)

    def backward(self, number: int, *, zero: bool = True) -> torch.Tensor:
        if zero:
            self.model.zero_grad()
        loss = self.forward(number)
        loss.backward()
        self.note(loss)
        return loss

    def note(self, *values: Any) -> None:
        """Values, and the gradients as they are now."""
        self.noted.append((on_host(values), gradients(self.model)))

    def train(self, numbers: range = range(3), optimizer: Optimizer | None = None) -> None:
        for number in numbers:
            self.backward(number)
            (optimizer or self.optimizer).step()

    def result(self) -> Any:
        states = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in self.optimizers]
        return on_host([self.noted, weights(self.model), states])


Loop = Callable[[Side], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


# ---- optimizers


@loop
def two_optimizers(side: Side) -> None:
    blocks = list(side.model.blocks.parameters())
    rest = [p for p in side.model.parameters() if all(p is not other for other in blocks)]
    side.optimizers = [O.SGD(blocks, lr=1e-2, momentum=0.9), O.Adagrad(rest, lr=1e-2)]
    for number in range(3):
        side.backward(number)
        for optimizer in side.optimizers[number % 2 :]:
            optimizer.step()


@loop
def two_optimizers_of_the_same_parameters(side: Side) -> None:
    side.optimizers.append(O.SGD(side.model.parameters(), lr=1e-3))
    for number in range(3):
        side.backward(number)
        for optimizer in side.optimizers:
            optimizer.step()


@loop
def a_group_that_comes_later(side: Side) -> None:
    optimizer = O.AdamW([{"params": list(side.model.norm.parameters()), "lr": 1e-3}])
    side.optimizers = [optimizer]
    side.train(range(2), optimizer)
    optimizer.add_param_group({"params": list(side.model.blocks.parameters()), "lr": 2e-2, "weight_decay": 0.1})
    side.train(range(2, 4), optimizer)


def _with(make: Callable[[list[nn.Parameter]], Optimizer]) -> Loop:
    def run(side: Side) -> None:
        side.optimizers = [make(list(side.model.parameters()))]
        side.train(optimizer=side.optimizers[0])

    return run


LOOPS["fused"] = _with(lambda parameters: O.AdamW(parameters, lr=1e-2, fused=True))
LOOPS["foreach"] = _with(lambda parameters: O.AdamW(parameters, lr=1e-2, foreach=True))
LOOPS["one by one"] = _with(lambda parameters: O.Adam(parameters, lr=1e-2, foreach=False, amsgrad=True))
LOOPS["a tensor as rate"] = _with(
    lambda parameters: O.AdamW(parameters, lr=torch.tensor(1e-2, device="cpu"), foreach=False)
)
LOOPS["centered"] = _with(lambda parameters: O.RMSprop(parameters, lr=1e-3, maximize=True, momentum=0.5, centered=True))


@loop
def another_optimizer_and_back(side: Side) -> None:
    side.train(range(2))
    side.optimizers.append(O.SGD(side.model.parameters(), lr=0.1, momentum=0.9))
    side.train(range(2), side.optimizers[1])
    side.train(range(3, 4))


@loop
def step_twice(side: Side) -> None:
    for number in range(3):
        side.backward(number)
        side.optimizer.step()
        side.optimizer.step()


@loop
def a_closure(side: Side) -> None:
    for number in range(3):
        side.note(side.optimizer.step(lambda number=number: side.backward(number)))


@loop
def state_is_read_and_written(side: Side) -> None:
    for number in range(3):
        side.train(range(number, number + 1))
        for parameter in list(side.model.parameters())[:3]:
            side.note(side.optimizer.state[parameter]["exp_avg"].abs().sum())
            side.optimizer.state[parameter]["exp_avg"].mul_(0.5)


@loop
def a_scaler_that_skips(side: Side) -> None:
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)
    for number in range(5):
        side.optimizer.zero_grad()
        loss = side.forward(number) * (float("inf") if number in (1, 3) else 1)
        scaler.scale(loss).backward()
        if number not in (1, 3):  # numbers that are none are not equal to themselves
            side.note(loss)
        if number % 2:
            scaler.unscale_(side.optimizer)
        scaler.step(side.optimizer)
        scaler.update()
        side.noted.append(scaler.get_scale())


# ---- checkpoints and copies


@loop
def loaded_between_steps(side: Side) -> None:
    side.train(range(2))
    saved = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))
    side.train(range(2, 4))
    side.model.load_state_dict(saved[0])
    side.optimizer.load_state_dict(saved[1])
    side.train(range(2, 4))


@loop
def loaded_from_a_file(side: Side) -> None:
    side.train(range(2))
    file = io.BytesIO()
    torch.save((side.model.state_dict(), side.optimizer.state_dict()), file)
    side.train(range(2, 4))
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=True)
    side.model.load_state_dict(model)
    side.optimizer.load_state_dict(optimizer)
    side.train(range(2, 4))


@loop
def loaded_into_a_new_optimizer(side: Side) -> None:
    side.train(range(2))
    latest = O.AdamW(side.model.parameters(), lr=1e-2)
    latest.load_state_dict(side.optimizer.state_dict())
    side.optimizer, side.optimizers = latest, [latest]
    side.train(range(2, 4))


@loop
def a_copy_trains_beside(side: Side) -> None:
    side.train(range(2))
    copied = copy.deepcopy(side.model).to(DEVICE)  # what is streamed is on the host, in the copy as well
    other = Side(copied, O.AdamW(copied.parameters(), lr=1e-2))
    for number in range(2, 4):
        side.train(range(number, number + 1))
        other.train(range(number + 7, number + 8))
    side.noted.append(other.result())


# ---- graphs


@loop
def autograd_grad(side: Side) -> None:
    for number in range(3):
        parameters = list(side.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(side.forward(number), parameters), strict=True):
            parameter.grad = gradient
        side.note()
        side.optimizer.step()


@loop
def a_graph_that_is_used_twice(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        loss = side.forward(number)
        loss.backward(retain_graph=True)
        side.note(loss)
        loss.backward()
        side.note()
        side.optimizer.step()


@loop
def several_forwards_before_backward(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        first, second, third = (side.forward(number + shift) for shift in (0, 10, 20))
        third.backward()
        (first + second * 2).backward()
        side.note(first)
        side.optimizer.step()


@loop
def forwards_without_a_backward(side: Side) -> None:
    for number in range(3):
        side.forward(number + 30)
        with torch.no_grad():
            side.note(side.forward(number + 40))
        side.train(range(number, number + 1))


@loop
def a_state_that_is_carried_over(side: Side) -> None:
    """Truncated backpropagation through time, by parts of the model that are called by themselves."""
    carried = torch.zeros(2, 16, 32, device=DEVICE)
    for number in range(4):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        carried = side.model.run(side.model.embed(tokens(number)) + carried.detach() * 0.5)
        loss = side.model.head(side.model.norm(carried)).square().mean()
        loss.backward()
        side.note(loss)
        side.optimizer.step()


@loop
def functional_call(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        ids = tokens(number)
        out = torch.func.functional_call(side.model, dict(side.model.named_parameters()), (ids,))
        loss = F.cross_entropy(out.reshape(-1, VOCABULARY).float(), ids.roll(1, 1).reshape(-1))
        loss.backward()
        side.note(loss)
        side.optimizer.step()


@loop
def an_output_of_a_block_in_the_loss(side: Side) -> None:
    kept: list[torch.Tensor] = []
    handles = [
        side.model.blocks[0].register_forward_hook(lambda module, args, output: kept.append(output)),
        side.model.blocks[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,)),
    ]
    for number in range(3):
        kept.clear()
        side.optimizer.zero_grad()
        (side.forward(number) + kept[0].square().mean()).backward()
        side.note()
        side.optimizer.step()
    kept.clear()
    for handle in handles:
        handle.remove()


@loop
def errors_of_the_user(side: Side) -> None:
    def raises(*_: Any) -> None:
        raise KeyError("the user's own")

    for number in range(3):
        handle = side.model.blocks[1].register_forward_hook(raises)
        try:
            side.forward(number)
        except KeyError:
            handle.remove()
        loss = side.forward(number)
        loss.register_hook(raises)
        try:
            loss.backward()
        except KeyError:
            side.train(range(number, number + 1))


# ---- gradients and weights


@loop
def hooks_on_parameters(side: Side) -> None:
    seen: list[float] = []

    def see(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad.abs().sum()))

    handles = [p.register_hook(lambda gradient: gradient * 0.5) for p in side.model.blocks[0].parameters()]
    handles += [p.register_post_accumulate_grad_hook(see) for p in side.model.blocks[1].parameters()]
    side.train()
    side.note(sorted(seen))
    for handle in handles:
        handle.remove()


@loop
def hooks_on_several_gradients(side: Side) -> None:
    seen: list[Any] = []

    def see(gradients: Any) -> None:
        seen.append([None if gradient is None else float(gradient.double().sum()) for gradient in gradients])

    blocks = list(side.model.blocks.parameters())
    handles = [
        torch.autograd.graph.register_multi_grad_hook(list(side.model.parameters()), see),
        torch.autograd.graph.register_multi_grad_hook(blocks, lambda gradient: seen.append(None), mode="any"),
    ]
    side.train()
    side.note([entry for entry in seen if entry is not None], seen.count(None))
    for handle in handles:
        handle.remove()


@loop
def hooks_that_change_gradients_of_modules(side: Side) -> None:
    handles = []
    for block in side.model.blocks:
        handles.append(block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,)))
        handles.append(block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 1.5,)))
        handles.append(block.mix.register_forward_hook(lambda module, inputs, output: output * 2))
    side.train()
    for handle in handles:
        handle.remove()


@loop
def accumulated_and_clipped(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad(set_to_none=number != 1)
        for part in range(3):
            (side.forward(number * 3 + part) / 3).backward()
        nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)
        side.note()
        side.optimizer.step()


@loop
def zeroed_by_hand(side: Side) -> None:
    for number in range(3):
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        side.backward(number, zero=False)
        side.optimizer.step()


@loop
def gradients_replaced_and_dropped(side: Side) -> None:
    for number in range(4):
        side.backward(number)
        for index, parameter in enumerate(side.model.parameters()):
            parameter.grad = None if (index + number) % 3 == 0 or parameter.grad is None else parameter.grad * 0.5
        side.note()
        side.optimizer.step()


@loop
def losses_that_are_not_finite(side: Side) -> None:
    for number, factor in enumerate((1.0, float("nan"), 1.0, float("inf"), 1.0)):
        side.optimizer.zero_grad()
        loss = side.forward(number) * factor
        loss.backward()
        if torch.isfinite(loss):
            side.note(loss)
            side.optimizer.step()


@loop
def frozen_and_unfrozen(side: Side) -> None:
    for number in range(5):
        side.model.blocks[0].requires_grad_(number not in (1, 2))
        side.model.embed.requires_grad_(number != 3)
        side.train(range(number, number + 1))


@loop
def weights_written_between_steps(side: Side) -> None:
    for number in range(4):
        side.train(range(number, number + 1))
        with torch.no_grad():
            for parameter in side.model.blocks[0].parameters():
                parameter.mul_(0.99)
            for parameter in side.model.blocks[1].parameters():
                parameter.data.add_(0.01)
            side.model.norm.weight.copy_(side.model.norm.weight * 0.9)


@loop
def weights_swapped(side: Side) -> None:
    for number in range(3):
        side.train(range(number, number + 1))
        for parameter in side.model.blocks[0].parameters():
            parameter.data = parameter.data.clone() * 1.01


@loop
def evaluated_between_steps(side: Side) -> None:
    for number in range(3):
        side.model.eval()
        with torch.no_grad():
            side.note(side.forward(number + 5))
        with torch.inference_mode():
            side.forward(number + 6)
        side.model.train()
        side.train(range(number, number + 1))


@loop
def autocast(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = side.forward(number)
        loss.backward()
        side.note(loss)
        side.optimizer.step()


# ---- other shapes


def _forward(side: Side, number: int, shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(number)
    ids = tokens(number, shape)
    return F.cross_entropy(side.model(ids).reshape(-1, VOCABULARY).float(), ids.roll(1, 1).reshape(-1))


_SHAPES = ((2, 16), (4, 32), (1, 8), (4, 32), (3, 24), (2, 16))


@loop
def shapes_that_change(side: Side) -> None:
    for number, shape in enumerate(_SHAPES):
        side.optimizer.zero_grad()
        loss = _forward(side, number, shape)
        loss.backward()
        side.note(loss)
        side.optimizer.step()


@loop
def accumulated_over_shapes(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad(set_to_none=number != 1)
        for part, shape in enumerate(_SHAPES):
            (_forward(side, 10 * number + part, shape) / 6).backward()
        side.note()
        side.optimizer.step()


@loop
def other_shapes_before_backward(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        losses = [_forward(side, number + 10 * part, shape) for part, shape in enumerate(_SHAPES[:3])]
        with torch.no_grad():
            side.noted.append(on_host([_forward(side, number + 60, (6, 32))]))
        losses[0].backward()
        side.note(losses[0])
        (losses[1] * losses[2]).backward()
        side.note(*losses)
        side.optimizer.step()


# ---- what changes between a forward and its backward


def _between(change: Loop, back: Loop) -> Loop:
    def run(side: Side) -> None:
        for number in range(3):
            side.optimizer.zero_grad()
            loss = side.forward(number)
            change(side)
            loss.backward()
            side.note(loss)
            back(side)
            side.optimizer.step()

    return run


def _drop(rate: float) -> Loop:
    def change(side: Side) -> None:
        side.model.blocks[0].dropout.p = rate

    return change


LOOPS["evaluation begins before backward"] = _between(lambda side: side.model.eval(), lambda side: side.model.train())
LOOPS["another rate of dropout before backward"] = _between(_drop(0.5), _drop(0.1))
LOOPS["gradients are cleared before backward"] = _between(
    lambda side: side.optimizer.zero_grad(set_to_none=False), lambda side: None
)
LOOPS["copied before backward"] = _between(
    lambda side: side.noted.append(on_host(weights(copy.deepcopy(side.model)))), lambda side: None
)


@loop
def backward_in_another_thread(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        loss = side.forward(number)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        side.note(loss)
        side.optimizer.step()


@loop
def two_losses_of_one_forward(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        out = side.model(tokens(number))
        out.square().mean().backward(retain_graph=True)
        side.note()
        out.abs().mean().backward(inputs=list(side.model.blocks[1].parameters()))
        side.note()
        side.optimizer.step()


# ---- the model


def _new_optimizer(side: Side) -> None:
    side.optimizer = _adamw(side.model)
    side.optimizers = [side.optimizer]


@loop
def averaged_weights(side: Side) -> None:
    average = O.swa_utils.AveragedModel(side.model, multi_avg_fn=O.swa_utils.get_ema_multi_avg_fn(0.9))
    for number in range(3):
        side.train(range(number, number + 1))
        average.update_parameters(side.model)
    side.noted.append(on_host(weights(average)))


@loop
def saved_whole(side: Side) -> None:
    side.train(range(2))
    file = io.BytesIO()
    torch.save(side.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).to(DEVICE)
    side.train(range(2, 3))
    other = Side(loaded, O.AdamW(loaded.parameters(), lr=1e-2))
    other.train(range(2))
    side.noted.append(other.result())


@loop
def called_through_a_shallow_copy(side: Side) -> None:
    shallow = copy.copy(side.model)
    for number in range(3):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        loss = loss_of(shallow, number)
        loss.backward()
        side.note(loss)
        side.optimizer.step()


@loop
def weights_assigned(side: Side) -> None:
    """Copies of tied weights are two parameters over one piece of memory."""
    side.train(range(2))
    side.model.load_state_dict(copy.deepcopy(side.model.state_dict()), assign=True)
    _new_optimizer(side)
    side.train(range(2, 5))


@loop
def parameters_that_share_memory(side: Side) -> None:
    blocks = side.model.blocks
    blocks[1].mix.weight = nn.Parameter(blocks[0].mix.weight.detach())
    side.model.head.weight = nn.Parameter(side.model.embed.weight.detach())
    _new_optimizer(side)
    side.train(range(4))


@loop
def memory_shared_after_some_steps(side: Side) -> None:
    """Buckets, stretches and guests were chosen before."""
    first, second = side.model.blocks
    side.train(range(2))
    second.mix.weight.data = first.mix.weight.data
    first.up.weight.data = first.down.weight.data.view(first.up.weight.shape)
    side.model.norm.bias.data = side.model.norm.weight.data
    side.train(range(2, 5))


@loop
def blocks_replaced_and_added(side: Side) -> None:
    side.train(range(2))
    torch.manual_seed(9)
    side.model.blocks[0] = Block().to(DEVICE)
    side.model.blocks.append(Block().to(DEVICE))
    _new_optimizer(side)
    side.train(range(2, 5))


@loop
def a_weight_untied(side: Side) -> None:
    side.train(range(2))
    side.model.head.weight = nn.Parameter(side.model.embed.weight.detach().clone().to(DEVICE))
    side.optimizer.add_param_group({"params": [side.model.head.weight]})
    side.train(range(2, 4))


@loop
def another_type(side: Side) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        side.train(range(2))
        side.model.to(dtype)
        _new_optimizer(side)
    side.train(range(2, 4))


@loop
def blocks_in_other_orders(side: Side) -> None:
    first, second = side.model.blocks
    for number, order in enumerate(([first, second, first], [second, first], [second], [first, second])):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        x = side.model.embed(tokens(number))
        for block in order:
            x = block(x)
        loss = side.model.head(side.model.norm(x)).square().mean()
        loss.backward()
        side.note(loss)
        side.optimizer.step()


@loop
def a_penalty_on_gradients_of_inputs(side: Side) -> None:
    for number in range(3):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        x = torch.randn(2, 8, 32, device="cpu").to(DEVICE).requires_grad_()
        loss = side.model.head(side.model.norm(x)).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (side.model.run(x).mean() + gradient.square().sum()).backward()
        side.note(loss, x.grad)
        side.optimizer.step()


@loop
def a_critic(side: Side) -> None:
    """Another model is trained through this one, frozen and not."""
    torch.manual_seed(3)
    maker = nn.Linear(32, 32, device="cpu").to(DEVICE)
    other = O.SGD(maker.parameters(), lr=1e-2)
    for number in range(4):
        torch.manual_seed(number)
        made = maker(torch.randn(2, 8, 32, device="cpu").to(DEVICE))
        side.optimizer.zero_grad()
        side.model.norm(side.model.run(made.detach())).square().mean().backward()
        side.note()
        side.optimizer.step()
        side.model.requires_grad_(number % 2 == 0)
        other.zero_grad()
        side.model.norm(side.model.run(made)).abs().mean().backward()
        side.note(maker.weight.grad)
        other.step()
        side.model.requires_grad_()


@loop
def checkpoints_around_the_whole_model(side: Side) -> None:
    for number in range(4):
        side.optimizer.zero_grad()
        torch.manual_seed(number)
        x = side.model.embed(tokens(number))
        out = checkpoint(side.model.run, x, use_reentrant=number % 2 == 0)
        side.model.head(side.model.norm(out)).square().mean().backward()
        side.note()
        side.optimizer.step()


# ---- the optimizer's options and state


@loop
def every_parameter_has_an_optimizer_that_steps_in_backward(side: Side) -> None:
    parameters = list(side.model.parameters())
    optimizers = {parameter: O.AdamW([parameter], lr=1e-2) for parameter in parameters}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in parameters]
    for number in range(3):
        loss = side.forward(number)
        loss.backward()
        side.note(loss)
    for handle in handles:
        handle.remove()
    side.optimizers = list(optimizers.values())


@loop
def options_and_schedules(side: Side) -> None:
    schedule = O.lr_scheduler.LambdaLR(side.optimizer, lambda step: 0.9**step)
    for number in range(3):
        for group in side.optimizer.param_groups:
            group["weight_decay"], group["betas"] = 0.1 * number, (0.9 - 0.1 * number, 0.99)
        side.train(range(number, number + 1))
        schedule.step()
    saved = copy.deepcopy((schedule.state_dict(), side.optimizer.state_dict()))
    side.train(range(3, 4))
    schedule.load_state_dict(saved[0])
    side.optimizer.load_state_dict(saved[1])
    side.train(range(3, 5))


@loop
def state_thrown_away(side: Side) -> None:
    side.train(range(2))
    side.optimizer.state.clear()
    side.train(range(2, 4))
    side.optimizer.state.pop(next(side.model.blocks[0].parameters()))
    side.train(range(4, 5))


@loop
def sharpness_aware(side: Side) -> None:
    for number in range(3):
        side.backward(number)
        with torch.no_grad():
            away = [0.05 * parameter.grad for parameter in side.model.parameters()]
            for parameter, offset in zip(side.model.parameters(), away, strict=True):
                parameter.add_(offset.to(parameter.device))
        side.backward(number)
        with torch.no_grad():
            for parameter, offset in zip(side.model.parameters(), away, strict=True):
                parameter.sub_(offset.to(parameter.device))
        side.optimizer.step()


@loop
def gradients_kept_and_scaled(side: Side) -> None:
    kept: list[torch.Tensor] = []
    for number in range(3):
        side.optimizer.zero_grad(set_to_none=False)
        side.forward(number).backward()
        kept = kept or [parameter.grad for parameter in side.model.parameters() if parameter.grad is not None]
        with torch.no_grad():
            for gradient in kept:
                gradient.mul_(0.5)
        side.note(nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))
        side.optimizer.step()


# ---- both sides


def _adamw(model: nn.Module) -> Optimizer:
    return O.AdamW(model.parameters(), lr=1e-2)


def _built() -> nn.Module:
    torch.manual_seed(1)
    return Gpt(2)


def plain(run: Loop) -> Any:
    model = _built().to(DEVICE)
    side = Side(model, _adamw(model))
    run(side)
    return side.result()


def treated(run: Loop, actions: Actions, *, asynchronous: bool, early: bool, directory: pathlib.Path) -> Iterator[Any]:
    """What the loop gives under a plan, before and after it is detached; `early`: its optimizer is older than that."""
    model = _built()
    optimizer = _adamw(model) if early else None
    config = AsyncOffloadConfig(min_tensor_bytes=0, window_bytes=4096, prefetch_bytes=4096)
    settings = ExecutionSettings(DEVICE, asynchronous=asynchronous, async_config=config, offload_dir=str(directory))
    executor = Executor(model, settings)
    executor.attach(actions(model))
    try:
        side = Side(model, optimizer or _adamw(model))
        run(side)
        yield side.result()
    finally:
        executor.detach()
    yield side.result()
