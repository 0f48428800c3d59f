"""Tiled MLPs: the same training, dropout included, one gradient a parameter; and the bytes that it saves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import case
from benchmarks.real_step import RealRehearsal
from memscale._errors import PlanError
from memscale._plan import TileMlp
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch.live_bytes import LiveBytes
from memscale.techniques.tiling.common import TilingError
from tests.techniques.tiling.models import (
    GRADIENT_BOUND,
    LOSS_BOUND,
    Attached,
    assert_near,
    assert_same_gradients,
    pair,
    relative,
)

WIDTH = 16


class Mlp(nn.Module):
    def __init__(self, *, inner_dropout: float = 0.0, dropout: float = 0.0, inplace: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.inner, self.dropout = nn.Dropout(inner_dropout), nn.Dropout(dropout, inplace)
        self.before = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.dropout(self.down(self.inner(F.gelu(self.up(x)))))


class Model(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp(**settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x + self.mlp(x)


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 10)), WIDTH, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    loss = model(x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("num_tiles", [2, 3, 10])
@pytest.mark.parametrize("shape", [(3, 10), (10,), (2, 2, 11)])
def test_same_gradients(num_tiles, shape):
    ours, plain = pair(Model)
    with Attached(ours, TileMlp("mlp", num_tiles)):
        losses = [step(model, batch(*shape)) for model in (ours, plain)]
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_draws_what_the_plain_path_draws(inplace):
    ours, plain = pair(lambda: Model(dropout=0.3, inplace=inplace))
    with Attached(ours, TileMlp("mlp", 4)):
        states = []
        for model in (ours, plain):
            loss = step(model, batch())
            states.append((loss, torch.get_rng_state()))
    assert torch.equal(states[0][1], states[1][1])
    assert_near(states[0][0], states[1][0], LOSS_BOUND)
    assert_same_gradients(ours, plain)


def test_dropout_on_the_wide_inside_is_refused():
    model = Model(inner_dropout=0.2)
    with Attached(model, TileMlp("mlp", 2)):
        with pytest.raises(TilingError, match="wider than its output"):
            model(batch())
        model.eval()
        model(batch())


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_other_random_functions_are_refused():
    model = nn.ModuleDict({"mlp": Random()})
    with Attached(model, TileMlp("mlp", 2)), pytest.raises(TilingError, match="rand_like draws random numbers"):
        model["mlp"](batch())


def test_one_tile_or_a_short_sequence_is_the_plain_path():
    for num_tiles in (1, 11):
        ours, plain = pair(lambda: Model(dropout=0.1))
        with Attached(ours, TileMlp("mlp", num_tiles)):
            for model in (ours, plain):
                step(model, batch())
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_each_gradient_accumulates_once_and_hooks_see_all_of_it():
    ours, plain = pair(Model)
    counts, seen = {}, {}
    for model in (ours, plain):
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g: g * 2)
            parameter.register_hook(lambda g, key=(model is ours, name): seen.__setitem__(key, g.clone()))
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: counts.__setitem__(name, counts.get(name, 0) + 1)
        )
    with Attached(ours, TileMlp("mlp", 3)):
        for model in (ours, plain):
            step(model, batch())
    assert set(counts.values()) == {1}
    assert_same_gradients(ours, plain)
    for name, _ in plain.named_parameters():
        assert relative(seen[True, name], seen[False, name]) < GRADIENT_BOUND


def test_frozen_and_tied_parameters():
    def build():
        model = Model()
        model.mlp.up.requires_grad_(False)
        model.mlp.down.weight = nn.Parameter(model.mlp.up.weight.detach().T.clone())
        model.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        return model

    ours, plain = pair(build)
    with Attached(ours, TileMlp("mlp", 3)):
        for model in (ours, plain):
            step(model, batch())
    assert_same_gradients(ours, plain)


def test_checkpointed_autocast_and_a_second_backward():
    ours, plain = pair(lambda: Model(dropout=0.2))
    with Attached(ours, TileMlp("mlp", 3)):
        for model in (ours, plain):
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16):
                loss = checkpoint(model, batch().requires_grad_(), use_reentrant=False).float().square().mean()
            loss.backward()
            model.zero_grad()
            torch.manual_seed(3)
            loss = model(batch()).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    assert_same_gradients(ours, plain)


def test_a_checkpoint_drops_the_noise_too():
    model = Model(dropout=0.2)
    x = batch(4, 200).requires_grad_()
    with Attached(model, TileMlp("mlp", 4)):
        books = LiveBytes("cpu")
        books.see_all([x, *model.parameters()])
        before = books.total_bytes
        with books:
            output = checkpoint(model, x, use_reentrant=False)
            assert books.total_bytes - before < 1.1 * output.nbytes
            output.sum().backward()


def test_autocast():
    ours, plain = pair(Model)
    with Attached(ours, TileMlp("mlp", 3)):
        outputs = []
        for model in (ours, plain):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(model(batch()))
            outputs[-1].float().square().mean().backward()
    assert outputs[0].dtype == outputs[1].dtype
    assert_same_gradients(ours, plain, 1e-2)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    ours, plain = pair(Model)
    with Attached(ours, TileMlp("mlp", 3)), context():
        assert_near(ours(batch()), plain(batch()), 1e-6)


def test_gradcheck():
    model = Model().double()
    x = batch(2, 5).double().requires_grad_()
    with Attached(model, TileMlp("mlp", 2)):
        assert torch.autograd.gradcheck(model, (x,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_functional_transforms_and_forward_mode_take_the_plain_path():
    ours, plain = pair(Model)
    x, found = batch(2, 10), []
    with Attached(ours, TileMlp("mlp", 2)):
        for model in (ours, plain):
            parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

            def loss(parameters, x, model=model):
                return torch.func.functional_call(model, parameters, (x,)).square().mean()

            gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.detach().clone()
            found.append([*gradients.values(), tangent])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_double_backward_is_refused():
    model = Model()
    with Attached(model, TileMlp("mlp", 2)):
        (gradient,) = torch.autograd.grad(model(batch()).square().mean(), model.mlp.up.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()


def test_copies_are_plain_and_detach_leaves_nothing():
    model = Model()
    before = vars(model.mlp).keys()
    with Attached(model, TileMlp("mlp", 3)):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert "forward" not in vars(twin.mlp)
    assert vars(model.mlp).keys() == before
    with pytest.raises(PlanError, match="at least 1"):
        Attached(model, TileMlp("mlp", 0))


MLPS = {"gpt2": "transformer.h.{}.mlp", "llama": "model.layers.{}.mlp", "vit": "vit.layers.{}.mlp"}


@pytest.mark.parametrize("name", list(MLPS))
def test_models_of_the_suite(name):
    """Same training; the rehearsed peak is the measured one, and lower."""
    entry = case(name)
    actions = [TileMlp(MLPS[name].format(layer), 4) for layer in range(4)]
    ours, plain = pair(lambda: entry.build().train())
    with Attached(ours, *actions):
        losses = []
        for model in (ours, plain):
            torch.manual_seed(3)
            losses.append(entry.loss(model(**entry.batch(0))))
            losses[-1].backward()
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(ours, plain)
    inputs = Inputs.from_sample(entry.batch(0))
    real = RealRehearsal(plain, inputs, torch.device("cpu"), 0)
    tiled = real.run(lambda model: Attached(model, *actions)).peak_bytes
    assert FakeRehearsal(plain, inputs, "cpu").run(lambda model: Attached(model, *actions)).peak_bytes == tiled
    assert tiled < 0.8 * real.run().peak_bytes


def test_wide_activations_of_one_stretch_exist_at_once():
    """Absolute bytes: the inside of 1/8 of the sequence, in forward and backward."""
    model = Model()
    x = batch(4, 512)
    inside_bytes = x.nbytes * 4

    def peak(*actions):
        model.zero_grad()
        books = LiveBytes("cpu")
        books.see_all([x, *model.parameters()])
        before = books.total_bytes
        with Attached(model, *actions), books:
            step(model, x)
        return books.peak_bytes - before

    assert peak() >= 2 * inside_bytes
    assert peak(TileMlp("mlp", 8)) <= 6 * x.nbytes + 5 * inside_bytes / 8
