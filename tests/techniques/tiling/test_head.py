"""Tiled heads: the same training as the plain model, whatever is done with the logits; and the bytes that it saves."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.real_step import RealRehearsal
from memscale._errors import MemScaleError, PlanError
from memscale._plan import TileHead
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch.interception import replaced_in_this_thread
from memscale._torch.live_bytes import LiveBytes
from memscale.techniques.tiling.head import product_with
from memscale.techniques.tiling.head.lazy import LazyLogits, lazy_linear
from memscale.techniques.tiling.head.recipe import StaleLogitsError
from tests.techniques.tiling.models import (
    HEADS,
    LOSS_BOUND,
    TILE_ROWS,
    VOCABULARY,
    WIDTH,
    Attached,
    HandWritten,
    OwnProduct,
    assert_near,
    assert_same_gradients,
    builds,
    flat_loss,
    hugging_face,
    labels,
    pair,
    relative,
    shifted_loss,
    tokens,
)

HEAD = TileHead("head", TILE_ROWS)
ULP = 2**-7
"""Of bf16, relative to the smallest number of a binade."""


# ---- Hugging Face: the loss inside forward


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", list(HEADS))
def test_hugging_face_losses(kind, tied):
    ours, plain = pair(lambda: hugging_face(kind, tie_word_embeddings=tied))
    batch = {"input_ids": tokens(), "labels": labels()}
    with Attached(ours, TileHead(HEADS[kind], TILE_ROWS)), builds() as built:
        outputs = []
        for model in (ours, plain):
            torch.manual_seed(3)
            outputs.append(model(**batch))
            outputs[-1].loss.backward()
        assert not built
        assert type(outputs[0].logits) is LazyLogits
        assert_near(outputs[0].loss, outputs[1].loss, LOSS_BOUND)
        assert_same_gradients(ours, plain)
        assert torch.equal(outputs[0].logits.argmax(-1), outputs[1].logits.argmax(-1))
    assert torch.equal(ours.eval()(**batch).logits, plain.eval()(**batch).logits)  # detached


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_number_of_items_in_the_batch(kind):
    ours, plain = pair(lambda: hugging_face(kind).eval())
    with Attached(ours, TileHead(HEADS[kind], TILE_ROWS)), builds() as built:
        losses = []
        for model in (ours, plain):
            output = model(input_ids=tokens(), labels=labels(), num_items_in_batch=torch.tensor(7))
            output.loss.backward()
            losses.append(output.loss)
        assert not built
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(ours, plain)


# ---- a loss outside: idioms that stay lazy, and what must be built and is right

LAZY = {
    "flat": flat_loss,
    "shift": shifted_loss,
    "transpose": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permute, shift, float": lambda x, y: F.cross_entropy(x[:, :-1].float().permute(0, 2, 1), y[:, 1:]),
    "module, sum": lambda x, y: nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), y.flatten()),
    "none, masked": lambda x, y: (
        F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), reduction="none") * torch.arange(y.numel())
    ).mean(),
    "smooth": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weight, smooth": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 2, x.shape[-1]), label_smoothing=0.2
    ),
    "rows by mask": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "rows by index": lambda x, y: F.cross_entropy(x[[0, 2, 2], [1, 3, 3]], y[[0, 2, 2], [1, 3, 3]].clamp(0)),
    "index_select": lambda x, y: flat_loss(x.index_select(1, torch.tensor([4, 1])), y[:, [4, 1]].clamp(0)),
    "a sample at a time": lambda x, y: torch.stack([F.cross_entropy(a, b) for a, b in zip(x, y, strict=True)]).sum(),
    "chunks": lambda x, y: sum(
        F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum")
        for a, b in zip(x.split(5, 1), y.split(5, 1), strict=True)
    ),
    "softcap": lambda x, y: flat_loss(torch.tanh(x / 3.0) * 3.0, y),
    "temperature, negative": lambda x, y: flat_loss(-(x * 0.5), y),
    "last": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1].clamp(0)),
    "one row": lambda x, y: F.cross_entropy(x[0, 0], tokens()[0, 1]),
    "sequence first": lambda x, y: F.cross_entropy(x.transpose(0, 1).reshape(-1, x.shape[-1]), y.t().reshape(-1)),
    "expand": lambda x, y: flat_loss(x[:, :1].expand(-1, y.shape[1], -1), y),
    "clone, detach, double": lambda x, y: flat_loss(x.clone().double(), y) + flat_loss(x.detach(), y),
    "two losses": lambda x, y: flat_loss(x, y) + 0.5 * shifted_loss(x, y),
    "log_softmax, nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), y.flatten()),
    "gather": lambda x, y: -x.log_softmax(-1).gather(-1, y.clamp(0).unsqueeze(-1)).mean(),
}

BUILT = {
    "z-loss": lambda x, y: flat_loss(x, y) + 1e-2 * x.logsumexp(-1).square().mean(),
    "probabilities": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), torch.full((y.numel(), x.shape[-1]), 1 / x.shape[-1])
    ),
    "part of the vocabulary": lambda x, y: flat_loss(x[..., :200], y.clamp(-100, 199)),
    "in place": lambda x, y: flat_loss(x.div_(2.0), y),
    "in place on a view": lambda x, y: (x[:, 0].mul_(3.0), flat_loss(x, y))[1],
    "setitem": lambda x, y: (x.__setitem__((..., 5), -9.0), flat_loss(x, y))[1],
    "masked_fill": lambda x, y: flat_loss(x.masked_fill(torch.arange(VOCABULARY) > 205, -1e4), y.clamp(-100, 205)),
    "added bias": lambda x, y: flat_loss(x + torch.linspace(0, 1, VOCABULARY), y),
    "hook": lambda x, y: (x.register_hook(lambda g: g * 2), flat_loss(x, y))[1],
    "hook on a cast": lambda x, y: (lambda z: (z.register_hook(lambda g: g * 2), flat_loss(z, y))[1])(x.double()),
    "hook on a view of a view": lambda x, y: (lambda z: (z.register_hook(lambda g: g * 2), flat_loss(x, y))[1])(
        x[:, 1:].float()
    ),
    "late hook": lambda x, y: (lambda loss: (x.register_hook(lambda g: g * 2), loss)[1])(flat_loss(x, y)),
    "late hook on log-probabilities": lambda x, y: (
        lambda p: (lambda loss: (p.register_hook(lambda g: g * 3), loss)[1])(F.nll_loss(p.flatten(0, 1), y.flatten()))
    )(x.log_softmax(-1)),
    "reversed gradient": lambda x, y: flat_loss(Reversed.apply(x), y),
    "cat": lambda x, y: torch.cat([x, x], 1).softmax(-1)[..., 3].sum(),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / VOCABULARY).detach(), reduction="batchmean"),
}


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@pytest.mark.parametrize("name", [*LAZY, *BUILT])
def test_every_use_of_the_logits(name):
    for tied, bias in ((True, False), (False, True)):
        ours, plain = pair(lambda tied=tied, bias=bias: HandWritten(tied=tied, bias=bias))
        loss = (LAZY | BUILT)[name]
        with Attached(ours, HEAD), builds() as built:
            losses = [loss(model(tokens()), labels()) for model in (ours, plain)]
            for each in losses:
                each.backward(retain_graph=True)
            if name in LAZY:
                assert not built
            assert_near(losses[0], losses[1], LOSS_BOUND)
            assert_same_gradients(ours, plain)
            for each in losses:
                (each * 3).backward()  # a second time: accumulated, scaled, made anew
            assert_same_gradients(ours, plain)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("legacy", [{"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}])
def test_legacy_reductions(legacy):
    hidden, weight, target = torch.randn(20, 4), torch.randn(9, 4), torch.randint(0, 9, (20,))
    plain = F.cross_entropy(F.linear(hidden, weight), target, **legacy)
    assert_near(F.cross_entropy(lazy_linear(hidden, weight, tile_rows=6), target, **legacy), plain, LOSS_BOUND)


def test_gradients_of_the_logits_themselves():
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD):
        found = []
        for model in (ours, plain):
            logits = model(tokens())
            loss = shifted_loss(logits, labels())
            (asked,) = torch.autograd.grad(loss, logits, retain_graph=True)
            logits.retain_grad()  # after the loss was computed
            loss.backward()
            found.append((asked, logits.grad))
        assert_near(found[0][0], found[1][0], 1e-5)
        assert_near(found[0][1], found[1][1], 1e-5)
        assert_same_gradients(ours, plain)


def test_double_backward():
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD):
        penalties = []
        for model in (ours, plain):
            loss = shifted_loss(model(tokens()), labels())
            (gradient,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
            penalties.append(torch.autograd.grad(gradient.square().sum(), model.head.weight)[0])
    assert_near(penalties[0], penalties[1], 1e-5)


# ---- heads of every kind


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_frozen_parts(frozen):
    ours, plain = pair(lambda: HandWritten(tied=False, bias=True))
    with Attached(ours, HEAD), builds() as built:
        for model in (ours, plain):
            part = model.head if frozen == "head" else nn.ModuleList([model.embedding, model.blocks])
            part.requires_grad_(False)
            shifted_loss(model(tokens()), labels()).backward()
        assert not built
    assert_same_gradients(ours, plain)


def test_everything_frozen():
    ours, plain = pair(lambda: HandWritten().requires_grad_(False))
    with Attached(ours, HEAD):
        losses = [shifted_loss(model(tokens()), labels()) for model in (ours, plain)]
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert not losses[0].requires_grad


def test_parametrized_weight():
    ours, plain = pair(lambda: HandWritten(tied=False))
    for model in (ours, plain):
        torch.nn.utils.parametrizations.weight_norm(model.head)
    with Attached(ours, HEAD), builds() as built:
        for model in (ours, plain):
            shifted_loss(model(tokens()), labels()).backward()
        assert not built
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_low_rank_adapter(dropout):
    """The frozen head and its adapter are both lazy, and so is their sum; dropout acts on the hidden states."""
    from peft import LoraConfig, get_peft_model

    def build():
        config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], lora_dropout=dropout, init_lora_weights=False)
        return get_peft_model(hugging_face("llama"), config)

    ours, plain = pair(build)
    with Attached(ours, TileHead("base_model.model.lm_head", TILE_ROWS)), builds() as built:
        losses = []
        for model in (ours, plain):
            torch.manual_seed(3)
            losses.append(model(input_ids=tokens(), labels=labels()).loss)
            losses[-1].backward()
        assert not built
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(ours, plain)
    assert any("lora_B" in name and "lm_head" in name for name, p in ours.named_parameters() if p.grad is not None)


WRITINGS = {
    "F.linear": lambda hidden, weight: F.linear(hidden, weight),
    "@ weight.T": lambda hidden, weight: hidden @ weight.T,
    "matmul, t": lambda hidden, weight: torch.matmul(hidden, weight.t()),
    "matmul, transpose": lambda hidden, weight: hidden.matmul(weight.transpose(0, 1)),
}


@pytest.mark.parametrize("writing", list(WRITINGS))
def test_a_product_in_the_models_own_forward(writing):
    ours, plain = pair(lambda: OwnProduct(WRITINGS[writing]))
    with Attached(ours, TileHead("", TILE_ROWS, weight_fqn="embedding.weight")), builds() as built:
        losses = []
        for model in (ours, plain):
            logits = model(tokens())
            losses.append(shifted_loss(logits, labels()))
            losses[-1].backward()
            assert isinstance(logits, LazyLogits) == (model is ours)
        assert not built
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(ours, plain)


def test_what_is_no_head_is_refused():
    model = HandWritten()
    with pytest.raises(PlanError, match="no linear head"):
        Attached(model, TileHead("embedding", TILE_ROWS))
    with pytest.raises(PlanError, match="made for another model"):
        Attached(model, TileHead("nowhere", TILE_ROWS))
    with pytest.raises(PlanError, match="does not have"):
        Attached(model, TileHead("", TILE_ROWS, weight_fqn="nowhere.weight"))
    with pytest.raises(PlanError, match="at least 1"):
        Attached(model, TileHead("head", 0))
    model.head.forward = lambda x: x
    with pytest.raises(PlanError, match="replaced by someone else"):
        Attached(model, HEAD)


# ---- around it


def test_a_tile_as_large_as_the_batch_is_the_plain_path():
    ours, plain = pair(lambda: HandWritten(bias=True))
    with Attached(ours, TileHead("head", tokens().numel())):
        logits = ours(tokens())
        assert type(logits) is torch.Tensor
        expected = plain(tokens())
        assert torch.equal(logits, expected)
        flat_loss(logits, labels()).backward()
        flat_loss(expected, labels()).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    "build", [HandWritten, lambda: HandWritten(tied=False, bias=True), lambda: hugging_face("gpt2")]
)
def test_autocast(build):
    ours, plain = pair(lambda: build().eval())
    name = "head" if isinstance(ours, HandWritten) else "lm_head"
    with Attached(ours, TileHead(name, TILE_ROWS)), builds() as built:
        losses = []
        for model in (ours, plain):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens())
                logits = getattr(logits, "logits", logits)
                losses.append(flat_loss(logits, labels()))
            assert logits.dtype == torch.bfloat16
            losses[-1].backward()
        assert not built
    assert losses[0].dtype == losses[1].dtype
    assert relative(losses[0], losses[1]) <= ULP
    assert_same_gradients(ours, plain, 1e-2)


@pytest.mark.parametrize("kind", [*HEADS, "hand-written"])
def test_bf16_losses_are_within_one_ulp(kind):
    """Of the plain bf16 path: the distance to the next number of bf16, at the loss."""
    ours, plain = pair(lambda: (HandWritten() if kind == "hand-written" else hugging_face(kind)).bfloat16().eval())
    losses = []
    with Attached(ours, TileHead(HEADS.get(kind, "head"), TILE_ROWS)), builds() as built:
        for model in (ours, plain):
            if kind == "hand-written":
                losses.append(shifted_loss(model(tokens()), labels()))
            else:
                losses.append(model(input_ids=tokens(), labels=labels()).loss)
            losses[-1].backward()
        assert not built
    assert losses[0].dtype == losses[1].dtype
    rounded = losses[1].detach().bfloat16()
    ulp = torch.nextafter(rounded, torch.full_like(rounded, torch.inf)).float() - rounded.float()
    assert (losses[0].float() - losses[1].float()).abs() <= ulp
    assert_same_gradients(ours, plain, 2e-2)


def test_bf16_model():
    ours, plain = pair(lambda: HandWritten(tied=False, bias=True).bfloat16())
    with Attached(ours, HEAD):
        losses = [shifted_loss(model(tokens()), labels()) for model in (ours, plain)]
        for loss in losses:
            loss.backward()
    assert losses[0].dtype == torch.bfloat16
    assert relative(losses[0], losses[1]) <= ULP
    assert_same_gradients(ours, plain, 1e-2)


def test_checkpointed_blocks():
    ours, plain = pair(lambda: HandWritten(checkpointed=True))
    with Attached(ours, HEAD), builds() as built:
        for model in (ours, plain):
            shifted_loss(model(tokens()), labels()).backward()
        assert not built
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("with_loss", [False, True])
def test_checkpointed_head(reentrant, with_loss):
    ours, plain = pair(HandWritten)

    def step(model):
        hidden = model.hidden(tokens())
        if with_loss:
            return checkpoint(lambda h: shifted_loss(model.head(h), labels()), hidden, use_reentrant=reentrant)
        return shifted_loss(checkpoint(model.head, hidden, use_reentrant=reentrant), labels())

    with Attached(ours, HEAD):
        for model in (ours, plain):
            step(model).backward()
    assert_same_gradients(ours, plain)


def test_accumulation_and_steps():
    ours, plain = pair(HandWritten)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (ours, plain)]
    with Attached(ours, HEAD):
        for _ in range(3):
            for model, optimizer in zip((ours, plain), optimizers, strict=True):
                for part in range(2):
                    (shifted_loss(model(tokens(part)), labels()) / 2).backward()
                optimizer.step()
            assert_same_gradients(ours, plain, 1e-4)
            for optimizer in optimizers:
                optimizer.zero_grad()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert relative(mine, theirs) < 1e-4


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation(context):
    ours, plain = pair(lambda: hugging_face("gpt2").eval())
    with Attached(ours, TileHead("lm_head", TILE_ROWS)), context():
        mine, theirs = (model(input_ids=tokens(), labels=labels()) for model in (ours, plain))
        assert type(mine.logits) is LazyLogits
        assert_near(mine.loss, theirs.loss, LOSS_BOUND)
        assert_near(mine.logits[:, -1] + 0, theirs.logits[:, -1] + 0, 1e-6)
        assert not mine.logits.requires_grad
        assert torch.equal(mine.logits.argmax(-1), theirs.logits.argmax(-1))


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"do_sample": True, "temperature": 0.7, "top_k": 5}, {"repetition_penalty": 1.5}]
)
def test_generate(how):
    for kind in ("gpt2", "t5"):
        ours, plain = pair(lambda kind=kind: hugging_face(kind).eval())
        with Attached(ours, TileHead("lm_head", 2)):
            texts = []
            for model in (ours, plain):
                torch.manual_seed(3)
                texts.append(model.generate(tokens(), max_new_tokens=4, pad_token_id=0, **how))
        assert torch.equal(*texts)


# ---- the logits as an object


def test_logits_leave_as_plain_values():
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD):
        logits, expected = ours(tokens()), plain(tokens())
        lazy, values = logits.detach(), expected.detach()
        assert type(lazy) is LazyLogits
        assert not lazy.requires_grad

        def saved(x):
            file = io.BytesIO()
            torch.save(x, file)
            file.seek(0)
            return torch.load(file)

        for leave in (copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), saved):
            left = leave(lazy)
            assert type(left) is torch.Tensor
            assert_near(left, values, 1e-6)
        assert numpy.allclose(lazy.numpy(), values.numpy(), atol=1e-6)
        assert numpy.allclose(numpy.asarray(lazy), values.numpy(), atol=1e-6)
        assert numpy.allclose(lazy.cpu().tolist(), values.tolist(), atol=1e-6)
        assert "tensor(" in repr(lazy)
        assert f"{lazy[0, 0, 0]:.4f}" == f"{values[0, 0, 0]:.4f}"
        assert lazy[0, 0, 0].item() == pytest.approx(values[0, 0, 0].item(), abs=1e-6)
        for bad in (copy.deepcopy, lambda x: x.numpy()):
            for tensor in (logits, expected):
                with pytest.raises(RuntimeError):
                    bad(tensor)


def test_logits_look_like_a_tensor():
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD), builds() as built:
        logits, expected = ours(tokens()), plain(tokens())
        assert isinstance(logits, torch.Tensor)
        for ask in (
            lambda x: x.shape, lambda x: x.dtype, lambda x: x.device, lambda x: x.stride(), lambda x: x.is_leaf,
            lambda x: x.requires_grad, lambda x: x.is_contiguous(), len, lambda x: x.numel(), lambda x: x.nbytes,
            lambda x: x.ndim, lambda x: x.size(-1), lambda x: x[:, 1:].is_contiguous(),
        ):  # fmt: skip
            assert ask(logits) == ask(expected)
        with pytest.raises(RuntimeError, match="view"):
            logits[:, :-1].view(-1, VOCABULARY)
        assert not built
        assert logits.grad_fn is not None  # whoever has it can hook it: from here on the logits are built


OPERATIONS = {
    "slice": lambda x: x[..., 3:9],
    "max": lambda x: x.max(-1).values,
    "topk": lambda x: x.topk(3).values,
    "stack": lambda x: torch.stack([x, x]),
    "compare": lambda x: x == x,
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(),
    "mT": lambda x: x.mT + 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "einsum": lambda x: torch.einsum("bsv->sv", x),
    "one row": lambda x: x[1, 2] + 0,
}


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_operations_on_logits(name):
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD):
        mine, theirs = (OPERATIONS[name](model(tokens())) for model in (ours, plain))
    assert_near(mine if type(mine) is torch.Tensor else mine + 0, theirs, 1e-6)


def test_writes_reach_every_view():
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD), torch.no_grad():
        results = []
        for model in (ours, plain):
            x = model(tokens())
            column, sample = x[:, 1], x[0]
            column.sum()
            x.mul_(2)
            column.add_(1)
            sample[..., 3] = 7.0
            x.view(-1, VOCABULARY)[4] = 0
            x.clone().zero_()
            results.append([x + 0, x[:, 1] + 0, x.flatten(0, 1)[4] + 1, x.sum(-1)])
    for mine, theirs in zip(*results, strict=True):
        assert_near(mine, theirs, 1e-6)


def test_logits_cannot_be_read_after_the_step():
    model = HandWritten()
    with Attached(model, HEAD):
        logits = model(tokens())
        shifted_loss(logits, labels()).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(StaleLogitsError, match=r"before the step"):
            logits.argmax(-1)
        with pytest.raises(StaleLogitsError):
            shifted_loss(logits, labels())


class SilentSgd(torch.optim.Optimizer):
    """Writes behind autograd's back, as old optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


def test_a_step_behind_autograds_back_is_noticed():
    model = HandWritten()
    with Attached(model, HEAD):
        logits = model(tokens())
        shifted_loss(logits, labels()).backward()
        SilentSgd(model.parameters()).step()
        with pytest.raises(StaleLogitsError):
            logits.argmax(-1)


def test_what_was_read_before_the_step_stays():
    model, plain = pair(HandWritten)
    with Attached(model, HEAD):
        logits = model(tokens())
        before = logits.argmax(-1)
        shifted_loss(logits, labels()).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert torch.equal(before, plain(tokens()).argmax(-1))
        assert torch.equal(logits.argmax(-1), before)


def test_a_frozen_heads_logits_can_be_read_after_the_step():
    model, plain = pair(lambda: HandWritten(tied=False))
    model.head.requires_grad_(False)
    with Attached(model, HEAD):
        logits = model(tokens())
        shifted_loss(logits, labels()).backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
        assert torch.equal(logits.argmax(-1), plain(tokens()).argmax(-1))


def test_inference_tensors_cannot_be_changed_under_us():
    weight = torch.randn(20, 4)
    with torch.inference_mode():
        hidden = torch.randn(9, 4)
        expected = F.linear(hidden, weight)
        logits = lazy_linear(hidden, weight, tile_rows=2)
        hidden.zero_()
        assert_near(logits + 0, expected, 1e-6)


# ---- attaching


def test_copies_of_a_tiled_model_are_plain():
    model = HandWritten()
    with Attached(model, HEAD):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin(tokens())) is torch.Tensor
            assert twin.head.weight is twin.embedding.weight
        assert model.state_dict().keys() == HandWritten().state_dict().keys()


def test_detached_in_any_order():
    ours, plain = pair(HandWritten)
    before = dict(vars(ours.head))
    first, second = Attached(ours, HEAD), Attached(ours, TileHead("", TILE_ROWS, weight_fqn="embedding.weight"))
    first.detach()
    assert type(ours(tokens())) is LazyLogits  # the other one works on
    second.detach()
    second.detach()
    assert vars(ours.head).keys() == before.keys()
    assert "forward" not in vars(ours)
    assert torch.equal(ours(tokens()), plain(tokens()))


def test_logits_outlive_the_attachment():
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD):
        logits = ours(tokens())
    shifted_loss(logits, labels()).backward()
    shifted_loss(plain(tokens()), labels()).backward()
    assert_same_gradients(ours, plain)


def test_compiled_models_are_refused():
    """Compiled code would hold the logits that the plan has promised away."""
    ours, plain = pair(HandWritten)
    with Attached(ours, HEAD):
        compiled = torch.compile(ours, backend="eager")
        with pytest.raises(MemScaleError, match=r"Linear runs inside.*torch\.compile"):
            compiled(tokens())
        with torch.no_grad():
            assert torch.equal(compiled(tokens()), plain(tokens()))


# ---- bytes


def wide_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8192, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config)


class LogitsOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = wide_gpt2()

    def forward(self, input_ids):
        return self.inner(input_ids).logits


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("rows", [16, 50, 64])
def test_the_rehearsed_peak_is_the_measured_peak(inside, rows):
    """To the byte, also when rows are ignored, which fake tensors cannot see."""
    ids = torch.randint(0, 8192, (4, 64))
    target = ids.clone()
    target[:, :20] = -100
    model = wide_gpt2() if inside else LogitsOutside()
    inputs = Inputs.from_sample({"input_ids": ids, "labels": target} if inside else ids)
    name = "lm_head" if inside else "inner.lm_head"

    def attach(model):
        return Attached(model, TileHead(name, rows))

    fake = FakeRehearsal(model, inputs, "cpu").run(attach)
    real = RealRehearsal(model, inputs, torch.device("cpu"), 0).run(attach)
    plain = RealRehearsal(model, inputs, torch.device("cpu"), 0).run()
    assert fake.peak_bytes == real.peak_bytes
    assert fake.end_bytes == real.end_bytes == plain.end_bytes
    assert plain.peak_bytes >= 3 * 4 * ids.numel() * 8192
    assert real.peak_bytes < plain.peak_bytes / 3


def test_read_logits_are_counted():
    """Values that someone asks for are there, and a meter sees them."""
    hidden, weight = torch.randn(64, WIDTH, requires_grad=True), torch.randn(5000, WIDTH)
    with LiveBytes("cpu") as books:
        logits = lazy_linear(hidden, weight, tile_rows=8)
        assert books.peak_bytes < 64 * 5000
        logits.argmax(-1)
    assert books.peak_bytes >= 4 * 64 * 5000


# ---- more than one process

DDP = """
    import os, torch, torch.distributed as dist
    from torch import nn
    from memscale._execute import orderly_exit
    from memscale._plan import TileHead
    from tests.techniques.tiling.models import *
    _exit.be_orderly()  # as `wrap` does; actions are attached by hand here
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kwargs in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        for inside in (False, True):
            ours, plain = pair(lambda: hugging_face("gpt2").eval() if inside else HandWritten())
            counts = {}
            for name, parameter in ours.named_parameters():
                def count(p, name=name):
                    counts[name] = counts.get(name, 0) + 1
                parameter.register_post_accumulate_grad_hook(count)
            with Attached(ours, TileHead("lm_head" if inside else "head", TILE_ROWS)), builds() as built:
                for model in (ours, plain):
                    parallel = nn.parallel.DistributedDataParallel(model, **kwargs)
                    for step in range(3):
                        ids = tokens(10 * step + rank)
                        if inside:
                            loss = parallel(input_ids=ids, labels=ids).loss
                        else:
                            loss = shifted_loss(parallel(ids), ids)
                        loss.backward()
                assert not built, (kwargs, inside)
            assert_same_gradients(ours, plain)
            assert set(counts.values()) == {3}, (kwargs, inside, counts)
    dist.destroy_process_group()
    print(f"same on rank {rank}\\n", end="", flush=True)
"""


@pytest.mark.full
def test_distributed_data_parallel(tmp_path):
    """Two processes: the same gradients, and each parameter's gradient accumulates once a step."""
    script = tmp_path / "ddp.py"
    script.write_text(textwrap.dedent(DDP))
    answer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "same on rank 0" in answer.stdout
    assert "same on rank 1" in answer.stdout


def test_a_linear_layer_that_somebody_stands_in_front_of_is_one() -> None:
    """As a rehearsal does, whose heads would not be tiled else."""
    hidden, weight, builtin = torch.zeros(2, 4), torch.zeros(8, 4), F.linear
    with replaced_in_this_thread(F, linear=builtin):
        assert F.linear is not builtin
        assert product_with(weight, builtin, (hidden, weight), {})[0] is hidden
