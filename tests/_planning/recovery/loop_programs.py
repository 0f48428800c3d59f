"""Training programs that do something odd around, or inside, a model of plain code.

Each is given a `Session` and gives what has been seen by its end. With `recover_from_oom="plain"`, a failing step must
be repeated bit for bit or be refused with a sentence; there is no third way.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import itertools
import operator
import random
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from tests._planning.recovery.sessions import NUM_STEPS, Session
from tests.techniques.offload.runs import DEVICE

PROGRAMS: dict[str, Callable[[Session], Any]] = {}


def program(run: Callable[[Session], Any]) -> Callable[[Session], Any]:
    PROGRAMS[run.__name__] = run
    return run


def blocks() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))


class Body(nn.Module):
    """Plain code: what most people's own models are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Hidden(Body):
    """Gives what a loss outside of it uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def around(change: Callable[[nn.Module, torch.Tensor], torch.Tensor], **attributes: Any) -> nn.Module:
    """A model whose forward calls a function of its own in its middle."""

    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = change(self, self.first(x))
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    model = Model()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


# ---- plain programs, which are repeated


@program
def plain(session: Session) -> Any:
    return session.train(session.wrap(Body()))


@program
def sgd_with_momentum(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return session.train(model, optimizer=optimizer)


@program
def adamw_with_schedule(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, schedule.get_last_lr()


@program
def accumulated_gradients(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)) / NUM_STEPS)
    return None


@program
def clipped_gradients(session: Session) -> Any:
    model = session.wrap(Body())
    norms = []
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
    return norms


@program
def dropout_and_batch_norm(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.drop(self.norm(self.first(x)))
            for block in self.blocks:
                x = x + self.drop(block(x))
            return x.square().mean()

    model = session.wrap(Model())
    losses = session.train(model)
    return losses, [buffer.cpu() for buffer in model.buffers()], torch.rand(3)


@program
def settings_in_an_object(session: Session) -> Any:
    model = around(lambda self, x: x * self.settings.scale, settings=types.SimpleNamespace(scale=2.0))
    return session.train(session.wrap(model))


@program
def helper_functions_and_a_property(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = (1, 2, 3)

        @property
        def total(self) -> int:
            return sum(size for size in self.sizes)

        def mixed(self, x: torch.Tensor) -> torch.Tensor:
            outputs = []
            for block in self.blocks:
                outputs.append(block(x))
            return torch.stack(outputs).sum(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mixed(self.first(x)) * self.total
            return F.gelu(x).square().mean()

    return session.train(session.wrap(Model()))


@program
def loss_outside(session: Session) -> Any:
    model = session.wrap(Hidden())
    losses = []
    for step in range(NUM_STEPS):
        x = session.x(step)
        hidden = session.forward(step, model, x)
        loss = F.mse_loss(hidden, x)
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def scaled_loss(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)) * 1024.0)
    return None


@program
def draws_of_the_loop(session: Session) -> Any:
    model = session.wrap(around(lambda self, x: F.dropout(x, 0.5)))
    seen = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        seen += [random.random() * 0, float(np.random.rand()) * 0, torch.rand(1).item()]
        session.backward(step, loss)
        seen.append(torch.rand(1).item())
    return seen


@program
def average_of_weights(session: Session) -> Any:
    model = session.wrap(Body())
    average = torch.optim.swa_utils.AveragedModel(Body().to(DEVICE), multi_avg_fn=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [value.cpu() for value in average.module.parameters()]


@program
def checkpoint_in_the_forward(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + checkpoint(block, F.dropout(x, 0.1), use_reentrant=False)
            return x.square().mean()

    return session.train(session.wrap(Model()))


# ---- around the model


class _Doubling(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.gelu or func is torch.square
        return func(*args, **(kwargs or {}))


@program
def function_mode_around_the_forward(session: Session) -> Any:
    model, mode = session.wrap(Body()), _Doubling()
    for step in range(NUM_STEPS):
        with mode:
            loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
    return mode.count


class _Rounding(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@program
def dispatch_mode_around_the_forward(session: Session) -> Any:
    model, mode = session.wrap(Body()), _Rounding()
    for step in range(NUM_STEPS):
        x = session.x(step)
        if step == NUM_STEPS - 1:
            with mode:
                loss = session.forward(step, model, x)
        else:
            loss = session.forward(step, model, x)
        session.backward(step, loss)
    return None


@program
def what_is_saved_is_rounded(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x * 8).round() / 8, lambda x: x):
            loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
    return None


@program
def what_is_saved_is_counted(session: Session) -> Any:
    model, saved = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(1), x)[1], lambda x: x):
            loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
    return len(saved)


@program
def checkpoint_around_the_model(session: Session) -> Any:
    model = session.wrap(Body())
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, checkpoint, model, session.x(step), use_reentrant=False)
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def reentrant_checkpoint_around_the_model(session: Session) -> Any:
    model = session.wrap(Body())
    losses = []
    for step in range(NUM_STEPS):
        x = session.x(step).requires_grad_()
        loss = session.forward(step, checkpoint, model, x, use_reentrant=True)
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def node_hook_that_scales(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        node = hidden.grad_fn.next_functions[0][0]
        node.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 2 for g in inputs))
        session.backward(step, hidden.square().mean())
    return None


@program
def node_prehook_that_scales(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        hidden.grad_fn.next_functions[1][0].register_prehook(lambda grads: tuple(g * 2 for g in grads))
        session.backward(step, hidden.square().mean())
    return None


@program
def hooks_of_accumulating_nodes(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    nodes = [value.expand_as(value).grad_fn.next_functions[0][0] for value in model.parameters()]
    for place, node in enumerate(nodes):
        node.register_hook(lambda *_, place=place: seen.append(place))
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
    return sorted(seen)


@program
def multi_gradient_hook(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda grads: seen.append(sum(g is not None for g in grads))
    )
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
    return seen


@program
def any_gradient_hook(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        torch.autograd.graph.register_multi_grad_hook(
            tuple(model.parameters()), lambda grad: seen.append(1), mode="any"
        )
        session.backward(step, loss)
    return len(seen)


@program
def parameter_hooks_that_log(session: Session) -> Any:
    model, norms = session.wrap(Body()), []
    for value in model.parameters():
        value.register_hook(lambda grad: norms.append(grad.norm().item()))
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
    return sorted(norms)


@program
def parameter_hook_that_scales(session: Session) -> Any:
    model = session.wrap(Body())
    model.first.weight.register_hook(lambda grad: grad * 0.5)
    return session.train(model)


@program
def accumulated_hook_that_clears(session: Session) -> Any:
    model = session.wrap(Body())

    def step_now(value: torch.Tensor) -> None:
        with torch.no_grad():
            value.sub_(value.grad, alpha=0.1)
        value.grad = None

    for value in model.parameters():
        value.register_post_accumulate_grad_hook(step_now)
    return session.train(model)


@program
def forward_hook_that_collects(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.detach().mean().item()))
    return session.train(model), seen


@program
def forward_hook_that_replaces(session: Session) -> Any:
    model = session.wrap(Body())
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    return session.train(model)


@program
def hook_put_there_between_forward_and_backward(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        handle = model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
        session.backward(step, loss)
        handle.remove()
    return len(seen)


@program
def hook_taken_off_between_forward_and_backward(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        handle = model.blocks[1].register_full_backward_hook(
            lambda m, into, out: tuple(g if g is None else g * 2 for g in into)
        )
        loss = session.forward(step, model, session.x(step))
        handle.remove()
        session.backward(step, loss)
    return None


@program
def global_hook(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        session.train(model)
    finally:
        handle.remove()
    return len(seen)


@program
def hook_around_the_whole_model(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    model.register_forward_pre_hook(lambda module, args: seen.append(1))
    return session.train(model), len(seen)


@program
def hook_that_changes_the_input(session: Session) -> Any:
    model = session.wrap(Body())
    model.register_forward_pre_hook(lambda module, args: (args[0] * torch.rand(1).item(),))
    return session.train(model)


# ---- between forward and backward


@program
def weights_written_through_data(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        model.blocks[0][2].weight.data.mul_(1.5)
        session.backward(step, loss)
    return None


@program
def input_written_through_data(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        x = session.x(step)
        loss = session.forward(step, model, x)
        x.data.mul_(2)
        session.backward(step, loss)
    return None


@program
def input_buffer_that_is_filled_again(session: Session) -> Any:
    model, x = session.wrap(Body()), torch.empty(8, 16, device=DEVICE)
    for step in range(NUM_STEPS):
        x.copy_(session.x(step))
        session.backward(step, session.forward(step, model, x))
    return None


@program
def mode_changed_between(session: Session) -> Any:
    model = session.wrap(around(lambda self, x: F.dropout(x, 0.5, self.training)))
    for step in range(NUM_STEPS):
        model.train()
        loss = session.forward(step, model, session.x(step))
        model.eval()
        session.backward(step, loss)
    return None


@program
def frozen_between(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        model.first.requires_grad_(True)
        loss = session.forward(step, model, session.x(step))
        model.first.requires_grad_(False)
        session.backward(step, loss)
    return None


@program
def gradient_set_between(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        for value in model.parameters():
            value.grad = torch.ones_like(value)
        session.backward(step, loss)
    return None


@program
def module_replaced_between(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        if step == NUM_STEPS - 1:
            model.blocks[1] = nn.Identity()
        session.backward(step, loss)
    return None


@program
def module_option_changed_between(session: Session) -> Any:
    model = session.wrap(around(lambda self, x: self.drop(x), drop=nn.Dropout(0.5)))
    for step in range(NUM_STEPS):
        model.drop.p = 0.5
        loss = session.forward(step, model, session.x(step))
        model.drop.p = 0.0
        session.backward(step, loss)
    return None


@program
def setting_that_only_gradients_feel(session: Session) -> Any:
    settings = types.SimpleNamespace(share=0.5)
    model = session.wrap(
        around(lambda self, x: x * self.settings.share + (x - x * self.settings.share).detach(), settings=settings)
    )
    for step in range(NUM_STEPS):
        settings.share = 0.5
        loss = session.forward(step, model, session.x(step))
        settings.share = 0.25
        session.backward(step, loss)
    return None


SHARE = 0.5


@program
def global_that_only_gradients_feel(session: Session) -> Any:
    global SHARE
    SHARE = 0.5
    model = session.wrap(around(lambda self, x: x * SHARE + (x - x * SHARE).detach()))
    for step in range(NUM_STEPS):
        SHARE = 0.5
        loss = session.forward(step, model, session.x(step))
        if step == NUM_STEPS - 1:
            SHARE = 0.25
        session.backward(step, loss)
    SHARE = 0.5
    return None


@program
def function_replaced_between(session: Session) -> Any:
    before = F.gelu
    model = session.wrap(around(lambda self, x: F.gelu(x)))
    try:
        for step in range(NUM_STEPS):
            F.gelu = before
            loss = session.forward(step, model, session.x(step))
            F.gelu = F.silu
            session.backward(step, loss)
    finally:
        F.gelu = before
    return None


@program
def function_of_torch_that_counts(session: Session) -> Any:
    before, count = F.gelu, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return before(*args, **kwargs) * count[0]

    F.gelu = counting
    try:
        return session.train(session.wrap(Body())), count
    finally:
        F.gelu = before


@program
def method_of_tensors_that_counts(session: Session) -> Any:
    count = [0]

    def square(self: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return self * self * count[0]

    torch.Tensor.square = square
    try:
        return session.train(session.wrap(Body())), count
    finally:
        del torch.Tensor.square


@program
def forward_of_linear_layers_replaced(session: Session) -> Any:
    before, count = nn.Linear.forward, [0]

    def counting(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return before(self, x) * (1 + count[0] / 100)

    nn.Linear.forward = counting
    try:
        return session.train(session.wrap(Body())), count
    finally:
        nn.Linear.forward = before


@program
def forward_of_one_layer_replaced(session: Session) -> Any:
    model, count = Body(), [0]
    before = model.first.forward

    def counting(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return before(x) * count[0]

    model.first.forward = counting
    return session.train(session.wrap(model)), count


@program
def forward_of_one_layer_replaced_after_it_was_wrapped(session: Session) -> Any:
    model, count = session.wrap(Body()), [0]
    before = model.first.forward

    def counting(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return before(x) * count[0]

    model.first.forward = counting
    return session.train(model), count


@program
def class_of_a_layer_replaced(session: Session) -> Any:
    class Counting(nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counting.count += 1
            return super().forward(x) * Counting.count

    model = session.wrap(Body())
    model.first.__class__ = Counting
    return session.train(model), Counting.count


# ---- inside the model


@program
def iterator_in_an_attribute(session: Session) -> Any:
    model = around(lambda self, x: x * next(self.numbers), numbers=iter(range(1, 100)))
    return session.train(session.wrap(model))


@program
def iterator_in_a_tuple(session: Session) -> Any:
    model = around(
        lambda self, x: x * sum(n for n in self.numbers[0]), numbers=(itertools.islice(itertools.count(1), 3),)
    )
    return session.train(session.wrap(model))


@program
def zip_object_that_is_used_up(session: Session) -> Any:
    model = around(lambda self, x: x * (1 + len(list(self.pairs))), pairs=zip((1, 2), (3, 4), strict=True))
    return session.train(session.wrap(model))


@program
def bound_method_of_a_list(session: Session) -> Any:
    kept: list[int] = [1]
    push, pull = kept.append, kept.__len__
    model = around(lambda self, x: (push(1), x * pull())[1])
    return session.train(session.wrap(model)), kept


@program
def default_argument_that_grows(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor, kept: list[int] = []) -> torch.Tensor:  # noqa: B006
        kept.append(1)
        return x * len(kept)

    return session.train(session.wrap(around(change)))


@program
def dictionary_that_is_extended(session: Session) -> Any:
    kept: dict[int, int] = {}
    model = around(lambda self, x: x * (1 + len(kept | {1: kept.setdefault(len(kept), 1)})))
    return session.train(session.wrap(model)), kept


@program
def property_with_a_count(session: Session) -> Any:
    class Model(Body):
        @property
        def scale(self) -> int:
            self.count = getattr(self, "count", 0) + 1
            return self.count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    return session.train(session.wrap(Model()))


class Counting:
    """A descriptor."""

    def __init__(self) -> None:
        self.count = 0

    def __get__(self, owner: Any, kind: Any = None) -> int:
        self.count += 1
        return self.count


@program
def descriptor_with_a_count(session: Session) -> Any:
    class Model(Body):
        scale = Counting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    return session.train(session.wrap(Model()))


@program
def descriptor_of_the_settings(session: Session) -> Any:
    class Settings:
        scale = Counting()

    return session.train(session.wrap(around(lambda self, x: x * self.settings.scale, settings=Settings())))


@program
def settings_that_answer_for_missing_names(session: Session) -> Any:
    class Settings:
        counts: ClassVar[list[int]] = []

        def __getattr__(self, name: str) -> Any:
            if name != "scale":
                raise AttributeError(name)
            Settings.counts.append(1)
            return len(Settings.counts)

    return session.train(session.wrap(around(lambda self, x: x * self.settings.scale, settings=Settings())))


@program
def number_with_a_count(session: Session) -> Any:
    class Number(float):
        counts: ClassVar[list[int]] = []

        def __rmul__(self, other: Any) -> Any:
            Number.counts.append(1)
            return other * float(len(Number.counts))

    return session.train(session.wrap(around(lambda self, x: x * self.scale, scale=Number(2.0)))), Number.counts


@program
def text_with_a_count(session: Session) -> Any:
    class Text(str):
        counts: ClassVar[list[int]] = []

        def __len__(self) -> int:
            Text.counts.append(1)
            return len(Text.counts)

    return session.train(session.wrap(around(lambda self, x: x * len(self.text), text=Text("a")))), Text.counts


@program
def tuple_with_a_count(session: Session) -> Any:
    class Pair(NamedTuple):
        first: list[int]
        second: int

    pair = Pair([], 1)
    model = around(lambda self, x: x * (1 + len(self.pair.first)) + 0 * len(self.pair[0].__iadd__([1])), pair=pair)
    return session.train(session.wrap(model)), pair.first


@program
def metaclass_that_counts(session: Session) -> Any:
    class Meta(type):
        counts: ClassVar[list[int]] = []

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            Meta.counts.append(1)
            return super().__call__(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            Meta.counts.append(1)
            return super().__instancecheck__(value)

    class Model(Body, metaclass=Meta):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * (2 if isinstance(self, Model) else 1) * len(Meta.counts))

    return session.train(session.wrap(Model()))


@program
def call_of_its_own(session: Session) -> Any:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return session.train(session.wrap(around(lambda self, x: self.part(x), part=Part())))


@program
def attributes_that_a_module_makes_up(session: Session) -> Any:
    class Part(nn.Module):
        counts: ClassVar[list[int]] = []

        def __getattr__(self, name: str) -> Any:
            if name == "scale":
                Part.counts.append(1)
                return len(Part.counts)
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return session.train(session.wrap(around(lambda self, x: self.part(x), part=Part())))


class Keeping(torch.autograd.Function):
    kept: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = 1.0 + len(Keeping.kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Keeping.kept.append(ctx.scale)
        return gradient * len(Keeping.kept)


@program
def function_whose_backward_keeps(session: Session) -> Any:
    Keeping.kept.clear()
    return session.train(session.wrap(around(lambda self, x: Keeping.apply(x)))), list(Keeping.kept)


class Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


@program
def function_that_keeps_nothing(session: Session) -> Any:
    return session.train(session.wrap(around(lambda self, x: Halving.apply(x))))


@program
def hook_that_the_forward_registers(session: Session) -> Any:
    seen: list[float] = []

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        return y

    return session.train(session.wrap(around(change))), seen


@program
def hook_with_a_plain_function(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * 0.5)
        return y

    return session.train(session.wrap(around(change)))


CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=1)


@program
def context_variable(session: Session) -> Any:
    CONTEXT.set(1)
    model = around(lambda self, x: (CONTEXT.set(CONTEXT.get() + 1), x * CONTEXT.get())[1])
    return session.train(session.wrap(model)), CONTEXT.get()


@program
def weak_reference_that_dies(session: Session) -> Any:
    class Thing:
        pass

    things = [Thing() for _ in range(NUM_STEPS + 8)]
    references = tuple(map(weakref.ref, things))
    model = around(lambda self, x: (things.pop(), x * sum(r() is not None for r in references))[1])
    return session.train(session.wrap(model)), len(things)


@program
def collector_callback(session: Session) -> Any:
    count = [0]

    def called(phase: str, info: Any) -> None:
        count[0] += 1

    gc.callbacks.append(called)
    try:
        return session.train(session.wrap(around(lambda self, x: (gc.collect(), x * count[0])[1])))
    finally:
        gc.callbacks.remove(called)


@program
def object_that_counts_its_deaths(session: Session) -> Any:
    class Mortal:
        deaths: ClassVar[list[int]] = []

        def __del__(self) -> None:
            Mortal.deaths.append(1)

    model = around(lambda self, x: (Mortal(), x * (1 + len(Mortal.deaths)))[1])
    return session.train(session.wrap(model)), len(Mortal.deaths)


@program
def python_generator(session: Session) -> Any:
    random.seed(3)
    return session.train(session.wrap(around(lambda self, x: x * random.random()))), random.random()


@program
def numpy_generator(session: Session) -> Any:
    np.random.seed(3)
    return session.train(session.wrap(around(lambda self, x: x * float(np.random.rand())))), float(np.random.rand())


@program
def generator_of_torch(session: Session) -> Any:
    generator = torch.Generator().manual_seed(3)
    model = around(lambda self, x: x * torch.rand(1, generator=generator).item())
    return session.train(session.wrap(model)), torch.rand(1, generator=generator).item()


@program
def clock(session: Session) -> Any:
    ticks = iter(range(1, 1000))
    before = time.perf_counter
    time.perf_counter = lambda: next(ticks)
    try:
        return session.train(session.wrap(around(lambda self, x: x * time.perf_counter())))
    finally:
        time.perf_counter = before


@program
def thread_that_is_asked(session: Session) -> Any:
    count, ask, answer = [0], threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        while ask.acquire() and count[0] >= 0:
            count[0] += 1
            answer.release()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        model = around(lambda self, x: (ask.release(), answer.acquire(), x * count[0])[2])
        return session.train(session.wrap(model))
    finally:
        count[0] = -1
        ask.release()
        thread.join()


@program
def buffer_written_by_the_forward(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return super().forward(x * self.count)

    model = session.wrap(Model())
    return session.train(model), model.count.cpu()


@program
def buffer_written_through_a_function(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.add(self.count, 1, out=self.count)
            return super().forward(x * self.count)

    model = session.wrap(Model())
    return session.train(model), model.count.cpu()


@program
def buffer_written_by_an_operator(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = self.count
            count += 1
            return super().forward(x * count)

    model = session.wrap(Model())
    return session.train(model), model.count.cpu()


@program
def statistics_outside_of_buffers(session: Session) -> Any:
    mean, variance = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)
    model = around(lambda self, x: F.batch_norm(x, mean, variance, training=True))
    return session.train(session.wrap(model)), mean.cpu(), variance.cpu()


@program
def view_of_a_buffer(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("both", torch.zeros(2, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.batch_norm(x, self.both[0], self.both[1], training=True)
            return super().forward(x * (1 + self.both.sum()))

    model = session.wrap(Model())
    return session.train(model), model.both.cpu()


@program
def input_written_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1
            return super().forward(x)

    model, x, losses = session.wrap(Model()), session.x(0), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, x)
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, x.cpu()


@program
def view_of_a_larger_input(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.view(-1)
            y *= 1.5
            return super().forward(x)

    large = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model, losses = session.wrap(Model()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, large[1])
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, large.cpu()


@program
def list_of_inputs_that_is_extended(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
            kept.append(x.shape[0])
            return super().forward(x * len(kept))

    kept: list[int] = []
    model, losses = session.wrap(Model(), sample=(session.x(0), [1])), []
    kept.clear()
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step), kept)
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, kept


class Tagged(torch.Tensor):
    counts: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        Tagged.counts.append(1)
        return super().__torch_function__(func, kinds, args, kwargs or {})


@program
def input_of_another_class(session: Session) -> Any:
    Tagged.counts.clear()
    model, losses = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step).as_subclass(Tagged))
        session.backward(step, loss.as_subclass(torch.Tensor))
        losses.append(loss.as_subclass(torch.Tensor).item())
    return losses


@program
def two_calls_before_one_backward(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        first = model(session.x(step))
        second = session.forward(step, model, session.x(step + 1))
        session.backward(step, first + second)
    return None


@program
def two_backwards_of_one_forward(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        hidden.mean().backward(retain_graph=True)
        session.backward(step, hidden.square().mean())
    return None


@program
def penalty_on_weights(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss + sum(value.square().sum() for value in model.parameters()))
    return None


@program
def penalty_on_gradients(session: Session) -> Any:
    model = session.wrap(Body())
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        gradients = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
        session.backward(step, loss + sum(value.square().sum() for value in gradients))
    return None


@program
def loss_changed_in_place(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        loss *= 3
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def output_changed_in_place(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        hidden = session.forward(step, model, session.x(step))
        hidden.mul_(2).add_(1)
        session.backward(step, hidden.square().mean())
    return None


@program
def output_that_is_the_input(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    model = session.wrap(Model())
    for step in range(NUM_STEPS):
        loss, x = session.forward(step, model, session.x(step))
        session.backward(step, loss + x.sum() * 0)
    return None


@program
def closure_given_to_the_step(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):

        def again(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = session.forward(step, model, session.x(step))
            session.backward(step, loss)
            losses.append(loss.item())
            return loss

        optimizer.step(again)
    return losses


@program
def autocast_in_the_loop(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        with torch.autocast(DEVICE.type if hasattr(DEVICE, "type") else "simgpu", torch.bfloat16):
            loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.item())
    return losses


@program
def profiler_around_all(session: Session) -> Any:
    model = session.wrap(Body())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return session.train(model)


@program
def anomalies_are_looked_for(session: Session) -> Any:
    model = session.wrap(Body())
    with torch.autograd.set_detect_anomaly(True):
        return session.train(model)


@program
def shared_weights(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 16, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.last(x).square().mean()

    return session.train(session.wrap(Model()))


@program
def copied_model(session: Session) -> Any:
    model = session.wrap(copy.deepcopy(Body()))
    return session.train(model)


@program
def embedding_that_is_renormed(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 16, max_norm=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.table(torch.arange(8, device=x.device)))

    model = session.wrap(Model())
    return session.train(model)


@program
def spectral_norm(session: Session) -> Any:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    model = session.wrap(Model())
    return session.train(model), [buffer.cpu() for buffer in model.buffers()]


@program
def activation_given_to_a_layer(session: Session) -> Any:
    kept: list[int] = []

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(
                16, 2, 32, 0.0, lambda x: (kept.append(1), F.relu(x) * len(kept))[1]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.layer(x))

    return session.train(session.wrap(Model())), kept


@program
def cached_function(session: Session) -> Any:
    calls: list[int] = []

    @functools.lru_cache
    def scale(size: int) -> float:
        calls.append(size)
        return 1.0 + len(calls)

    return session.train(session.wrap(around(lambda self, x: x * scale(x.shape[0])))), calls


@program
def operator_of_the_standard_library(session: Session) -> Any:
    kept = [1]
    model = around(lambda self, x: (operator.iadd(kept, [1]), x * len(kept))[1])
    return session.train(session.wrap(model)), kept


@program
def reduce_with_a_list(session: Session) -> Any:
    kept = [1]
    model = around(lambda self, x: x * len(sorted(kept, key=lambda n: kept.__setitem__(0, n + 1) or 1)) * kept[0])
    return session.train(session.wrap(model)), kept


@program
def model_of_transformers(session: Session) -> Any:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    ids = torch.arange(16).reshape(2, 8).to(DEVICE)
    model = session.wrap(GPT2LMHeadModel(config), sample={"input_ids": ids, "labels": ids})
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, input_ids=ids + step, labels=ids).loss
        session.backward(step, loss)
        losses.append(loss.item())
    return losses
