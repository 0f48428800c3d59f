"""A second round of odd programs around models of plain code and of transformers, by other eyes than the first.

They fail in the middle: the steps that follow run under the tighter plan, and what the loop does with gradients,
weights and buffers afterwards (clipping, scaling, averaging, evaluating) is compared as well.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import simgpu
from tests._planning.recovery.loop_programs import Body, Hidden, around
from tests._planning.recovery.sessions import NUM_STEPS, OBSERVED, Session
from tests.techniques.offload.runs import DEVICE

PROGRAMS: dict[str, Callable[[Session], Any]] = {}


def program(run: Callable[[Session], Any]) -> Callable[[Session], Any]:
    PROGRAMS[run.__name__] = run
    return run


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def on_host(values: Any) -> list[torch.Tensor]:
    return [value.detach().cpu().clone() for value in values]


def gradients(model: nn.Module) -> list[Any]:
    return [None if value.grad is None else value.grad.cpu().clone() for value in model.parameters()]


# ---- gradients that lie where the loop wants them


@program
def flat_gradients(session: Session) -> Any:
    """All gradients are views of one buffer, as some trainers keep them: writing to one is writing to all."""
    model = session.wrap(Body())
    values = [*model.parameters()]
    flat = torch.zeros(sum(value.numel() for value in values), device=DEVICE)
    start = 0
    for value in values:
        value.grad = flat[start : start + value.numel()].view_as(value)
        start += value.numel()
    seen = []
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        seen.append(flat.cpu().clone())
        with torch.no_grad():
            for value in values:
                value.sub_(value.grad, alpha=0.1)
        flat.zero_()
    return seen


@program
def flat_gradients_that_are_added_to(session: Session) -> Any:
    model = session.wrap(Body())
    values = [*model.parameters()]
    flat = torch.zeros(sum(value.numel() for value in values), device=DEVICE)
    parts = flat.split([value.numel() for value in values])
    for value, part in zip(values, parts, strict=True):
        value.grad = part.view_as(value)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
    return flat.cpu()


@program
def flat_weights(session: Session) -> Any:
    model = session.wrap(Body())
    values = [*model.parameters()]
    flat = torch.cat([value.detach().reshape(-1) for value in values])
    for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.data = part.view_as(value)
    seen = []
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        with torch.no_grad():
            flat.sub_(torch.cat([value.grad.reshape(-1) for value in values]), alpha=0.1)
        model.zero_grad()
        seen.append(flat.cpu().clone())
    return seen


@program
def gradients_set_to_zero(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer, seen = sgd(model, momentum=0.9), []
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return seen


@program
def one_gradient_for_two_parameters(session: Session) -> Any:
    model = session.wrap(Body())
    first, second = model.blocks[0][0].weight, model.blocks[1][0].weight
    for step in range(NUM_STEPS):
        first.grad = second.grad = torch.zeros_like(first)
        session.backward(step, session.forward(step, model, session.x(step)))
    return None


@program
def gradients_the_loop_holds(session: Session) -> Any:
    model = session.wrap(Body())
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    held = [value.grad for value in model.parameters()]
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
    return on_host(held)


# ---- which parameters are trained


@program
def unfrozen_between(session: Session) -> Any:
    """A part is frozen while the forward runs, and not when the backward does."""
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        model.blocks[1].requires_grad_(False)
        loss = session.forward(step, model, session.x(step))
        model.blocks[1].requires_grad_(True)
        session.backward(step, loss)
    return gradients(model)


@program
def unfrozen_step_by_step(session: Session) -> Any:
    model = session.wrap(Body())
    for block in model.blocks:
        block.requires_grad_(False)
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        for block in model.blocks[:step]:
            block.requires_grad_(True)
        session.backward(step, session.forward(step, model, session.x(step)))
        optimizer.step()
    return gradients(model)


@program
def two_optimizers_in_turns(session: Session) -> Any:
    model = session.wrap(Body())
    turns = [torch.optim.SGD(model.first.parameters(), lr=0.1), torch.optim.Adam(model.blocks.parameters(), lr=0.01)]
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        turns[step % 2].step()
        turns[step % 2].zero_grad()
    return gradients(model)


@program
def parameter_that_is_not_used(session: Session) -> Any:
    model = Body()
    model.spare = nn.Linear(4, 4)
    model = session.wrap(model)
    losses = session.train(model, optimizer=sgd(model))
    return losses, gradients(model)


@program
def layers_dropped_at_random(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                if torch.rand(()).item() > 0.4:
                    x = x + block(x)
            return x.square().mean()

    model = session.wrap(Model())
    return session.train(model), gradients(model)


# ---- loops


@program
def scaled_and_clipped(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    norms = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss * 1024.0)
        for value in model.parameters():
            value.grad.div_(1024.0)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, scaler.get_scale()


@program
def averaged_by_hand(session: Session) -> Any:
    model = session.wrap(Body())
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = sgd(model, momentum=0.9, nesterov=True)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.1)
    return on_host(average.values())


@program
def average_that_teaches(session: Session) -> Any:
    """The loss compares the model with an average of itself, which runs between its forward and its backward."""
    model, teacher = Hidden(), Hidden().to(DEVICE).requires_grad_(False)
    model = session.wrap(model)
    optimizer, losses = sgd(model), []
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        with torch.no_grad():
            target = teacher(session.x(step))
        loss = F.mse_loss(hidden, target)
        session.backward(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.5)
        losses.append(loss.item())
    return losses, on_host(teacher.parameters())


@program
def model_that_teaches_itself(session: Session) -> Any:
    model, losses = session.wrap(Hidden()), []
    for step in range(NUM_STEPS):
        with torch.no_grad():
            target = model(session.x(step) * 0.5)
        loss = F.mse_loss(session.forward(step, model, session.x(step)), target)
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def evaluated_between_forward_and_backward(session: Session) -> Any:
    model = Body()
    model.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    model, seen = session.wrap(model), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        model.eval()
        with torch.no_grad():
            seen.append(model(session.x(step)).item())
        model.train()
        session.backward(step, loss)
    return seen, on_host(model.buffers())


@program
def statistics_moved_between_forward_and_backward(session: Session) -> Any:
    model = Body()
    model.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    model = session.wrap(model)
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with torch.no_grad():
            model.first(session.x(step + 1))
        session.backward(step, loss)
    return on_host(model.buffers())


@program
def statistics_set_back_by_the_loop(session: Session) -> Any:
    model = Body()
    model.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None))
    model = session.wrap(model)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        if step == 1:
            model.first[1].reset_running_stats()
    return on_host(model.buffers())


@program
def forward_ahead_of_the_backward(session: Session) -> Any:
    model, waiting, losses = session.wrap(Body()), None, []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        if waiting is not None:
            session.backward(step, waiting)
            losses.append(waiting.item())
        waiting = loss
    return losses


@program
def losses_kept_with_their_graphs(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        losses.append(session.forward(step, model, session.x(step)))
        session.backward(step, losses[-1])
    return torch.stack(losses).mean().item()


@program
def running_sum_of_losses(session: Session) -> Any:
    model, total = session.wrap(Body()), torch.zeros((), device=DEVICE)
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        total += loss.detach()
        loss /= 2
        session.backward(step, loss)
    return total.item()


@program
def outputs_masked_in_place(session: Session) -> Any:
    model, losses = session.wrap(Hidden()), []
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        hidden[:, 3] = -4.0
        hidden[2:4].mul_(0.5)
        loss = F.cross_entropy(hidden, torch.arange(8, device=DEVICE))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, gradients(model)


@program
def backward_with_a_gradient(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        session.backward(step, hidden, gradient=torch.full_like(hidden, 0.5))
    return gradients(model)


@program
def several_losses_in_one_pass(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean(), x.abs().mean()

    model = session.wrap(Model())
    for step in range(NUM_STEPS):
        losses = session.forward(step, model, session.x(step))
        total = losses[0] + 0.5 * losses[1]
        session.backward(step, total)
    return gradients(model)


@program
def head_whose_output_is_gone(session: Session) -> Any:
    """Two parts without anything in common; the second's loss is kept, its output is not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Hidden(), Hidden()

        def forward(self, x: torch.Tensor) -> Any:
            return self.left(x), self.right(x)

    model = session.wrap(Model())
    for step in range(NUM_STEPS):
        left, right = session.forward(step, model, session.x(step))
        other = right.square().mean()
        del right
        session.backward(step, left.square().mean())
        other.backward()
    return gradients(model)


@program
def output_split_in_halves(session: Session) -> Any:
    class Model(Hidden):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).chunk(2, dim=1)

    model = session.wrap(Model())
    for step in range(NUM_STEPS):
        left, right = session.forward(step, model, session.x(step))
        session.backward(step, left.square().mean() + right.mean())
    return gradients(model)


@program
def output_that_shows_a_weight(session: Session) -> Any:
    class Model(Hidden):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).square().mean(), self.first.weight.view(-1), self.first.bias

    model = session.wrap(Model())
    for step in range(NUM_STEPS):
        loss, weight, bias = session.forward(step, model, session.x(step))
        session.backward(step, loss + weight.square().mean() + bias.square().mean())
    return gradients(model)


class Answer(NamedTuple):
    loss: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Sealed:
    loss: torch.Tensor
    hidden: torch.Tensor


@program
def output_in_a_named_tuple(session: Session) -> Any:
    class Model(Hidden):
        def forward(self, x: torch.Tensor) -> Answer:
            hidden = super().forward(x)
            return Answer(hidden.square().mean(), hidden.detach())

    model, seen = session.wrap(Model()), []
    for step in range(NUM_STEPS):
        answer = session.forward(step, model, session.x(step))
        session.backward(step, answer.loss)
        seen.append(answer.hidden.cpu())
    return seen


@program
def output_in_a_class_of_its_own(session: Session) -> Any:
    class Model(Hidden):
        def forward(self, x: torch.Tensor) -> Sealed:
            hidden = super().forward(x)
            return Sealed(hidden.square().mean(), hidden)

    model = session.wrap(Model())
    for step in range(NUM_STEPS):
        answer = session.forward(step, model, session.x(step))
        session.backward(step, answer.loss + answer.hidden.mean())
    return gradients(model)


@program
def counted_operations_of_the_backward(session: Session) -> Any:
    model, counts = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with FlopCounterMode(display=False) as counter:
            session.backward(step, loss)
        counts.append(counter.get_total_flops())
    return counts


@program
def backward_without_gradient_mode(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with torch.no_grad():
            session.backward(step, loss)
    return gradients(model)


@program
def backward_in_a_thread(session: Session) -> Any:
    model, errors = session.wrap(Body()), []

    def back(step: int, loss: torch.Tensor) -> None:
        try:
            session.backward(step, loss)
        except torch.OutOfMemoryError as error:
            errors.append(error)

    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        thread = threading.Thread(target=back, args=(step, loss))
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
    return gradients(model)


@program
def batches_from_a_thread(session: Session) -> Any:
    model, batches = session.wrap(Body()), queue.Queue(maxsize=1)

    def load() -> None:
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(step)
            batches.put(torch.randn(8, 16, generator=generator))

    thread = threading.Thread(target=load)
    thread.start()
    losses = []
    try:
        for step in range(NUM_STEPS):
            loss = session.forward(step, model, batches.get().to(DEVICE))
            session.backward(step, loss)
            losses.append(loss.item())
    finally:
        while thread.is_alive():
            with torch.no_grad():
                try:
                    batches.get(timeout=0.1)
                except queue.Empty:
                    continue
        thread.join()
    return losses


@program
def shuffled_loader(session: Session) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(32 * 16, dtype=torch.float32).reshape(32, 16) / 100)
    model, losses = session.wrap(around(lambda self, x: F.dropout(x, 0.3))), []
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    for step, (x,) in enumerate(loader):
        loss = session.forward(step, model, x.to(DEVICE))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, torch.rand(2)


@program
def steps_with_lbfgs(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for step in range(NUM_STEPS):

        def again(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = session.forward(step, model, session.x(step))
            session.backward(step, loss)
            losses.append(loss.item())
            return loss.detach()

        optimizer.step(again)
    return losses


@program
def steps_towards_flat_minima(session: Session) -> Any:
    """A first pass moves the weights, a second one gives the gradients, and the weights are moved back."""
    model = session.wrap(Body())
    optimizer, losses = sgd(model), []
    for step in range(NUM_STEPS):
        model(session.x(step)).backward()
        moved = [value.grad * 0.05 for value in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], moved)
        optimizer.zero_grad()
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moved)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@program
def gradients_asked_for(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with session._failing("backward", step):
            found = torch.autograd.grad(loss, [*model.parameters()])
        seen.append([value.cpu() for value in found])
    return seen


@program
def twice_in_one_step(session: Session) -> Any:
    """The same model, twice before one backward, with statistics and dropout."""
    model = Hidden()
    model.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
    model = session.wrap(model)
    for step in range(NUM_STEPS):
        one = model(session.x(step))
        two = session.forward(step, model, session.x(step + 1))
        session.backward(step, F.mse_loss(one, two))
    return gradients(model), on_host(model.buffers())


@program
def generator_and_critic(session: Session) -> Any:
    making, judging = Hidden(), Hidden()
    making, judging = session.wrap(making), session.wrap(judging)
    optimizers = [sgd(making), sgd(judging)]
    losses = []
    for step in range(NUM_STEPS):
        made = session.forward(step, making, session.x(step))
        loss = judging(made.detach()).mean() - judging(session.x(step)).mean()
        loss.backward()
        optimizers[1].step()
        judging.requires_grad_(False)
        loss = -judging(made).mean()
        session.backward(step, loss)
        judging.requires_grad_(True)
        optimizers[0].step()
        making.zero_grad()
        judging.zero_grad()
        losses.append(loss.item())
    return losses


@program
def weights_shared_by_two_models(session: Session) -> Any:
    first, second = Body(), Body()
    second.blocks = first.blocks
    first, second = session.wrap(first), session.wrap(second)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, first, session.x(step)))
        second(session.x(step)).backward()
    return gradients(first), gradients(second)


@program
def head_outside_of_the_model(session: Session) -> Any:
    model, head = Hidden(), nn.Linear(16, 2).to(DEVICE)
    model = session.wrap(model)
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        session.backward(step, head(hidden).square().mean())
    return gradients(model), gradients(head)


@program
def state_carried_from_step_to_step(session: Session) -> Any:
    class Model(Hidden):
        def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> Any:
            x = x if state is None else x + state
            return super().forward(x)

    model, state = session.wrap(Model()), None
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step), state)
        session.backward(step, hidden.square().mean())
        state = hidden.detach().mul_(0.1)
    return state.cpu(), gradients(model)


@program
def memory_that_the_loop_extends(session: Session) -> Any:
    class Model(Hidden):
        def forward(self, x: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
            return super().forward(x + sum(memory))

    model, memory = session.wrap(Model(), sample=(session.x(0), [session.x(0)])), [session.x(0)]
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step), memory)
        memory.append(hidden.detach() * 0.1)
        session.backward(step, hidden.square().mean())
    return on_host(memory)


@program
def numpy_behind_the_batch(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.first.weight.device))

    model, rows = Model(), torch.ones(8, 16).numpy()
    model = session.wrap(model)
    for step in range(NUM_STEPS):
        rows[:] = step + 1
        loss = session.forward(step, model, torch.from_numpy(rows))
        rows[:] = -step
        session.backward(step, loss)
    return gradients(model)


@program
def detached_by_the_user_between(session: Session) -> Any:
    model = session.wrap(Body())
    weights = on_host(model.parameters())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        model.load_state_dict(dict(zip(dict(model.named_parameters()), weights, strict=True)))
    return gradients(model)


class _Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@program
def products_seen_in_the_backward(session: Session) -> Any:
    model, mode = session.wrap(Body()), _Counted()
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with mode:
            session.backward(step, loss)
    return mode.count


@program
def device_around_the_forward(session: Session) -> Any:
    model = session.wrap(around(lambda self, x: x * torch.rand(16, device=x.device) + torch.arange(16).to(x.device)))
    losses = []
    for step in range(NUM_STEPS):
        with torch.device(DEVICE):
            loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, torch.rand(2)


@program
def batches_of_several_sizes(session: Session) -> Any:
    model = session.wrap(Body(), sample=torch.randn(24, 16).to(DEVICE))
    optimizer, losses = sgd(model), []
    for step, rows in enumerate((8, 4, 24, 8)):
        loss = session.forward(step, model, session.x(step).repeat(3, 1)[:rows])
        session.backward(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@program
def forward_and_backward_of_one_step(session: Session) -> Any:
    """Both run out of memory, one after the other."""
    model, losses = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        if session.fails_in is None or step != 2:
            loss = model(session.x(step))
            loss.backward()
        else:
            x = session.x(step)
            session.before = session.weights()
            with simgpu.fail_allocation(session.number):
                loss = model(x)
            with simgpu.fail_allocation(session.number):
                loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@program
def steps_one_after_another(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        x = session.x(step)
        session.before = session.weights()
        with simgpu.fail_allocation(session.number + step) if session.fails_in else contextlib.nullcontext():
            loss = model(x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@program
def copy_that_is_averaged(session: Session) -> Any:
    model = Body()
    model.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    model = session.wrap(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn([session.x(0), session.x(1)], average)
    return on_host(average.parameters()), on_host(average.buffers()), on_host(model.buffers())


@program
def state_saved_and_loaded_afterwards(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        losses.append(loss.item())
    return losses, on_host(saved[0].values())


@program
def refused_batch_in_halves(session: Session) -> Any:
    """A loop that knows what to do itself, around a model that is not run again."""
    log: list[int] = []
    model = session.wrap(around(lambda self, x: x * len(self.log), log=[1]))
    model.log = log
    log.append(1)
    optimizer, losses = sgd(model), []
    for step in range(NUM_STEPS):
        x = session.x(step)
        try:
            if session.fails_in is None and step == 2:
                raise torch.OutOfMemoryError("is not run again")
            loss = session.forward(step, model, x)
            session.backward(step, loss)
            losses.append(loss.item())
        except torch.OutOfMemoryError as error:
            if "is not run again" not in str(error):
                raise
            del error
            optimizer.zero_grad()
            for half in x.chunk(2):
                (model(half) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ---- inside of the model


@program
def convolutions_in_place(session: Session) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU()
            )
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x.view(8, 1, 4, 4)).flatten(1)).square().mean()

    model = session.wrap(Model())
    return session.train(model, optimizer=sgd(model)), on_host(model.buffers())


ONE = torch.ones(1)


@program
def tensor_as_a_default(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor, shift: torch.Tensor = ONE) -> torch.Tensor:
            return super().forward(x + shift.to(x.device))

    return session.train(session.wrap(Model()))


@program
def queue_of_keys(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(4, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.keys[:2] = x[:2]
            return super().forward(x + self.keys.mean(0))

    model = session.wrap(Model())
    return session.train(model), on_host(model.buffers())


@program
def parameters_in_lists(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(16) * n for n in range(3))
            self.shifts = nn.ParameterDict({"a": torch.zeros(16), "b": torch.ones(16)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for scale in self.scales:
                x = x * scale + self.shifts["a"]
            return super().forward(x + self.shifts["b"])

    model = session.wrap(Model())
    return session.train(model), gradients(model)


@program
def parameter_left_out_of_the_graph(session: Session) -> Any:
    """Which parameters are used depends on the batch."""

    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x.detach()) if x.mean().item() > 1.5 else self.first(x)
            chosen = self.blocks[int(x.shape[0]) % 3]
            return chosen(x).square().mean() + self.blocks[0](x.detach()).mean().detach()

    model = session.wrap(Model())
    return session.train(model), gradients(model)


@program
def list_on_a_parameter(session: Session) -> Any:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.history.append(1)
        return x * len(self.first.weight.history)

    model = around(change)
    model.first.weight.history = []
    return session.train(session.wrap(model, sample=OBSERVED))


@program
def list_on_a_layer(session: Session) -> Any:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.first.log.append(1)
        return x * len(self.first.log)

    model = around(change)
    model.first.log = []
    return session.train(session.wrap(model))


@program
def method_of_a_list_on_a_layer(session: Session) -> Any:
    seen: list[Any] = []

    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.first.emit(x.shape[0])
        return x

    model = around(change)
    model.first.emit = seen.append
    return session.train(session.wrap(model)), seen


@program
def counter_on_a_layer(session: Session) -> Any:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * self.first.turn()

    model = around(change)
    model.first.turn = itertools.count(1).__next__
    return session.train(session.wrap(model))


def scaled_by(source: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * source(1)

    return scaled


def _same(value: int) -> int:
    return value


@program
def one_function_with_two_closures(session: Session) -> Any:
    """The same code, once around a plain function and once around one that keeps."""
    kept = [3, 2, 1, 4, 5, 6, 7, 8, 9]
    model = around(lambda self, x: self.second(self.first_of_all(x)), second=scaled_by(kept.index))
    model.first_of_all = scaled_by(_same)
    return session.train(session.wrap(model)), kept


def block_class(source: Any) -> type[nn.Module]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * source(0)

    return Scaled


@program
def one_class_body_with_two_closures(session: Session) -> Any:
    kept = [3.0, 2.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.5, 2.5]
    model = Body()
    model.first = nn.Sequential(block_class(_one)(), block_class(kept.pop)())
    return session.train(session.wrap(model)), kept


def _one(value: int) -> float:
    return 1.0 + value


@program
def one_function_with_two_defaults(session: Session) -> Any:
    kept = [3.0, 2.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.5, 2.5]

    def made(source: Any) -> Any:
        def scaled(x: torch.Tensor, source: Any = source) -> torch.Tensor:
            return x * source(0)

        return scaled

    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.noisy(self.calm(x)))

    model = Model()
    model.calm, model.noisy = made(_one), made(kept.pop)
    return session.train(session.wrap(model)), kept


@program
def buffer_moved_once(session: Session) -> Any:
    """A buffer that is written to in one step alone, the one that fails."""

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(700, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = self.table
            if 1.5 < x.mean().item() < 2.5:
                table += 1.0
            return super().forward(x * table.mean())

    model = session.wrap(Model())
    return session.train(model), on_host(model.buffers())


@program
def buffers_that_share_memory(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = self.whole[:8]
            half += 0.5
            return super().forward(x * self.whole)

    model = session.wrap(Model())
    return session.train(model), on_host(model.buffers())


@program
def weight_written_through_detach(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.first.weight.detach()
            weight *= 0.99
            return super().forward(x)

    return session.train(session.wrap(Model()))


@program
def modules_added_by_the_forward(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.mean().item() > 1.5:
                self.blocks.append(nn.Identity())
            return super().forward(x) * len(self.blocks)

    model = session.wrap(Model())
    return session.train(model), len(model.blocks)


@program
def mode_set_by_the_forward(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.drop(x)
            self.drop.train(not self.drop.training)
            return super().forward(x)

    model = session.wrap(Model())
    return session.train(model), model.drop.training


@program
def seeds_in_the_forward(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(5)
            return super().forward(x * torch.rand(16).to(x.device))

    return session.train(session.wrap(Model())), torch.rand(2)


@program
def chooses_by_free_memory(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * (1.0 + torch.accelerator.memory_allocated() % 7))

    model = session.wrap(Model())
    losses = session.train(model)
    return len(losses)


@program
def weight_norm_and_pruning(session: Session) -> Any:
    model = Body()
    parametrizations.weight_norm(model.first)
    prune.random_unstructured(model.blocks[0][0], "weight", 0.3)
    model = session.wrap(model)
    return session.train(model, optimizer=sgd(model)), on_host(model.buffers())


@program
def old_spectral_norm(session: Session) -> Any:
    model = Body()
    model.first = nn.utils.spectral_norm(model.first)
    model = session.wrap(model)
    return session.train(model), on_host(model.buffers())


@program
def recurrent_layers(session: Session) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads, self.head = nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, (last, _) = self.reads(x.unsqueeze(0))
            return (self.head(out) + last[-1]).square().mean()

    return session.train(session.wrap(Model()))


@program
def attention_with_norms(session: Session) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layers(x.unsqueeze(0)).squeeze(0)).square().mean()

    model = session.wrap(Model())
    return session.train(model, optimizer=sgd(model)), on_host(model.buffers())


@program
def instance_norm_that_tracks(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(4, track_running_stats=True, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x.view(8, 4, 4)).reshape(8, 16))

    model = session.wrap(Model())
    return session.train(model), on_host(model.buffers())


@program
def statistics_given_to_an_operator(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("variance", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.batch_norm(x, self.mean, self.variance, None, None, self.training, 0.2))

    model = session.wrap(Model())
    return session.train(model), on_host(model.buffers())


@program
def graph_of_a_part(session: Session) -> Any:
    model = Body()
    model.first = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    model = session.wrap(model)
    return session.train(model), on_host(model.buffers())


COUNTS = [0]


@torch.library.custom_op("memscale_tests::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    COUNTS[0] += 1
    return x * 1.0


@_counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_counted.register_autograd(lambda context, gradient: gradient)


@program
def operator_of_its_own(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.ops.memscale_tests.counted(x))

    model = session.wrap(Model())
    COUNTS[0] = 0
    return session.train(model), COUNTS[0]


@program
def function_of_weights(session: Session) -> Any:
    """Called with weights that are computed from the model's: the same values, twice the gradient."""
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        weights = {name: 2 * value - value.detach() for name, value in model.named_parameters()}
        loss = session.forward(step, torch.func.functional_call, model, weights, (session.x(step),))
        session.backward(step, loss)
    return gradients(model)


@program
def part_called_with_other_weights(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {"weight": self.first.weight * 2, "bias": self.first.bias}
            return super().forward(torch.func.functional_call(self.first, weights, (x,)))

    return session.train(session.wrap(Model()))


@program
def vectorized_part(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.vmap(self.first, randomness="different")(F.dropout(x, 0.2)))

    return session.train(session.wrap(Model()))


@program
def schedule_in_an_attribute(session: Session) -> Any:
    model, losses = session.wrap(around(lambda self, x: x * self.share, share=0.0)), []
    for step in range(NUM_STEPS):
        model.share = step / NUM_STEPS
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def schedule_of_dropout(session: Session) -> Any:
    model, losses = session.wrap(around(lambda self, x: self.drop(x), drop=nn.Dropout(0.5))), []
    for step in range(NUM_STEPS):
        model.drop.p = 0.1 * step
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, torch.rand(2)


@dataclasses.dataclass
class Settings:
    width: int = 16
    scale: float = 2.0

    @property
    def half(self) -> float:
        return self.scale / 2


@program
def settings_in_a_dataclass(session: Session) -> Any:
    model = around(lambda self, x: x * self.settings.half * math.sqrt(self.settings.width), settings=Settings())
    return session.train(session.wrap(model))


@program
def settings_changed_by_the_loop(session: Session) -> Any:
    settings = Settings()
    model, losses = session.wrap(around(lambda self, x: x * self.settings.half, settings=settings)), []
    for step in range(NUM_STEPS):
        settings.scale = 1.0 + step
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def partial_as_an_activation(session: Session) -> Any:
    model = around(lambda self, x: self.act(x), act=functools.partial(F.leaky_relu, negative_slope=0.2))
    return session.train(session.wrap(model))


@program
def memory_used_up_is_caught(session: Session) -> Any:
    """A loop that knows what to do itself: the batch is left out."""
    model, losses = session.wrap(Body()), []
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        try:
            loss = session.forward(step, model, session.x(step))
            session.backward(step, loss)
        except torch.OutOfMemoryError as error:
            if session.fails_in is not None and "is not run again" not in str(error):
                losses.append(str(error))
            raise
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- models of transformers


def gpt2(**options: Any) -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **options)
    config.pad_token_id = 0
    return GPT2LMHeadModel(config)


IDS = torch.arange(16).reshape(2, 8)


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = (IDS + step).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def trained(session: Session, model: nn.Module, **more: Any) -> Any:
    model = session.wrap(model, sample={**batch(0), **more})
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **batch(step), **more).loss
        session.backward(step, loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, on_host(model.buffers()), torch.rand(2)


@program
def gpt2_with_dropout(session: Session) -> Any:
    return trained(session, gpt2())


@program
def gpt2_with_a_cache(session: Session) -> Any:
    return trained(session, gpt2(), use_cache=True)


@program
def gpt2_with_hidden_states(session: Session) -> Any:
    model = session.wrap(gpt2(), sample={**batch(0), "output_hidden_states": True})
    losses = []
    for step in range(NUM_STEPS):
        out = session.forward(step, model, **batch(step), output_hidden_states=True)
        loss = out.loss + out.hidden_states[1].square().mean()
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, gradients(model)


@program
def gpt2_whose_logits_are_used(session: Session) -> Any:
    model = session.wrap(gpt2(), sample={"input_ids": batch(0)["input_ids"]})
    losses = []
    for step in range(NUM_STEPS):
        ids = batch(step)["input_ids"]
        logits = session.forward(step, model, ids).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, gradients(model)


class _Weighted(GPT2LMHeadModel):
    """A model of one's own, with a loss of its own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        out = super().forward(input_ids)
        loss = F.cross_entropy(out.logits[:, :-1].reshape(-1, 64), labels[:, 1:].reshape(-1))
        return loss * self.config.n_layer


@program
def gpt2_of_its_own(session: Session) -> Any:
    model = _Weighted(gpt2().config)
    model = session.wrap(model, sample=batch(0))
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **batch(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


class _Remembering(GPT2LMHeadModel):
    seen = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        type(self).seen += 1
        return super().forward(input_ids, labels=labels).loss * type(self).seen


@program
def gpt2_with_a_count_on_its_class(session: Session) -> Any:
    model = session.wrap(_Remembering(gpt2().config), sample=batch(0))
    _Remembering.seen = 0
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **batch(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, _Remembering.seen


@program
def gpt2_whose_config_is_updated(session: Session) -> Any:
    class Model(GPT2LMHeadModel):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            self.config.update({"turns": self.config.turns + 1})
            return super().forward(input_ids, labels=labels).loss * self.config.turns

    config = gpt2().config
    config.turns = 0
    model = session.wrap(Model(config), sample=batch(0))
    model.config.turns = 0
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **batch(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, model.config.turns


@program
def gpt2_with_a_patched_class(session: Session) -> Any:
    before, count = GPT2MLP.forward, [0]

    def counting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return before(self, hidden) * (1 + count[0] / 100)

    model = gpt2()
    GPT2MLP.forward = counting
    try:
        model = session.wrap(model, sample=batch(0))
        count[0] = 0
        losses = []
        for step in range(NUM_STEPS):
            loss = session.forward(step, model, **batch(step)).loss
            session.backward(step, loss)
            losses.append(loss.item())
    finally:
        GPT2MLP.forward = before
    return losses, count


@program
def gpt2_with_an_activation_of_its_own(session: Session) -> Any:
    model = gpt2()
    for block in model.transformer.h:
        del block.mlp.act
        block.mlp.act = functools.partial(F.gelu, approximate="tanh")
    return trained(session, model)


@program
def gpt2_with_low_rank_parts(session: Session) -> Any:
    class LowRank(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 48, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = gpt2().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn)
    return trained(session, model)


@program
def gpt2_with_checkpoints_of_its_own(session: Session) -> Any:
    model = gpt2(use_cache=False)
    model.gradient_checkpointing_enable()
    return trained(session, model)


@program
def gpt2_with_a_loss_of_its_own(session: Session) -> Any:
    losses_seen: list[int] = []

    def loss_function(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        losses_seen.append(1)
        return F.cross_entropy(logits.view(-1, 64), labels.view(-1)) * len(losses_seen)

    model = gpt2()
    model.loss_function = loss_function
    model = session.wrap(model, sample=batch(0))
    losses_seen.clear()
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **batch(step)).loss
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, len(losses_seen)


@program
def gpt2_asked_between_steps(session: Session) -> Any:
    model = session.wrap(gpt2(), sample=batch(0))
    optimizer, seen = sgd(model), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **batch(step)).loss
        session.backward(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        seen.append(model.generate(batch(step)["input_ids"], max_new_tokens=2, do_sample=False).cpu())
        model.train()
    return seen


@program
def twice_under_one_autocast(session: Session) -> Any:
    """Autocast has one cast of each weight for both forwards, so their gradients are added before the cast back."""
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        with torch.autocast("simgpu", torch.bfloat16):
            one = model(session.x(step))
            two = session.forward(step, model, session.x(step + 1))
        session.backward(step, one + two)
    return gradients(model)


@program
def gpt2_under_autocast(session: Session) -> Any:
    model = session.wrap(gpt2(), sample=batch(0))
    losses = []
    for step in range(NUM_STEPS):
        with torch.autocast("simgpu", torch.bfloat16):
            loss = session.forward(step, model, **batch(step)).loss
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, gradients(model)


@program
def llama_whose_rotation_grows(session: Session) -> Any:
    """The step that fails is the longest, and makes the table of rotations anew."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8, use_cache=False,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    long = torch.arange(24).reshape(2, 12).to(DEVICE)
    model = session.wrap(LlamaForCausalLM(config), sample={"input_ids": long, "labels": long})
    losses = []
    for step in range(NUM_STEPS):
        ids = long if step == 2 else (IDS + step).to(DEVICE)
        loss = session.forward(step, model, input_ids=ids, labels=ids).loss
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, on_host(model.buffers()), gradients(model)


@program
def llama(session: Session) -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return trained(session, LlamaForCausalLM(config))


@program
def bert_with_a_mask(session: Session) -> Any:
    config = BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=2
    )
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3]).to(DEVICE)
    labels = torch.tensor([0, 1]).to(DEVICE)
    sample = {"input_ids": IDS.to(DEVICE), "attention_mask": mask, "labels": labels}
    model = session.wrap(BertForSequenceClassification(config), sample=sample)
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, **{**sample, "input_ids": (IDS + step).to(DEVICE)}).loss
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, gradients(model)


@program
def t5(session: Session) -> Any:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False
    )
    return trained(session, T5ForConditionalGeneration(config))


@program
def bart_whose_layers_are_dropped(session: Session) -> Any:
    config = BartConfig(
        vocab_size=64, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2, use_cache=False,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layerdrop=0.4, decoder_layerdrop=0.4,
        max_position_embeddings=16,
    )  # fmt: skip
    return trained(session, BartForConditionalGeneration(config))


@program
def mixtral(session: Session) -> Any:
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        use_cache=False, num_key_value_heads=2, num_local_experts=3, output_router_logits=True, router_jitter_noise=0.1,
    )  # fmt: skip
    return trained(session, MixtralForCausalLM(config))
