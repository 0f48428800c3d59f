"""A fourth round of odd programs: what is odd in them shows in gradients alone, never in what the model returns.

Many models have such gates: the second factor of LoRA, the zero convolutions of a ControlNet, scales of residual
branches are zero at first. That the outputs of a repeated forward are the same bits says nothing of what lies behind
such a gate. So each rule has to hold by itself here.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests._planning.recovery.loop_programs import Body
from tests._planning.recovery.sessions import NUM_STEPS, Session
from tests.techniques.offload.runs import DEVICE

PROGRAMS: dict[str, Callable[[Session], Any]] = {}


def program(run: Callable[[Session], Any]) -> Callable[[Session], Any]:
    PROGRAMS[run.__name__] = run
    return run


class Gated(Body):
    """What `change` gives is multiplied by zero: the gradient of the gate tells what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))


def gated(change: Callable[..., torch.Tensor], **attributes: Any) -> nn.Module:
    class Model(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x + self.gate * change(self, x)
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    return _with(Model(), attributes)


class Controlled(Gated):
    """It is given something more, which has no effect at first."""

    def forward(self, x: torch.Tensor, control: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.gate * control.to(x.device)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _with(model: nn.Module, attributes: dict[str, Any]) -> nn.Module:
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def trained(session: Session, change: Callable[..., torch.Tensor], **attributes: Any) -> Any:
    return session.train(session.wrap(gated(change, **attributes)))


def stepped(session: Session, model: nn.Module, between: Callable[[], None], after: Callable[[], None]) -> Any:
    """A loop that does something between the forward and the backward, and takes it back."""
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        between()
        session.backward(step, loss)
        after()
        losses.append(loss.detach().cpu())
    return losses


def on_host(values: Any) -> list[torch.Tensor]:
    return [value.detach().cpu().clone() for value in values]


# ---- what code that is taken for plain may lead to


def _texts() -> Iterator[str]:
    return iter(["x" * number for number in range(1, 10_000)])


@program
def text_of_a_part_by_a_method_of_c(session: Session) -> Any:
    """A special method that is no function: nobody sees it run."""
    is_on = types.SimpleNamespace(is_on=False)

    class Part(nn.Identity):
        __repr__ = _texts().__next__  # type: ignore[assignment]

    class Model(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x + self.gate * len(f"{self.part!r}") if is_on.is_on else x + self.gate
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    model = session.wrap(Model())
    is_on.is_on = True
    return session.train(model)


@program
def text_of_settings_by_a_method_of_c(session: Session) -> Any:
    class Settings:
        scale = 1.0
        __str__ = functools.partial(next, _texts())

    return trained(session, lambda self, x: x * len(f"{self.settings}"), settings=Settings())


@program
def hash_by_a_method_of_c(session: Session) -> Any:
    class Settings:
        __hash__ = itertools.count(1).__next__  # type: ignore[assignment]

    return trained(session, lambda self, x: x * ({self.settings: 1} != {}), settings=Settings())


@program
def switch_of_a_class_of_pytorch(session: Session) -> Any:
    """A method of a class of PyTorch that changes the class."""

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        is_on = torch.distributions.Distribution._validate_args
        torch.distributions.Distribution.set_default_validate_args(not is_on)
        return x * (2 if is_on else 1)

    before = torch.distributions.Distribution._validate_args
    try:
        return trained(session, change)
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@program
def device_of_checkpoints_as_a_memory(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kinds = torch.utils.checkpoint.DefaultDeviceType
        name = kinds.get_device_type()
        kinds.set_device_type("cpu" if name == "simgpu" else "simgpu")
        return x * len(name)

    kinds = torch.utils.checkpoint.DefaultDeviceType
    before = kinds.get_device_type()
    try:
        return trained(session, change)
    finally:
        kinds.set_device_type(before)


@program
def count_under_a_decorator_of_pytorch(session: Session) -> Any:
    """The function around it is PyTorch's own; what it calls is an iterator's."""
    bump = torch.no_grad()(itertools.count(1).__next__)
    return trained(session, lambda self, x: x * bump())


@program
def count_under_a_decorator_of_the_library(session: Session) -> Any:
    class Model(Gated):
        bump = staticmethod(functools.wraps(len)(torch.compiler.disable(itertools.count(1).__next__)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x + self.gate * self.bump()
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    return session.train(session.wrap(Model()))


@program
def function_of_kinds_that_counts(session: Session) -> Any:
    @functools.singledispatch
    def scale(x: Any) -> float:
        return 1.0

    counts = iter(range(1, 1000))
    scale.register(torch.Tensor)(lambda x: float(next(counts)))
    return trained(session, lambda self, x: x * scale(x))


@program
def dropout_made_anew_by_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.drop.__init__(self.drop.p * 0.75)
        return self.drop(x)

    return trained(session, change, drop=nn.Dropout(0.8))


@program
def attribute_set_through_the_base_class(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.nn.Module.__setattr__(self, "count", self.count + 1)
        return x * self.count

    return trained(session, change, count=0)


@program
def attribute_of_a_part_set_through_its_class(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.nn.Dropout.__setattr__(self.drop, "p", self.drop.p * 0.75)
        return self.drop(x)

    return trained(session, change, drop=nn.Dropout(0.8))


@program
def autocast_entered_and_never_left(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        is_on = torch.is_autocast_enabled("simgpu")
        torch.set_autocast_enabled("simgpu", not is_on)
        return x * (2 if is_on else 1)

    try:
        return trained(session, change)
    finally:
        torch.set_autocast_enabled("simgpu", False)


@program
def bound_operator_of_a_hidden_tensor(session: Session) -> Any:
    count = torch.zeros(())
    return trained(session, lambda self, x: x * self.bump(1).item(), bump=count.add_)


@program
def bound_draw_of_a_generator(session: Session) -> Any:
    generator = torch.Generator()
    generator.manual_seed(5)

    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand((), generator=self.generator).item()

    return trained(session, change, generator=generator)


@program
def graph_of_operators(session: Session) -> Any:
    part = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16), nn.GELU()))
    return trained(session, lambda self, x: self.part(x), part=part)


@program
def compiled_part(session: Session) -> Any:
    part = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), backend="eager")
    return trained(session, lambda self, x: self.part(x), part=part)


@program
def compiled_function(session: Session) -> Any:
    counts = itertools.count(1)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    part = torch.compile(scaled, backend="eager")
    model = session.wrap(gated(lambda self, x: part(x)))
    return session.train(model), next(counts)


# ---- what a forward keeps


@program
def list_that_a_forward_extends(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.shape[0]))
        return x * len(self.seen)

    return trained(session, change, seen=[])


@program
def batches_drawn_inside_of_the_forward(session: Session) -> Any:
    loader = iter(torch.utils.data.DataLoader(torch.arange(64.0), batch_size=4))
    return trained(session, lambda self, x: x * next(self.loader).sum().item(), loader=loader)


@program
def metric_in_a_buffer(session: Session) -> Any:
    model = gated(lambda self, x: x * self.total.add_(x.detach().abs().mean()))
    model.register_buffer("total", torch.zeros(()))
    model = session.wrap(model)
    return session.train(model), model.total.cpu()


@program
def average_of_activations(session: Session) -> Any:
    """Codebooks that follow what they are given are trained like this."""
    model = gated(lambda self, x: x * self.mean.lerp_(x.detach().mean(0), 0.1).clone())
    model.register_buffer("mean", torch.ones(16))
    model = session.wrap(model)
    return session.train(model), model.mean.cpu()


@program
def teacher_inside_of_the_model(session: Session) -> Any:
    """Its weights follow the student's in every forward."""

    class Model(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.first).requires_grad_(False)

        @torch.no_grad()
        def follow(self) -> None:
            for mine, its in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.follow()
            y = self.first(x)
            y = y + self.gate * self.teacher(x)
            for block in self.blocks:
                y = y + block(y)
            return y.square().mean()

    return session.train(session.wrap(Model()))


@program
def spectral_norm_behind_the_gate(session: Session) -> Any:
    part = parametrizations.spectral_norm(nn.Linear(16, 16))
    model = session.wrap(gated(lambda self, x: self.part(x), part=part))
    return session.train(model), on_host(model.buffers())


@program
def weight_norm_behind_the_gate(session: Session) -> Any:
    return trained(session, lambda self, x: self.part(x), part=parametrizations.weight_norm(nn.Linear(16, 16)))


@program
def parametrization_that_counts(session: Session) -> Any:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return weight * (1 + self.count / 100)

    part = nn.Linear(16, 16)
    parametrize.register_parametrization(part, "weight", Scaled())
    return trained(session, lambda self, x: self.part(x), part=part)


@program
def statistics_of_a_batch_norm(session: Session) -> Any:
    norm = nn.BatchNorm1d(16, momentum=None)
    model = session.wrap(gated(lambda self, x: self.norm(x) + self.norm.running_mean, norm=norm))
    return session.train(model), on_host(model.buffers())


@program
def noise_of_every_kind(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x) + torch.rand(16).to(x.device) + torch.randn(16, device=x.device)
        return F.rrelu(x, training=True) + torch.bernoulli(torch.full_like(x, 0.5))

    return trained(session, change, drop=nn.Dropout(0.3))


@program
def calls_itself(session: Session) -> Any:
    """Its own answer of a first run is what a second one is given."""

    class Model(Gated):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            y = self.first(x)
            if depth:
                y = y + self.gate * self(x, depth - 1)
            for block in self.blocks:
                y = y + block(y)
            return y if not depth else y.square().mean()

    return session.train(session.wrap(Model()))


@program
def calls_itself_without_gradients(session: Session) -> Any:
    class Model(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.2)

        @torch.no_grad()
        def guessed(self, x: torch.Tensor) -> torch.Tensor:
            return self(x, 0)

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            y = self.drop(self.first(x))
            if depth:
                y = y + self.gate * self.guessed(x)
            for block in self.blocks:
                y = y + block(y)
            return y if not depth else y.square().mean()

    return session.train(session.wrap(Model()))


@program
def random_depth(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for each in range(4):
            if torch.rand(()) < 0.5:
                x = self.part(x) + each
        return x

    return trained(session, change, part=nn.Linear(16, 16))


@program
def checkpointed_part_behind_the_gate(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=False)

    return trained(session, change, part=nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()))


# ---- what a loop does around it


@program
def default_type_around_the_forward(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: x + (torch.full((16,), 1 / 3) * 3 - 1 + 1e-9).to(x) * 1e9))
    losses = []
    for step in range(NUM_STEPS):
        x = session.x(step)
        torch.set_default_dtype(torch.float64)
        try:
            loss = session.forward(step, model, x)
        finally:
            torch.set_default_dtype(torch.float32)
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def default_device_around_the_forward(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: x * torch.rand(())))
    losses = []
    for step in range(NUM_STEPS):
        x = session.x(step)
        with torch.device(DEVICE):
            loss = session.forward(step, model, x)
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses, torch.rand(2)


@program
def default_device_around_the_backward(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: x * torch.rand(())))
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with torch.device(DEVICE):
            session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses, torch.rand(2)


@program
def attention_chosen_around_the_forward(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None] * 1e3)[0, 0]

    model = session.wrap(gated(change))
    losses = []
    for step in range(NUM_STEPS):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = session.forward(step, model, session.x(step))
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def setting_of_pytorch_that_the_forward_reads(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * (3 if torch.are_deterministic_algorithms_enabled() else 2)

    model = session.wrap(gated(change))
    return stepped(
        session,
        model,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.use_deterministic_algorithms(False),
    )


@program
def precision_that_the_forward_reads(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * len(torch.get_float32_matmul_precision())

    model = session.wrap(gated(change))
    set_to = torch.set_float32_matmul_precision
    try:
        return stepped(session, model, lambda: set_to("high"), lambda: set_to("highest"))
    finally:
        set_to("highest")


@program
def number_of_threads_that_the_forward_reads(session: Session) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = session.wrap(gated(lambda self, x: x * torch.get_num_threads()))
    try:
        return stepped(session, model, lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1))
    finally:
        torch.set_num_threads(before)


@program
def autocast_that_the_forward_reads(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: x * (3 if torch.is_autocast_enabled("simgpu") else 2)))
    losses = []
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        with torch.autocast("simgpu", torch.bfloat16):
            session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def host_batch_that_is_filled_again(session: Session) -> Any:
    """The loader's array, of which the tensor knows nothing, is filled with the next batch already."""

    array = np.ones((8, 16), dtype=np.float32)
    control = torch.from_numpy(array)
    model = session.wrap(Controlled(), sample=(session.x(0), control))
    losses = []
    for step in range(NUM_STEPS):
        array[:] = step + 1
        loss = session.forward(step, model, session.x(step), control)
        array[:] = step + 2
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def host_batch_seen_by_numpy(session: Session) -> Any:
    control = torch.ones(8, 16)
    model = session.wrap(Controlled(), sample=(session.x(0), control))
    losses = []
    for step in range(NUM_STEPS):
        control.numpy()[:] = step + 1
        loss = session.forward(step, model, session.x(step), control)
        control.numpy()[:] = step + 2
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def host_batch_of_another_process(session: Session) -> Any:
    control = torch.ones(8, 16).share_memory_()
    alias = torch.empty(0).set_(control.untyped_storage(), 0, (8, 16))
    model = session.wrap(Controlled(), sample=(session.x(0), control))
    losses = []
    for step in range(NUM_STEPS):
        alias.fill_(step + 1)
        loss = session.forward(step, model, session.x(step), control)
        alias.fill_(step + 2)
        session.backward(step, loss)
        losses.append(loss.detach().cpu())
    return losses


@program
def output_written_past_autograd(session: Session) -> Any:
    """A sigmoid has saved what it gave, and its backward uses what the loop has made of it."""

    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x.sigmoid()

    model = session.wrap(Model())
    losses = []
    for step in range(NUM_STEPS):
        output = session.forward(step, model, session.x(step))
        output.data.mul_(0.5)
        session.backward(step, output.sum())
        losses.append(output.detach().cpu())
    return losses


@program
def weights_behind_the_gate_moved_between(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))

    def move() -> None:
        with torch.no_grad():
            model.part.bias.mul_(0.5)  # the weight is needed in backward, where PyTorch refuses it by itself

    return stepped(session, model, move, lambda: None)


@program
def fused_step_between(session: Session) -> Any:
    """Its kernel gives what it writes to no new version."""
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    optimizer = torch.optim.AdamW(model.part.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    for value in model.part.parameters():
        value.grad = torch.zeros_like(value)
    return stepped(session, model, optimizer.step, lambda: None)


@program
def averages_swapped_in_between_and_out_again(session: Session) -> Any:
    """For an evaluation; what is computed then is the same as without."""
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    shadow = [value.detach().clone() * 0.5 for value in model.parameters()]

    def swapped() -> None:
        for value, other in zip(model.parameters(), shadow, strict=True):
            value.data, other.data = other.data, value.data

    def evaluated() -> None:
        swapped()
        swapped()

    return stepped(session, model, evaluated, lambda: None)


@program
def averages_swapped_in_between(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    shadow = [value.detach().clone() * 0.5 for value in model.part.parameters()]

    def swapped() -> None:
        for value, other in zip(model.part.parameters(), shadow, strict=True):
            value.data, other.data = other.data, value.data

    return stepped(session, model, swapped, swapped)


@program
def called_with_leaves_of_its_own(session: Session) -> Any:
    """`functional_call` with copies as parameters, which get the gradients."""
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    given = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    for step in range(NUM_STEPS):
        x = session.x(step)
        loss = session.forward(step, lambda x=x: torch.func.functional_call(model, given, (x,)))
        session.backward(step, loss)
    return on_host(value.grad for value in given.values())


@program
def micro_batches_and_averages(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    optimizer = torch.optim.AdamW([value for name, value in model.named_parameters() if name != "gate"], lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model.part))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for step in range(NUM_STEPS):
        session.backward(step, session.forward(step, model, session.x(step)) / 2)
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(model.part)
            optimizer.zero_grad()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return on_host(average.parameters()), on_host(state), schedule.get_last_lr()


@program
def hooks_of_an_optimizer(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(float(model.gate.grad.norm())))
    optimizer.register_step_post_hook(lambda *_: norms.append(float(model.gate.detach().norm())))
    return session.train(model, optimizer=optimizer), norms


@program
def tied_weights_that_come_in_part(session: Session) -> Any:
    class Model(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 16, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            x = self.last(x)
            x = x + self.gate * self.first(x)
            return x.square().mean()

    return session.train(session.wrap(Model()))


@program
def random_numbers_between(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.drop(x), drop=nn.Dropout(0.5)))
    drawn: list[float] = []

    def draw() -> None:
        drawn.extend(
            (random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand((), device=DEVICE)))
        )

    return stepped(session, model, draw, draw), drawn


@program
def mode_of_a_part_changed_between(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.drop(x), drop=nn.Dropout(0.5)))
    return stepped(session, model, lambda: model.drop.eval() and None, lambda: model.drop.train() and None)


@program
def hook_on_the_gate(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    model.gate.register_hook(lambda gradient: gradient * 2)
    return session.train(model)


@program
def hook_on_what_is_behind_the_gate(session: Session) -> Any:
    def change(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x)
        y.register_hook(torch.neg)
        return y

    return trained(session, change, part=nn.Linear(16, 16))


@program
def gradient_kept_of_what_is_behind_the_gate(session: Session) -> Any:
    class Model(Gated):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first(x)
            hidden = self.blocks[0](x)
            y = x + self.gate * hidden
            for block in self.blocks:
                y = y + block(y)
            return y.square().mean(), hidden

    model, kept = session.wrap(Model()), []
    for step in range(NUM_STEPS):
        loss, hidden = session.forward(step, model, session.x(step))
        hidden.retain_grad()
        session.backward(step, loss)
        kept.append(hidden.grad.cpu())
    return kept


@program
def loss_kept_with_its_graph(session: Session) -> Any:
    model = session.wrap(gated(lambda self, x: self.part(x), part=nn.Linear(16, 16)))
    for step in range(NUM_STEPS):
        loss = session.forward(step, model, session.x(step))
        session.backward(step, loss, retain_graph=True)
        session.backward(step, loss * 2)
    return None


@program
def hidden_modules_in_a_tuple(session: Session) -> Any:
    hidden = nn.Linear(16, 16).to(DEVICE)
    return trained(session, lambda self, x: self.parts[0](x), parts=(hidden,)), on_host([hidden.weight.grad])


# ---- libraries


def _lora(session: Session, rank: int = 2) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    class Model(Body):
        pass

    found = get_peft_model(Model(), LoraConfig(r=rank, target_modules=["first"], lora_dropout=0.2))
    return session.wrap(found)


@program
def low_rank_parts_at_first(session: Session) -> Any:
    model = _lora(session)
    return session.train(model)


@program
def scale_of_low_rank_parts_changed_between(session: Session) -> Any:
    model = _lora(session)
    first = model.base_model.model.first

    def set_to(scale: float) -> None:
        first.scaling["default"] = scale

    return stepped(session, model, lambda: set_to(3.0), lambda: set_to(4.0))


@program
def other_low_rank_parts_between(session: Session) -> Any:
    from peft import LoraConfig

    model = _lora(session)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["first"]))

    def switch(name: str) -> None:
        model.set_adapter(name)
        for key, value in model.named_parameters():
            value.requires_grad_("lora" in key)

    switch("default")
    return stepped(session, model, lambda: switch("other"), lambda: switch("default"))


def _gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **options))


def _text(step: int) -> torch.Tensor:
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def _read(session: Session, model: Any, **options: Any) -> Any:
    """Trains a model of text."""
    losses = []
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        output = session.forward(step, model, input_ids=_text(step), labels=_text(step), **options)
        session.backward(step, output.loss)
        losses.append(output.loss.detach().cpu())
    return losses


@program
def gpt2_with_a_registered_attention(session: Session) -> Any:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    count = [0]

    def counting(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        count[0] += 1
        return sdpa_attention_forward(module, query, key, value * count[0], mask, **options)

    AttentionInterface.register("counting", counting)
    model = session.wrap(_gpt2(attn_implementation="counting"), sample={"input_ids": _text(0), "labels": _text(0)})
    return _read(session, model)


@program
def gpt2_whose_checkpoints_run_backwards(session: Session) -> Any:
    model = _gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model = session.wrap(model, sample={"input_ids": _text(0), "labels": _text(0)})
    return _read(session, model, use_cache=False)
