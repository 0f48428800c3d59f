"""A third round of odd programs: what plain code reaches through PyTorch itself, and what loops keep beside a model.

Written by eyes that were new to the rules, against the arguments in `plain_code.py` and `watched_run.py`: calls that
look like operators and keep something, modules that change themselves, and places of PyTorch that lead out of it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache

from tests._planning.recovery.loop_programs import Body, Hidden, around
from tests._planning.recovery.sessions import NUM_STEPS, Session
from tests.techniques.offload.runs import DEVICE

PROGRAMS: dict[str, Callable[[Session], Any]] = {}


def program(run: Callable[[Session], Any]) -> Callable[[Session], Any]:
    PROGRAMS[run.__name__] = run
    return run


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def on_host(values: Any) -> list[torch.Tensor]:
    return [value.detach().cpu().clone() for value in values]


def trained(session: Session, change: Callable[..., torch.Tensor], **attributes: Any) -> tuple[Any, Any]:
    """The losses, and the model."""
    model = session.wrap(around(change, **attributes))
    return session.train(model, optimizer=sgd(model)), model


# ---- calls into PyTorch that keep something


@program
def gradients_dropped_by_the_forward(session: Session) -> Any:
    """Run again inside a backward, it would drop gradients that had come."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.zero_grad()
        return x * 2

    model = session.wrap(around(change))
    return session.train(model)


@program
def gradients_of_a_part_dropped_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.blocks[2].zero_grad(set_to_none=False)
        return x * 2

    model = session.wrap(around(change))
    return session.train(model)


@program
def gradients_clipped_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        return x * 2

    return session.train(session.wrap(around(change)))


@program
def storage_filled_by_the_forward(session: Session) -> Any:
    """Writing to a storage is no new version of the tensor over it."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        self.shift.untyped_storage().fill_(1)
        return x

    model = around(change)
    model.register_buffer("shift", torch.zeros(8, 16))
    model = session.wrap(model)
    return session.train(model), model.shift.cpu()


@program
def storage_of_a_weight_copied_over(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.untyped_storage().copy_(self.blocks[0][0].weight[:16].clone().untyped_storage())
        return x

    return trained(session, change)[0]


def _beside_the_device(session: Session, change: Callable[..., torch.Tensor]) -> Any:
    """A model with a buffer that stays on the CPU, and code that runs when planning is over."""
    switch = types.SimpleNamespace(is_on=False)
    model = around(lambda self, x: change(self, x) if self.switch.is_on else x, switch=switch)
    model.register_buffer("shift", torch.zeros(64, 64))
    model = session.wrap(model)
    model.shift, switch.is_on = torch.zeros(64, 64), True
    return session.train(model), model.shift


@program
def numpy_view_of_a_buffer(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.shift.numpy().fill(self.shift.numpy().max() + 1)
        return x + self.shift.sum().item()

    return _beside_the_device(session, change)


@program
def vector_written_into_weights(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        vector = nn.utils.parameters_to_vector(self.first.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, self.first.parameters())
        return self.first(x)

    return trained(session, change)[0]


@program
def autocast_type_changed_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        is_half = torch.get_autocast_dtype("simgpu") == torch.float16
        torch.set_autocast_dtype("simgpu", torch.bfloat16 if is_half else torch.float16)
        return x * (2 if is_half else 1)

    before = torch.get_autocast_dtype("simgpu")
    try:
        return trained(session, change)[0]
    finally:
        torch.set_autocast_dtype("simgpu", before)


@program
def gradient_mode_toggled_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        scale = self.first(x).mean()
        torch.set_grad_enabled(True)
        return x * scale

    return trained(session, change)[0]


@program
def number_of_threads_as_a_memory(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(3 - torch.get_num_threads())
        return x * torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(session, change)[0]
    finally:
        torch.set_num_threads(before)


@program
def matmul_precision_as_a_memory(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        is_high = torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest" if is_high else "high")
        return x * (2 if is_high else 1)

    before = torch.get_float32_matmul_precision()
    try:
        return trained(session, change)[0]
    finally:
        torch.set_float32_matmul_precision(before)


@program
def warnings_of_operators_as_a_memory(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.set_warn_always(not torch.is_warn_always_enabled())
        return x * (2 if torch.is_warn_always_enabled() else 1)

    try:
        return trained(session, change)[0]
    finally:
        torch.set_warn_always(False)


@program
def environment_through_pytorch(session: Session) -> Any:
    """PyTorch's module has modules of others in it."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        count = int(torch.os.environ.pop("MEMSCALE_TEST_COUNT", "0"))
        torch.os.environ.setdefault("MEMSCALE_TEST_COUNT", str(count + 1))
        return x * (count + 1)

    try:
        return trained(session, change)[0], os.environ.get("MEMSCALE_TEST_COUNT")
    finally:
        os.environ.pop("MEMSCALE_TEST_COUNT", None)


@program
def modules_of_python_through_pytorch(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        name = "memscale_test_count"
        found = torch.sys.modules.pop(name, "")
        torch.sys.modules.setdefault(name, found + "x")
        return x * len(found + "x")

    import sys

    try:
        return trained(session, change)[0], sys.modules.get("memscale_test_count")
    finally:
        sys.modules.pop("memscale_test_count", None)


@program
def limit_of_the_interpreter_through_pytorch(session: Session) -> Any:
    import sys

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.sys.setrecursionlimit(torch.sys.getrecursionlimit() + 1)
        return x * (torch.sys.getrecursionlimit() % 7)

    before = sys.getrecursionlimit()
    try:
        return trained(session, change)[0], sys.getrecursionlimit()
    finally:
        sys.setrecursionlimit(before)


@program
def state_dict_loaded_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.second.load_state_dict(self.first.state_dict())
        return self.second(x)

    return trained(session, change, second=nn.Linear(16, 16))[0]


@program
def weights_made_anew_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.second.reset_parameters()
        return self.second(x)

    return trained(session, change, second=nn.Linear(16, 16))[0]


@program
def weights_decayed_by_a_foreach(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_([each.detach() for each in self.first.parameters()], 0.9)
        return self.first(x)

    return trained(session, change)[0]


# ---- modules that change themselves


@program
def dropout_put_to_sleep_by_the_forward(session: Session) -> Any:
    """The forward turns it off, and the loop's `train()` turns it on again."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        self.drop.eval()
        return x

    model = session.wrap(around(change, drop=nn.Dropout(0.5)))
    losses = []
    for step in range(NUM_STEPS):
        model.train()
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses, model.drop.training


@program
def dropout_toggled_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        self.drop.train(not self.drop.training)
        return x

    losses, model = trained(session, change, drop=nn.Dropout(0.5))
    return losses, model.drop.training


@program
def list_of_modules_that_turns(session: Session) -> Any:
    """Each forward begins with another block."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.turns.append(self.turns.pop(0))
        return self.turns[0](x)

    turns = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
    losses, model = trained(session, change, turns=turns)
    return losses, on_host(model.turns.parameters())


@program
def list_of_parameters_that_grows(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.detach().mean())
        return x * len(self.seen)

    losses, model = trained(session, change, seen=nn.ParameterList())
    return losses, len(model.seen)


@program
def dictionary_of_parameters_that_turns(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        name, value = self.scales.popitem()
        self.scales.update({name + "x": value})
        return x * len(name)

    scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1))})
    losses, model = trained(session, change, scales=scales)
    return losses, list(model.scales.keys())


@program
def average_over_all_batches(session: Session) -> Any:
    """A batch norm without momentum counts its batches."""
    model = session.wrap(around(lambda self, x: self.norm(x), norm=nn.BatchNorm1d(16, momentum=None)))
    return session.train(model), on_host(model.buffers())


@program
def quantization_that_observes(session: Session) -> Any:
    from torch.ao.quantization import FakeQuantize

    model = session.wrap(around(lambda self, x: self.quant(x), quant=FakeQuantize()))
    return session.train(model), on_host(model.buffers())


@program
def unused_parameters_in_turns(session: Session) -> Any:
    """Which branch runs depends on the batch: some gradients do not come in a step."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.even(x) if int(x.mean().item() * 10) % 2 == 0 else self.odd(x)

    losses, model = trained(session, change, even=nn.Linear(16, 16), odd=nn.Linear(16, 16))
    return losses, [None if p.grad is None else p.grad.cpu() for p in model.parameters()]


@program
def frozen_layers(session: Session) -> Any:
    model = Body()
    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model = session.wrap(model)
    return session.train(model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1))


@program
def complex_numbers_within(session: Session) -> Any:
    return trained(session, lambda self, x: torch.fft.ifft(torch.fft.fft(x) * 1.5).real)[0]


# ---- operators of one's own


_KEPT: list[Any] = []


@functools.cache
def _library() -> Any:
    library = torch.library.Library("memscale_fresh", "DEF")
    library.define("note(Tensor x) -> ()")
    library.define("counted(Tensor x) -> Tensor")
    library.impl("note", _KEPT.append, "CompositeExplicitAutograd")
    library.impl("counted", _counted, "CompositeImplicitAutograd")
    return library


def _counted(x: torch.Tensor) -> torch.Tensor:
    _KEPT.append(1)
    return x * len(_KEPT)


@program
def operator_that_is_a_method_of_a_list(session: Session) -> Any:
    """No Python code of anybody runs when it is called."""
    _library()

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.ops.memscale_fresh.note(x.detach().mean())
        return x

    _KEPT.clear()
    losses = trained(session, change)[0]
    real = [value for value in _KEPT if type(value) is torch.Tensor and value.device == DEVICE]
    return losses, on_host(real[-2:])


@program
def operator_that_counts(session: Session) -> Any:
    _library()

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.memscale_fresh.counted(x)

    _KEPT.clear()
    model = session.wrap(around(change))
    _KEPT.clear()
    return session.train(model), len(_KEPT)


# ---- batches


@dataclasses.dataclass
class _Batch:
    x: torch.Tensor
    count: int = 0


@program
def batch_in_a_class_that_counts(session: Session) -> Any:
    class Model(Body):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch.x * batch.scale)

    class Batch(_Batch):
        @property
        def scale(self) -> int:
            self.count += 1
            return self.count

    model, seen, losses = session.wrap(Model(), sample=(_Scaled(session.x(0)),)), [], []
    for step in range(NUM_STEPS):
        batch = Batch(session.x(step))
        loss = session.forward(step, model, batch)
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
        seen.append(batch.count)
    return losses, seen


class _Scaled:
    scale = 1

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@program
def dictionary_that_makes_what_is_missing(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor, scales: Any) -> torch.Tensor:
            return super().forward(x * scales["scale"])

    model, losses = session.wrap(Model(), sample=(session.x(0), {"scale": 1})), []
    count = itertools.count(1)
    for step in range(NUM_STEPS):
        scales: Any = collections.defaultdict(count.__next__)
        loss = session.forward(step, model, session.x(step), scales)
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def keys_and_values_from_outside(session: Session) -> Any:
    """A cache that the loop made, and that the forward extends."""
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0)
    model = session.wrap(GPT2LMHeadModel(config), sample={"input_ids": torch.ones(2, 8, dtype=torch.long).to(DEVICE)})
    losses, lengths = [], []
    for step in range(NUM_STEPS):
        ids = (torch.arange(16).reshape(2, 8) + step).to(DEVICE)
        cache = DynamicCache()
        loss = session.forward(step, model, input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
        lengths.append(cache.get_seq_length())
    return losses, lengths


@program
def numbers_with_methods_of_their_own(session: Session) -> Any:
    seen: list[int] = []

    class Number(float):
        def __rmul__(self, other: Any) -> Any:
            seen.append(1)
            return other * (1.0 + len(seen))

        __mul__ = __rmul__

    class Model(Body):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return super().forward(scale * x)

    model, losses = session.wrap(Model(), sample=(session.x(0), 1.0)), []
    seen.clear()
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step), Number(2.0))
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses, len(seen)


@program
def batch_that_is_a_part_of_the_next(session: Session) -> Any:
    """One pinned buffer, overwritten right after the forward: the backward must see what the forward saw."""
    model, losses = session.wrap(Hidden()), []
    buffer = session.x(0).clone()
    for step in range(NUM_STEPS):
        buffer.copy_(session.x(step))
        out = session.forward(step, model, buffer.clone())
        loss = out.square().mean()
        buffer.zero_()
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


# ---- the loop, between the forward and the backward


@program
def output_doubled_in_place(session: Session) -> Any:
    model, losses = session.wrap(Hidden()), []
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        out.mul_(2)
        out[:, 0] = 0
        loss = out.square().mean()
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def output_that_is_a_view_changed_in_place(session: Session) -> Any:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x.view(4, -1), x[:2]

    model, losses = session.wrap(Model()), []
    for step in range(NUM_STEPS):
        whole, part = session.forward(step, model, session.x(step))
        part.mul_(2)
        loss = whole.square().mean() + part.mean()
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def output_written_into_another_tensor(session: Session) -> Any:
    model, losses = session.wrap(Hidden()), []
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        room = torch.zeros(2, *out.shape, device=DEVICE)
        room[0] = out
        room[1].copy_(out * 2)
        loss = room.square().mean()
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def loss_added_to_a_running_one(session: Session) -> Any:
    """The sum leads to the graph of each step, which is gone by its backward."""
    model = session.wrap(Body())
    total = torch.zeros((), device=DEVICE)
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        total = total + loss
        session.backward(step, loss)
    return total.detach().cpu(), total.requires_grad


@program
def loss_asked_after_its_backward(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), float(loss.detach()), loss.detach().clone().cpu(), str(loss.shape)))
    return seen


@program
def gradient_kept_of_the_loss(session: Session) -> Any:
    model, seen = session.wrap(Hidden()), []
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        out.retain_grad()
        session.backward(step, out.square().mean())
        seen.append(None if out.grad is None else out.grad.cpu())
    return seen


@program
def gradients_asked_of_an_intermediate(session: Session) -> Any:
    model, seen = session.wrap(Hidden()), []
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        middle = out * 2
        middle.register_hook(lambda gradient: seen.append(gradient.cpu()))
        session.backward(step, middle.square().mean())
    return seen


@program
def hook_between_that_scales_by_a_count(session: Session) -> Any:
    model, seen = session.wrap(Hidden()), []

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return gradient * len(seen)

    for step in range(NUM_STEPS):
        middle = session.forward(step, model, session.x(step)) * 2
        middle.register_hook(scaled)
        session.backward(step, middle.square().mean())
    return len(seen)


class _Counts(torch.autograd.Function):
    num = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.count = _Counts.num
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Counts.num += 1
        return gradient * (2 + ctx.count)


@program
def function_of_the_loop_that_counts(session: Session) -> Any:
    """Its backward ran before the model's failed, and is not run again."""
    _Counts.num = 0
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        out = _Counts.apply(session.forward(step, model, session.x(step)))
        session.backward(step, out.square().mean())
    return _Counts.num


@program
def function_in_a_part_that_counts(session: Session) -> Any:
    _Counts.num = 0
    losses = trained(session, lambda self, x: _Counts.apply(x))[0]
    return losses, _Counts.num


@program
def penalty_of_hidden_weights(session: Session) -> Any:
    """The loss has a term of the weights themselves."""
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        loss = out.square().mean() + sum(p.square().sum() for p in model.parameters()) * 0.01
        session.backward(step, loss)
    return None


@program
def two_roots(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        first, second = out[:4].square().mean(), out[4:].abs().mean()
        with session._failing("backward", step):
            torch.autograd.backward([first, second])
    return None


@program
def roots_with_gradients_of_their_own(session: Session) -> Any:
    model = session.wrap(Hidden())
    for step in range(NUM_STEPS):
        out = session.forward(step, model, session.x(step))
        session.backward(step, out, gradient=torch.full_like(out, 0.5))
    return None


@program
def scaler_of_the_loop(session: Session) -> Any:
    scaler = torch.amp.GradScaler("simgpu", init_scale=2.0**8, growth_interval=2)
    model, losses = session.wrap(Body()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, scaler.state_dict(), [entry["step"].item() for entry in optimizer.state.values()]


class _Frugal(torch.optim.AdamW):
    """Steps every second time, and counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure) if self.calls % 2 else None


@program
def optimizer_of_its_own(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer = _Frugal(model.parameters(), lr=0.1)
    return session.train(model, optimizer=optimizer), optimizer.calls


@program
def optimizer_whose_step_is_replaced(session: Session) -> Any:
    model, calls = session.wrap(Body()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of_class = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step_of_class(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    return session.train(model, optimizer=optimizer), len(calls)


@program
def step_inside_of_a_closure(session: Session) -> Any:
    model, counts = session.wrap(Body()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):

        def closure(step: int = step) -> torch.Tensor:
            counts.append(step)
            optimizer.zero_grad()
            loss = session.forward(step, model, session.x(step))
            session.backward(step, loss)
            return loss

        optimizer.step(closure)
    return counts


@program
def generator_of_batches_that_draws(session: Session) -> Any:
    def batches() -> Any:
        for step in range(NUM_STEPS):
            yield session.x(step) * random.random() + float(np.random.rand()) + torch.rand(()).item()

    random.seed(0)
    np.random.seed(0)
    model = session.wrap(around(lambda self, x: F.dropout(x, 0.5, self.training)))
    random.seed(0)
    np.random.seed(0)
    losses = []
    for step, x in enumerate(batches()):
        loss = session.forward(step, model, x)
        np.random.normal()
        session.backward(step, loss)
        losses.append((loss.item(), random.random(), np.random.normal(), torch.rand(()).item()))
    return losses


@program
def mixed_batches(session: Session) -> Any:
    """Two samples are mixed by a number of NumPy's, as image trainings do; its normal keeps a spare number."""
    np.random.seed(3)
    model = session.wrap(Hidden())
    np.random.seed(3)
    losses = []
    for step in range(NUM_STEPS):
        share = float(np.random.beta(0.4, 0.4)) + float(np.random.normal())
        x = session.x(step)
        out = session.forward(step, model, share * x + (1 - share) * x.flip(0))
        loss = F.mse_loss(out, x) * share
        session.backward(step, loss)
        losses.append(loss.item())
    return losses, np.random.normal()


@program
def counter_that_the_loop_reads_from_the_plan(session: Session) -> Any:
    """The number of forwards that a hook has seen, as progress bars count."""
    model, seen = session.wrap(Body()), []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    losses = session.train(model)
    handle.remove()
    return losses, len(seen)


@program
def pre_hook_that_shifts(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + len(seen),))
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    return session.train(model), len(seen)


@program
def state_dict_taken_in_every_step(session: Session) -> Any:
    model, seen = session.wrap(Body()), []
    model.register_state_dict_post_hook(lambda *_: seen.append(1))
    optimizer = sgd(model)
    states = []
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        states.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
        optimizer.step()
        optimizer.zero_grad()
    return states, len(seen)


@program
def copy_made_in_every_step(session: Session) -> Any:
    model = session.wrap(Body())
    optimizer, copies = sgd(model), []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        copies.append(copy.deepcopy(model))
    return [on_host(each.parameters()) for each in copies]


@program
def parts_trained_with_their_own_optimizers(session: Session) -> Any:
    model = session.wrap(Body())
    first, second = sgd(model.first, momentum=0.9), torch.optim.RMSprop(model.blocks.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return None


# ---- what names lead to


class _Way(enum.Enum):
    """Members have attributes like other objects."""

    UP = 1
    DOWN = 2

    @property
    def scale(self) -> float:
        vars(self)["count"] = vars(self).get("count", 0) + 1
        return float(vars(self)["count"])


@program
def member_of_an_enumeration_that_counts(session: Session) -> Any:
    vars(_Way.UP).pop("count", None)
    model = session.wrap(around(lambda self, x: x * self.way.scale, way=_Way.UP))
    vars(_Way.UP).pop("count", None)
    return session.train(model), vars(_Way.UP).get("count")


@program
def settings_of_settings(session: Session) -> Any:
    inner = types.SimpleNamespace(scale=2.0)
    outer = types.SimpleNamespace(inner=inner)
    return trained(session, lambda self, x: x * self.settings.inner.scale, settings=outer)[0]


@program
def settings_with_a_list(session: Session) -> Any:
    outer = types.SimpleNamespace(scales=[1.0])
    losses = trained(
        session, lambda self, x: x * (self.settings.scales.append(1.0) or len(self.settings.scales)), settings=outer
    )[0]
    return losses, outer.scales


@program
def method_of_a_text(session: Session) -> Any:
    return trained(session, lambda self, x: x * len(self.way.upper().split("_")), way="up_down")[0]


@program
def iterator_made_beside_the_forward(session: Session) -> Any:
    """A tuple holds it, and a loop over the tuple uses it up."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for each in self.turns:
            x = x * sum(each)
        return x

    model = around(change)
    model.turns = (iter([1, 2, 3]),)
    return session.train(session.wrap(model))


@program
def operator_with_a_hidden_list(session: Session) -> Any:
    kept: list[int] = []
    add = operator.methodcaller("append", 1)
    model = session.wrap(around(lambda self, x: x * (1 if add(kept) else len(kept))))
    kept.clear()
    return session.train(model), len(kept)


@program
def bytes_that_are_written_to(session: Session) -> Any:
    room = bytearray(4)

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        room.extend(b"x")
        return x * len(room)

    model = session.wrap(around(change))
    del room[4:]
    return session.train(model), len(room)


@program
def function_of_math_replaced(session: Session) -> Any:
    calls: list[int] = []
    plain = math.sqrt

    def counting(value: float) -> float:
        calls.append(1)
        return plain(value) + len(calls)

    math.sqrt = counting  # type: ignore[assignment]
    try:
        model = session.wrap(around(lambda self, x: x * math.sqrt(2.0)))
        calls.clear()
        return session.train(model), len(calls)
    finally:
        math.sqrt = plain


@program
def method_of_a_list_in_the_place_of_a_function(session: Session) -> Any:
    """A function of PyTorch is a method of somebody's list."""
    kept: list[Any] = []
    plain, torch.typename = torch.typename, kept.append  # type: ignore[assignment]
    try:
        model = session.wrap(around(lambda self, x: x * (2 if torch.typename(1) is None else 1)))
        kept.clear()
        return session.train(model), len(kept)
    finally:
        torch.typename = plain


@program
def function_of_torch_nn_made_by_exec(session: Session) -> Any:
    """Code of the user in the name of PyTorch's own file."""
    exec("kept = []\ndef counted(x):\n    kept.append(1)\n    return x * len(kept)", vars(F))
    try:
        model = session.wrap(around(lambda self, x: F.counted(x)))
        F.kept.clear()  # type: ignore[attr-defined]
        return session.train(model), len(F.kept)  # type: ignore[attr-defined]
    finally:
        del F.kept, F.counted  # type: ignore[attr-defined]


@program
def list_hung_on_pytorch(session: Session) -> Any:
    torch.memscale_kept = []  # type: ignore[attr-defined]
    try:
        model = session.wrap(around(lambda self, x: x * (torch.memscale_kept.append(1) or len(torch.memscale_kept))))
        torch.memscale_kept.clear()  # type: ignore[attr-defined]
        return session.train(model), len(torch.memscale_kept)  # type: ignore[attr-defined]
    finally:
        del torch.memscale_kept  # type: ignore[attr-defined]


@program
def iterator_hung_on_pytorch(session: Session) -> Any:
    F.memscale_turns = itertools.count(1).__next__  # type: ignore[attr-defined]
    try:
        model = session.wrap(around(lambda self, x: x * F.memscale_turns()))
        F.memscale_turns = itertools.count(1).__next__  # type: ignore[attr-defined]
        return session.train(model)
    finally:
        del F.memscale_turns  # type: ignore[attr-defined]


@program
def method_hung_on_linear_layers(session: Session) -> Any:
    nn.Linear.memscale_turns = staticmethod(itertools.count(1).__next__)  # type: ignore[attr-defined]
    try:
        model = session.wrap(around(lambda self, x: x * self.first.memscale_turns()))
        nn.Linear.memscale_turns = staticmethod(itertools.count(1).__next__)  # type: ignore[attr-defined]
        return session.train(model)
    finally:
        del nn.Linear.memscale_turns  # type: ignore[attr-defined]


@program
def method_hung_on_tensors(session: Session) -> Any:
    torch.Tensor.memscale_turns = staticmethod(itertools.count(1).__next__)  # type: ignore[attr-defined]
    try:
        model = session.wrap(around(lambda self, x: x * x.memscale_turns()))
        torch.Tensor.memscale_turns = staticmethod(itertools.count(1).__next__)  # type: ignore[attr-defined]
        return session.train(model)
    finally:
        del torch.Tensor.memscale_turns  # type: ignore[attr-defined]


@program
def random_numbers_of_a_generator_of_pytorch(session: Session) -> Any:
    """A generator that hangs on PyTorch's own module."""
    torch.random.memscale_generator = torch.Generator().manual_seed(1)  # type: ignore[attr-defined]
    try:

        def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand((), generator=torch.random.memscale_generator).item()  # type: ignore[attr-defined]

        model = session.wrap(around(change))
        torch.random.memscale_generator.manual_seed(1)  # type: ignore[attr-defined]
        return session.train(model)
    finally:
        del torch.random.memscale_generator  # type: ignore[attr-defined]


@program
def draws_in_the_forward_and_in_the_loop(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(()).item() + torch.randn(16, device=x.device)

    model, losses = session.wrap(around(change)), []
    torch.manual_seed(4)
    for step in range(NUM_STEPS):
        x = session.x(step)
        torch.manual_seed(40 + step)
        loss = session.forward(step, model, x)
        between = torch.rand(2)
        session.backward(step, loss)
        losses.append((loss.item(), between, torch.rand(2), torch.randn(2, device=DEVICE).cpu()))
    return losses


@program
def seed_that_is_asked_for(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.initial_seed() % 5 + 1)

    return trained(session, change)[0]


@program
def new_seed_in_every_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(torch.initial_seed() + 1)
        return F.dropout(x, 0.5)

    return trained(session, change)[0], torch.initial_seed()


@contextlib.contextmanager
def _nothing() -> Any:
    yield


@program
def context_around_the_forward(session: Session) -> Any:
    model, losses = session.wrap(Body()), []
    for step in range(NUM_STEPS):
        with _nothing(), torch.autograd.set_detect_anomaly(False):
            loss = session.forward(step, model, session.x(step))
            session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses
