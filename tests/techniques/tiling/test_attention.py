"""Tiled attention: the same training without the scores, dropout included; and the bytes that it saves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.real_step import RealRehearsal
from memscale._errors import PlanError
from memscale._plan import TileAttention, TileMlp
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch.live_bytes import LiveBytes
from memscale.techniques.tiling.attention import LazyScores, TiledAttention
from memscale.techniques.tiling.common import TilingError
from tests.techniques.tiling.models import (
    LOSS_BOUND,
    Attached,
    assert_near,
    assert_same_gradients,
    hugging_face,
    labels,
    pair,
    tokens,
)

WIDTH, HEADS, LENGTH, ROWS = 16, 2, 24, 7


def scaled(q, k, v, module):
    weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
    return module.dropout(weights) @ v


def causal_fill(q, k, v, module):
    scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(module.causal[: q.shape[-2], : k.shape[-2]] == 0, float("-inf"))
    return module.dropout(scores.softmax(dim=-1)).matmul(v)


def written_in_place(q, k, v, module):
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores /= math.sqrt(q.shape[-1])
    scores += module.bias[:, : q.shape[-2], : k.shape[-2]]
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(F.dropout(weights, module.dropout.p, module.training), v)


def softcapped(q, k, v, module):
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) / 5.0) * 5.0
    scores = scores + torch.where(module.causal[: q.shape[-2], : k.shape[-2]] > 0, 0.0, -1e9)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return module.dropout(weights) @ v


def three_dimensional(q, k, v, module):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(module.dropout(weights), v).unflatten(0, (-1, HEADS))


WRITINGS = {f.__name__: f for f in (scaled, causal_fill, written_in_place, softcapped, three_dimensional)}


class Attention(nn.Module):
    def __init__(self, writing, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.randn(HEADS, 512, 512) * 0.1)
        self.register_buffer("causal", torch.tril(torch.ones(512, 512)))
        self.writing = WRITINGS[writing]

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.writing(q, k, v, self).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, writing, dropout=0.0):
        super().__init__()
        self.attention = Attention(writing, dropout)

    def forward(self, x):
        return x + self.attention(x)


def batch(length=LENGTH):
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(1))


def caught(model):
    return sum(
        vars(module)["forward"].mode.num_caught
        for module in model.modules()
        if isinstance(vars(module).get("forward"), TiledAttention)
    )


TILED = TileAttention("attention", ROWS)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("writing", list(WRITINGS))
def test_hand_written_attention(writing, dropout):
    ours, plain = pair(lambda: Model(writing, dropout))
    with Attached(ours, TILED):
        results = []
        for model in (ours, plain):
            torch.manual_seed(3)
            loss = model(batch()).square().mean()
            loss.backward()
            results.append((loss, torch.get_rng_state()))
        assert caught(ours) == 1
    assert torch.equal(results[0][1], results[1][1])
    assert_near(results[0][0], results[1][0], LOSS_BOUND)
    assert_same_gradients(ours, plain)


EAGER = {"gpt2": ".attn", "llama": "self_attn", "bert": "attention.self", "t5": "Attention", "gemma2": "self_attn"}


def actions_for(model, kind, rows):
    return [TileAttention(name, rows) for name, _ in model.named_modules() if name.endswith(EAGER[kind])]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", list(EAGER))
def test_eager_hugging_face_models(kind, padded):
    """In training mode, with the dropout of each config, causal and padding masks, and T5's learned bias."""
    ours, plain = pair(lambda: hugging_face(kind, attn_implementation="eager").train())
    actions = actions_for(ours, kind, ROWS)
    mask = torch.ones_like(tokens())
    mask[1, 12:] = 0
    inputs = {"input_ids": tokens(), "labels": labels()} | ({"attention_mask": mask} if padded else {})
    with Attached(ours, *actions):
        results = []
        for model in (ours, plain):
            torch.manual_seed(3)
            loss = model(**inputs).loss
            loss.backward()
            results.append((loss, torch.get_rng_state()))
        assert caught(ours) == len(actions)
    assert torch.equal(results[0][1], results[1][1])
    assert_near(results[0][0], results[1][0], LOSS_BOUND)
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("kind", [kind for kind in EAGER if kind != "gemma2"])  # which has no fused path
def test_fused_models_are_left_alone(kind):
    ours, plain = pair(lambda: hugging_face(kind, attn_implementation="sdpa").eval())
    with Attached(ours, *actions_for(ours, kind, ROWS)):
        for model in (ours, plain):
            model(input_ids=tokens(), labels=labels()).loss.backward()
        assert caught(ours) == 0
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is theirs.grad or torch.equal(mine.grad, theirs.grad), name


def test_additive_masks_use_the_fused_kernel():
    class Sees(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Sees.count += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    model = hugging_face("llama", attn_implementation="eager").train()
    actions = actions_for(model, "llama", ROWS)
    with Attached(model, *actions), Sees():
        model(input_ids=tokens(), labels=labels())
    assert Sees.count == len(actions)


def test_weights_that_are_asked_for_are_right():
    ours, plain = pair(lambda: hugging_face("gpt2", attn_implementation="eager").train())
    with Attached(ours, *actions_for(ours, "gpt2", ROWS)):
        outputs = []
        for model in (ours, plain):
            torch.manual_seed(3)
            outputs.append(model(input_ids=tokens(), output_attentions=True))
        for mine, theirs in zip(outputs[0].attentions, outputs[1].attentions, strict=True):
            assert mine.shape == theirs.shape
            assert_near(mine.sum(-1), theirs.sum(-1), 1e-6)
            assert_near(mine + 0, theirs, 1e-6)


def test_scores_that_go_another_way_are_built_and_right():
    class Entropy(nn.Module):
        def forward(self, q, k, v):
            weights = F.softmax(q @ k.transpose(-2, -1), -1)
            entropy = -(weights * weights.log()).sum(-1).mean()
            return (weights @ v).square().mean() + entropy + (q @ k.transpose(-2, -1)).std()

    tensors = [torch.randn(2, HEADS, LENGTH, 8, requires_grad=True) for _ in range(3)]
    model = nn.ModuleDict({"attention": Entropy()})
    plain = torch.autograd.grad(model["attention"](*tensors), tensors)
    with Attached(model, TILED):
        ours = torch.autograd.grad(model["attention"](*tensors), tensors)
    for mine, theirs in zip(ours, plain, strict=True):
        assert_near(mine, theirs, 1e-5)


def scores_of(q, k):
    return torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5


def double_softmax(q, k, v, module):
    return scores_of(q, k).softmax(-1).softmax(-1) @ v


def weights_outside_the_graph(q, k, v, module):
    with torch.no_grad():
        weights = scores_of(q, k).softmax(-1)
    return weights @ v


def a_step_outside_the_graph(q, k, v, module):
    scores = scores_of(q, k)
    with torch.no_grad():
        twice = scores * 2 + module.bias[:, : q.shape[-2], : k.shape[-2]]
        scores += module.causal[: q.shape[-2], : k.shape[-2]]
    return (scores + twice).softmax(-1) @ v + twice.softmax(-1) @ v


def blind_queries(q, k, v, module):
    mask = torch.zeros(q.shape[-2], k.shape[-2])
    mask[3], mask[5], mask[:, 7] = torch.finfo(q.dtype).min, -1e4, torch.finfo(q.dtype).min
    return (scores_of(q, k) + mask).softmax(-1) @ v


def hooked_scores(q, k, v, module):
    scores = scores_of(q, k)
    scores.register_hook(lambda gradient: gradient * 3)
    weights = scores.softmax(-1)
    weights.register_hook(lambda gradient: gradient * 2)
    return weights @ v


def two_uses(q, k, v, module):
    weights = scores_of(q, k).softmax(-1)
    entropy = -(weights * (weights + 1e-9).log()).sum(-1, keepdim=True)
    return weights @ v + weights @ (v * 2) + entropy


def written_after_use(q, k, v, module):
    scores = scores_of(q, k)
    weights = scores.softmax(-1)
    scores.mul_(0)
    return weights @ v + scores.softmax(-1) @ v


def copies_and_aliases(q, k, v, module):
    scores = scores_of(q, k)
    copied, alias = scores.clone(), scores.to(scores.dtype)
    alias.mul_(3)
    return copied.softmax(-1) @ v + scores.softmax(-1) @ v


def copies_outside_the_graph(q, k, v, module):
    weights = scores_of(q, k).softmax(-1)
    with torch.no_grad():
        copied, dropped = weights.clone(), F.dropout(weights, 0.3)
    return weights @ v + copied @ v + dropped @ v


ODD = (
    copies_and_aliases, copies_outside_the_graph,
    double_softmax, weights_outside_the_graph, a_step_outside_the_graph, blind_queries, hooked_scores, two_uses,
    written_after_use,
)  # fmt: skip


@pytest.mark.parametrize("writing", ODD)
def test_odd_attentions(writing):
    ours, plain = pair(lambda: Model("scaled"))
    with Attached(ours, TILED):
        losses = []
        for model in (ours, plain):
            model.attention.writing = writing
            torch.manual_seed(3)
            losses.append(model(batch()).square().mean())
            losses[-1].backward()
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("of", ["scores", "weights"])
def test_hooks_that_come_too_late_are_refused(of):
    def writing(q, k, v, module):
        scores = scores_of(q, k)
        weights = scores.softmax(-1)
        output = weights @ v
        (scores if of == "scores" else weights).retain_grad()
        return output

    model = Model("scaled")
    model.attention.writing = writing
    with Attached(model, TILED), pytest.raises(TilingError, match="after they were used"):
        model(batch())


def test_functional_transforms_take_the_plain_path():
    ours, plain = pair(lambda: Model("causal_fill"))
    with Attached(ours, TILED):
        found = []
        for model in (ours, plain):
            parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
            gradient = torch.func.grad(lambda p, m=model: torch.func.functional_call(m, p, (batch(),)).square().mean())
            found.append(gradient(parameters))
        assert caught(ours) == 0
    for name, expected in found[1].items():
        assert_near(found[0][name], expected, 1e-6)


def test_a_mask_that_changes_in_between_is_noticed():
    class Changes(nn.Module):
        def forward(self, q, k, v, mask):
            scores = q @ k.transpose(-2, -1) + mask
            mask.zero_()
            return scores.softmax(-1) @ v

    model = nn.ModuleDict({"attention": Changes()})
    q = torch.randn(2, HEADS, LENGTH, 8)
    with Attached(model, TILED), pytest.raises(TilingError, match="changed in place"):
        model["attention"](q, q, q, torch.randn(LENGTH, LENGTH))


def test_few_queries_are_the_plain_path():
    ours, plain = pair(lambda: Model("causal_fill", 0.2))
    with Attached(ours, TileAttention("attention", LENGTH)):
        for model in (ours, plain):
            torch.manual_seed(3)
            model(batch()).square().mean().backward()
        assert caught(ours) == 0
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is theirs.grad or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("writing", ["scaled", "causal_fill", "written_in_place"])
def test_autocast(writing):
    ours, plain = pair(lambda: Model(writing))
    with Attached(ours, TILED):
        outputs = []
        for model in (ours, plain):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(model(batch()))
            outputs[-1].float().square().mean().backward()
        assert caught(ours) == 1
    assert outputs[0].dtype == outputs[1].dtype
    assert_same_gradients(ours, plain, 2e-2)


@pytest.mark.parametrize("writing", ["scaled", "causal_fill"])
def test_checkpointed(writing):
    """Same gradients, and the checkpoint drops everything that tiling saved."""
    ours, plain = pair(lambda: Model(writing, 0.2))

    def kept(model):
        books = LiveBytes("cpu")
        x = batch(200).requires_grad_()
        books.see_all([x, *model.parameters(), *model.buffers()])
        before = books.total_bytes
        torch.manual_seed(3)
        with books:
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            after = books.total_bytes - before
            loss.backward()
        return after

    with Attached(ours, TILED):
        kept_bytes = [kept(model) for model in (ours, plain)]
    assert_same_gradients(ours, plain)
    assert kept_bytes[0] <= kept_bytes[1] + 4096


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    ours, plain = pair(lambda: Model("causal_fill").eval())
    with Attached(ours, TILED), context():
        assert_near(ours(batch()), plain(batch()), 1e-6)


def test_gradcheck():
    model = Model("causal_fill").double()
    with Attached(model, TileAttention("attention", 3)):
        x = torch.randn(1, 9, WIDTH, dtype=torch.double, requires_grad=True)
        assert torch.autograd.gradcheck(model, (x,))
        assert caught(model) > 0


def test_copies_are_plain_and_bad_plans_are_refused():
    model = Model("scaled")
    with Attached(model, TILED):
        assert "forward" not in vars(copy.deepcopy(model).attention)
    assert "forward" not in vars(model.attention)
    with pytest.raises(PlanError, match="at least 1"):
        Attached(model, TileAttention("attention", 0))


def test_scores_look_like_a_tensor():
    class Asks(nn.Module):
        def forward(self, q, k):
            scores = q @ k.transpose(-2, -1)
            assert type(scores) is LazyScores
            assert scores.shape == (2, HEADS, LENGTH, LENGTH)
            assert scores.dtype == q.dtype
            assert scores.size(-1) == LENGTH
            assert scores.device == q.device
            assert scores.built is None
            return scores

    model = nn.ModuleDict({"attention": Asks()})
    q = torch.randn(2, HEADS, LENGTH, 8)
    with Attached(model, TILED):
        scores = model["attention"](q, q)
    assert "tensor(" in repr(scores)
    assert torch.equal(scores + 0, q @ q.transpose(-2, -1))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_scores_of_a_layer_do_not_outlive_it(dropout):
    """Absolute bytes: plain, every layer keeps several score matrices; tiled, at most its dropout as booleans."""
    length, layers, heads = 256, 4, 2
    model = nn.Sequential(*(Model("causal_fill", dropout) for _ in range(layers)))
    scores_bytes = 4 * 3 * heads * length**2
    inputs = Inputs.from_sample(batch(length))

    def attach(model):
        return Attached(model, *(TileAttention(f"{layer}.attention", 32) for layer in range(layers)))

    real = RealRehearsal(model, inputs, torch.device("cpu"), 0)
    plain, tiled = real.run().peak_bytes, real.run(attach).peak_bytes
    assert FakeRehearsal(model, inputs, "cpu").run(attach).peak_bytes == tiled
    assert plain >= (2 if dropout else 1) * layers * scores_bytes
    booleans = layers * scores_bytes / 4 if dropout else 0
    for_a_moment = 3.25 * scores_bytes if dropout else 4 * scores_bytes * 32 / length
    assert tiled <= booleans + for_a_moment + layers * 12 * batch(length).nbytes


def test_a_card_that_is_not_here():
    """Emulated kernels: attention stays tiled, with the booleans of its dropout, and no scores are kept."""
    model = hugging_face("gpt2", attn_implementation="eager", n_positions=256).train()
    actions = actions_for(model, "gpt2", 32)
    mlps = [TileMlp(f"transformer.h.{layer}.mlp", 4) for layer in range(2)]
    ids = torch.randint(0, 200, (4, 256))
    stage = FakeRehearsal(model, Inputs.from_sample({"input_ids": ids, "labels": ids}), "cuda")
    scores_bytes = 4 * 2 * 256 * 256 * 4
    plain, tiled = stage.run(), stage.run(lambda model: Attached(model, *actions, *mlps))
    assert plain.peak_bytes - tiled.peak_bytes > 0.7 * scores_bytes
