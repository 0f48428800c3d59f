"""fp16: true gradients whatever a model hands out, whatever feeds it, and whoever listens."""

from __future__ import annotations

import collections
import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import GPT2Config, GPT2LMHeadModel

from memscale._plan import MixedPrecision
from memscale.techniques.precision import autocast as precision
from memscale.techniques.precision.loss_scale import LossScale

pytestmark = pytest.mark.unit
WIDTH = 16
Loss = Callable[[nn.Module], torch.Tensor]


@contextlib.contextmanager
def in_fp16(model: nn.Module, scale: LossScale | None = None, dtype: str = "float16") -> Iterator[Any]:
    with contextlib.ExitStack() as undo:
        yield precision.attach(MixedPrecision(dtype), model, "cpu", undo, scale=scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.give(hidden, self.second(hidden))

    def give(self, hidden: torch.Tensor, output: torch.Tensor) -> Any:
        return output


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().square().mean()


def assert_true_gradients(model: nn.Module, loss: Loss, others: tuple[nn.Module, ...] = ()) -> None:
    parameters = [p for module in (model, *others) for p in module.parameters()]
    gradients = []
    for context in (contextlib.nullcontext(), in_fp16(model)):
        for parameter in parameters:
            parameter.grad = None
        with context:
            loss(model).backward()
        gradients.append([p.grad for p in parameters])
    for exact, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0.02, atol=5e-3 * float(exact.abs().max()))


# ---- what a model hands out


class Mapping(dict[str, Any]):
    pass


class Plain:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


HANDED_OUT: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "namespace": (lambda h: types.SimpleNamespace(hidden=h), lambda found: found.hidden),
    "dict of its own class": (lambda h: Mapping(hidden=h), lambda found: found["hidden"]),
    "user dict": (lambda h: collections.UserDict(hidden=h), lambda found: found["hidden"]),
    "object in an object": (lambda h: Plain(Plain(h)), lambda found: found.hidden.hidden),  # type: ignore[arg-type]
    "distribution": (lambda h: torch.distributions.Normal(h, 1.0), lambda found: found.mean),
    "list in a dict": (lambda h: {"hidden": [(h,)]}, lambda found: found["hidden"][0][0]),
}
handed_out = pytest.mark.parametrize("name", list(HANDED_OUT))


@handed_out
def test_a_loss_on_what_lies_in_an_object_of_the_result(name: str) -> None:
    make, take = HANDED_OUT[name]

    class Gives(Net):
        def give(self, hidden: torch.Tensor, output: torch.Tensor) -> Any:
            return output, make(hidden)

    def loss(model: nn.Module) -> torch.Tensor:
        output, found = model(batch())
        return square(output) + 10 * square(take(found))

    assert_true_gradients(Gives(), loss)


@handed_out
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_objects_in_the_result_are_widened(name: str, dtype: str) -> None:
    make, take = HANDED_OUT[name]

    class Gives(Net):
        def give(self, hidden: torch.Tensor, output: torch.Tensor) -> Any:
            return make(hidden)

    model = Gives()
    with in_fp16(model, dtype=dtype):
        assert take(model(batch())).dtype == torch.float32
        with torch.no_grad():
            assert take(model(batch())).dtype == torch.float32


@handed_out
def test_a_loss_on_what_lies_in_an_object_on_a_module(name: str) -> None:
    make, take = HANDED_OUT[name]

    class Leaves(Net):
        left: Any = None

        def give(self, hidden: torch.Tensor, output: torch.Tensor) -> Any:
            self.left = make(hidden)
            return output

    assert_true_gradients(Leaves(), lambda model: square(model(batch())) + 10 * square(take(model.left)))


def test_modules_go_on_sharing_a_list() -> None:
    class Shares(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []
            self.second.seen = self.seen  # type: ignore[assignment]

        def give(self, hidden: torch.Tensor, output: torch.Tensor) -> Any:
            self.seen[:] = [hidden]
            return output

    model = Shares()
    with in_fp16(model):
        model(batch())
    assert model.seen is model.second.seen  # type: ignore[comparison-overlap]


def test_an_object_that_holds_itself() -> None:
    class Circle(Net):
        def give(self, hidden: torch.Tensor, output: torch.Tensor) -> Any:
            found = Plain(hidden)
            found.itself = found  # type: ignore[attr-defined]
            return output, found

    def loss(model: nn.Module) -> torch.Tensor:
        output, found = model(batch())
        return square(output) + square(found.itself.hidden)

    assert_true_gradients(Circle(), loss)


# ---- what feeds a model


def test_what_was_computed_before_and_came_in_by_a_side_door() -> None:
    """The encoder's output has a loss of its own, which must not be divided by a scale it never met."""

    class Takes(Net):
        side: Any = None

        def forward(self, x: Any) -> Any:
            return super().forward(x.hidden + self.side)

    encoder = nn.Linear(WIDTH, WIDTH)

    def loss(model: nn.Module) -> torch.Tensor:
        encoded, aside = encoder(batch()), encoder(2 * batch())
        model.side = aside
        return square(model(Plain(encoded))) + square(encoded) + square(aside)

    assert_true_gradients(Takes(), loss, (encoder,))


def test_weights_that_are_computed_outside() -> None:
    model = Net()
    parameters = dict(model.named_parameters())

    def loss(model: nn.Module) -> torch.Tensor:
        fast = {name: 0.9 * value for name, value in parameters.items()}
        output = torch.func.functional_call(model, fast, (batch(),))
        return square(output) + sum(value.square().sum() for value in fast.values())

    assert_true_gradients(model, loss)


def test_a_weight_that_is_computed_once_for_two_forwards() -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).T

    model = Net()
    parametrize.register_parametrization(model.first, "weight", Symmetric())

    def loss(model: nn.Module) -> torch.Tensor:
        with parametrize.cached():
            return square(model(batch())) + square(model(2 * batch()))

    assert_true_gradients(model, loss)


@pytest.mark.parametrize("changes", [False, True])
def test_a_key_value_cache_that_goes_from_call_to_call(changes: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, **options
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 50, (2, 16))

    def loss(model: nn.Module) -> torch.Tensor:
        first = model(ids[:, :8], labels=ids[:, :8], use_cache=True)
        if changes and scales:
            scales[0].value /= 4
        second = model(ids[:, 8:], labels=ids[:, 8:], past_key_values=first.past_key_values, use_cache=True)
        return first.loss + second.loss

    scales: list[LossScale] = []
    model.zero_grad()
    loss(model).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    scales.append(LossScale())
    with in_fp16(model, scales[0]):
        loss(model).backward()
    for name, parameter in model.named_parameters():
        atol = 0.01 * float(exact[name].abs().max())
        torch.testing.assert_close(parameter.grad, exact[name], rtol=0.05, atol=atol, msg=name)


# ---- who listens


def add_pre_hook(model: Net, seen: list[torch.Tensor]) -> Any:
    return model.second.register_forward_pre_hook(lambda module, args: seen.append(args[0]))


def add_global_hook(model: Net, seen: list[torch.Tensor]) -> Any:
    def capture(module: nn.Module, args: Any, output: Any) -> None:
        if module is model.first:
            seen.append(torch.tanh(output))

    return nn.modules.module.register_module_forward_hook(capture)


@pytest.mark.parametrize("add", [add_pre_hook, add_global_hook])
def test_hooks_that_capture_switch_scaling_off_with_a_warning(add: Any) -> None:
    seen: list[torch.Tensor] = []
    model = Net()
    handle = add(model, seen)
    try:
        with pytest.warns(UserWarning, match="has a forward hook"):
            assert_true_gradients(model, lambda model: square(model(batch())) + 10 * square(seen.pop()))
    finally:
        handle.remove()


@pytest.mark.parametrize("inner", [True, False])
def test_backward_hooks_see_true_gradients(inner: bool) -> None:
    model, seen = Net(), []
    module = model.second if inner else model
    module.register_full_backward_hook(lambda module, into, out: seen.append((into[0], out[0])))
    x = batch().requires_grad_()
    square(model(x)).backward()
    with in_fp16(model), pytest.warns(UserWarning, match="has a backward hook"):
        square(model(x)).backward()
    for exact, ours in zip(*seen, strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=0.02, atol=1e-4)


def test_well_known_hooks_are_no_reason_to_warn() -> None:
    """transformers collects hidden states by hooks, and gives them in the result only."""
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    model, scale = GPT2LMHeadModel(config), LossScale()
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(ids, output_hidden_states=True)
    with in_fp16(model, scale), warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(ids, output_hidden_states=True)
        assert output.hidden_states[1].grad_fn.name() == "ScaleGradientBackward"


def test_functional_derivatives_are_true_and_unscaled_with_a_warning() -> None:
    model = Net()
    values = {name: p.detach() for name, p in model.named_parameters()}
    derive = torch.func.grad(lambda values: square(torch.func.functional_call(model, values, (batch(),))))
    exact = derive(values)
    with in_fp16(model), pytest.warns(UserWarning, match=r"torch\.func"):
        ours = derive(values)
    for name in exact:
        torch.testing.assert_close(ours[name], exact[name], rtol=0.02, atol=1e-3)


# ---- overflows beyond the model


def overflow(output: torch.Tensor) -> torch.Tensor:
    return square(output) * 1e30


@pytest.mark.parametrize("frozen", [False, True])
def test_an_overflow_does_not_reach_the_parameters_of_what_feeds_the_model(frozen: bool) -> None:
    """A generator before a wrapped discriminator; a prompt before a frozen model."""
    model, scale = Net(), LossScale()
    model.requires_grad_(not frozen)
    feeder = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(feeder.parameters(), lr=0.1)
    before = feeder.weight.detach().clone()
    with in_fp16(model, scale):
        for bad in (True, False):
            optimizer.zero_grad()
            output = model(feeder(batch()))
            (overflow(output) if bad else square(output)).backward()
            optimizer.step()
            assert torch.equal(feeder.weight, before) == bad
    assert (scale.value, scale.num_skipped_steps, scale.good_steps) == (2.0**15, 1, 1)


def test_after_an_overflow_other_trainings_of_the_same_parameters_go_on() -> None:
    """Steps whose backward did not come through the model are not those that overflowed."""
    model, scale = Net(), LossScale()
    feeder = nn.Linear(WIDTH, WIDTH)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, feeder)]
    with in_fp16(model, scale):
        overflow(model(feeder(batch()))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        before = [model.first.weight.detach().clone(), feeder.weight.detach().clone()]
        square(model.first(feeder(batch()))).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(model.first.weight, before[0])
    assert not torch.equal(feeder.weight, before[1])


def test_gradients_that_overflowed_before_a_step_that_raised_do_not_come_back() -> None:
    model, scale = Net(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failing = optimizer.register_step_pre_hook(_fail)
    with in_fp16(model, scale):
        overflow(model(batch())).backward()
        with pytest.raises(RuntimeError, match="the user's own hook"):
            optimizer.step()
        failing.remove()
        optimizer.zero_grad()
        square(model.first(batch())).backward()
        optimizer.step()
    assert model.second.weight.grad is None
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.isfinite().all()


def _fail(optimizer: Any, args: Any, kwargs: Any) -> None:
    raise RuntimeError("the user's own hook")


def test_a_user_who_drops_bad_gradients_himself_gets_on() -> None:
    model, scale, num_steps = Net(), LossScale(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with in_fp16(model, scale):
        for _ in range(16):
            optimizer.zero_grad()
            (square(model(batch())) * 1e4).backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
                num_steps += 1
    assert num_steps > 3
    assert scale.num_skipped_steps == 16 - num_steps


def test_gradients_of_a_skipped_step_that_nobody_zeroes_are_not_used_later() -> None:
    model, scale = Net(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with in_fp16(model, scale):
        for loss in (overflow, square, square):
            loss(model(batch())).backward()
            optimizer.step()
        assert scale.num_skipped_steps == 3
        optimizer.zero_grad()
        before = model.first.weight.detach().clone()
        square(model(batch())).backward()
        optimizer.step()
    assert not torch.equal(model.first.weight, before)
    assert model.first.weight.isfinite().all()


def test_a_scaler_that_is_switched_off_is_nobody() -> None:
    model, scale = Net(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with in_fp16(model, scale):
        for n in range(3):
            output = model(batch())
            scaler.scale(overflow(output) if n == 1 else square(output)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scale.is_ours()
    assert (scale.num_skipped_steps, scale.good_steps) == (1, 1)


class Delegating:
    """An optimizer behind many layers of somebody's framework."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, num_more_callers: int = 30) -> Any:
        return self.step(num_more_callers - 1) if num_more_callers else self.optimizer.step()


def test_a_scaler_is_in_charge_through_any_number_of_callers() -> None:
    model, scale = Net(), LossScale()
    optimizer: Any = Delegating(torch.optim.SGD(model.parameters(), lr=1e-3))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with in_fp16(model, scale):
        for _ in range(2):
            scaler.scale(square(model(batch()))).backward()
            scaler.step(optimizer)
            scaler.update()
            assert not scale.is_ours()
    assert scale.good_steps == 0


class Trainer(torch.amp.GradScaler):
    """A scaler with a method in which it does not scale."""

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        square(model(batch())).backward()
        optimizer.step()


def test_a_scaler_that_does_not_step_is_not_in_charge() -> None:
    model, scale = Net(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with in_fp16(model, scale):
        Trainer("cpu").train(model, optimizer)
        assert scale.is_ours()
        Trainer("cpu").train(model, optimizer)
    assert scale.good_steps == 1


# ---- compiled models


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_compiled_model_computes_in_16_bits(dtype: str) -> None:
    def train(model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
        with in_fp16(model, dtype=dtype):
            loss = square(call(batch()))
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain, model = Net(), Net()
    try:
        ours = train(model, torch.compile(model, backend="eager"))
    finally:
        torch._dynamo.reset()
    for mine, theirs in zip(ours, train(plain, plain), strict=True):
        assert torch.equal(mine, theirs)


# ---- interrupts


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_interrupt_in_a_forward_leaves_no_autocast(dtype: str) -> None:
    class Slow(Net):
        interrupts = 1

        def forward(self, x: torch.Tensor) -> Any:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return super().forward(x)

    model = Slow()
    with in_fp16(model, dtype=dtype):
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        assert not torch.is_autocast_enabled("cpu")
        assert model(batch()).dtype == torch.float32
