"""What can be tiled is found from a recorded forward; what is not sure is not offered, with a reason."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import case
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale.techniques.tiling.find import _Builds, find_attentions, find_head, find_mlps, record, suggested_rows
from memscale.techniques.tiling.head.lazy import lazy_linear
from tests.lanes import in_turns
from tests.techniques.tiling.models import HandWritten, OwnProduct, hugging_face, labels, tokens

HEADS = {
    "gpt2": "lm_head",
    "frozen gpt2": "lm_head",
    "llama": "lm_head",
    "lora llama": "base_model.model.lm_head",
    "bert": "cls.predictions.decoder",
    "albert": "predictions.decoder",
    "t5": "lm_head",
}
MLPS = {
    "gpt2": "transformer.h.{}.mlp",
    "llama": "model.layers.{}.mlp",
    "vit": "vit.layers.{}.mlp",
}
ALL = [*HEADS, "vit", "mlp", "resnet", "transformer encoder", "nested"]


def recording_of(name, *, fake):
    entry = case(name)
    model, inputs = entry.build().train(), Inputs.from_sample(entry.batch(0))
    if fake:
        stage = FakeRehearsal(model, inputs, "cpu")
        model, inputs = stage.model, stage.inputs
    return record(model, inputs.args, inputs.kwargs)


@pytest.mark.parametrize(("name", "kind"), in_turns(ALL, ["real", "fake"], whole=["gpt2"]))
def test_the_suite(name, kind):
    recording = recording_of(name, fake=kind == "fake")
    assert recording.failure is None
    head, mlps, attentions = find_head(recording), find_mlps(recording), find_attentions(recording)
    assert head.module_fqns == ((HEADS[name],) if name in HEADS else ())
    assert head.reason
    assert head.weight_fqn is None
    if name in MLPS:
        assert mlps.module_fqns == tuple(MLPS[name].format(layer) for layer in range(4))
    elif name in ("t5", "bert", "albert", "mlp", "resnet", "nested"):
        assert not mlps
    assert mlps.reason
    assert not attentions
    if name in HEADS or name in ("vit", "transformer encoder"):
        assert "fused already" in attentions.reason


def test_numbers_of_a_head():
    head = find_head(recording_of("gpt2", fake=True))
    assert head.numbers == {"num_rows": 128, "hidden": 64, "vocabulary": 256, "rows": 32}
    assert suggested_rows(num_rows=2048, hidden=768, vocabulary=50257) == 32


@pytest.mark.parametrize(
    "writing",
    [F.linear, lambda hidden, weight: hidden @ weight.T, lambda hidden, weight: torch.matmul(hidden, weight.t())],
)
def test_a_product_in_the_models_own_forward(writing):
    head = find_head(record(OwnProduct(writing), (tokens(),)))
    assert head.module_fqns == ("",)
    assert head.weight_fqn == "embedding.weight"


def test_an_adapter_on_the_head():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(hugging_face("llama"), LoraConfig(r=4, target_modules=["lm_head"]))
    head = find_head(record(model, (), {"input_ids": tokens(), "labels": labels()}))
    assert head.module_fqns == ("base_model.model.lm_head",)
    assert head.numbers["hidden"] == 32


class ReadsItsLogits(HandWritten):
    def forward(self, ids):
        return super().forward(ids).softmax(-1)


def test_logits_that_the_model_reads_itself_are_left_alone():
    head = find_head(record(ReadsItsLogits(), (tokens(),)))
    assert not head
    assert "reads the logits" in head.reason


def test_a_model_that_fake_tensors_cannot_run():
    recording = recording_of("data-dependent", fake=False)
    for find in (find_head, find_mlps, find_attentions):
        assert not find(recording)
        assert "does not run on fake tensors" in find(recording).reason


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "gemma2"])
def test_eager_attention(kind):
    model = hugging_face(kind, attn_implementation="eager").train()
    attentions = find_attentions(record(model, (), {"input_ids": tokens(), "labels": labels()}))
    expected = [
        n for n, _ in model.named_modules() if n.endswith((".attn", "self_attn", "attention.self", "Attention"))
    ]
    assert attentions.module_fqns == tuple(expected)


def test_attention_that_is_asked_for_its_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=True)[0]

    attentions = find_attentions(record(Model(), (torch.randn(2, 20, 16),)))
    assert not attentions
    assert "need_weights" in attentions.reason


WIDTH = 8


class Around(nn.Module):
    """A module between others, so that it is not the model itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Body(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.down, self.gate = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.register_buffer("count", torch.zeros(1))
        self.kept = []
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def mlp(self, x):
    return self.down(F.gelu(self.up(x)))


POSITION_WISE = {
    "mlp": mlp,
    "norm and residual": lambda self, x: x + mlp(self, self.norm(x)),
    "gated": lambda self, x: self.gate(F.silu(self.up(x)).chunk(2, -1)[0]),
    "mean over width": lambda self, x: mlp(self, x - x.mean(-1, keepdim=True)),
    "dropout outside": lambda self, x: F.dropout(mlp(self, x), 0.1, True),
    "flattened": lambda self, x: mlp(self, x.reshape(-1, WIDTH)).view(x.shape),
    "in place inside": lambda self, x: self.down(self.up(x).relu_()).mul_(2.0),
}
NOT_POSITION_WISE = {
    "mean over positions": (lambda self, x: mlp(self, x - x.mean(1, keepdim=True)), "not the last"),
    "shifted": (lambda self, x: mlp(self, x.roll(1, 1)), "may mix positions"),
    "cumulative": (lambda self, x: mlp(self, x.cumsum(1)), "may mix positions"),
    "positions": (lambda self, x: mlp(self, x + self.table), "may depend on the position"),
    "mixed by a product": (lambda self, x: mlp(self, (x @ x.transpose(1, 2)).softmax(-1) @ x), ""),
    "positions as features": (lambda self, x: mlp(self, x.transpose(1, 2).reshape(x.shape)), ""),
    "wide dropout": (lambda self, x: self.down(F.dropout(self.up(x), 0.1, True)), "dropout acts on its wide inside"),
    "noise": (lambda self, x: mlp(self, x + torch.randn_like(x)), "draws random numbers"),
    "narrow": (lambda self, x: self.norm(x), "fewer than two products"),
    "sorted": (lambda self, x: mlp(self, x.sort(1).values), "may mix positions"),
    "first position": (lambda self, x: mlp(self, x + x[:, :1]), ""),
    "reads a value": (lambda self, x: mlp(self, x * float(x.sum())), "does not run by itself"),
    "divides by the length": (lambda self, x: mlp(self, x) / x.shape[1], "depends on the length"),
    "divides by all": (lambda self, x: mlp(self, x) / x.numel(), "depends on the length"),
    "length as a tensor": (lambda self, x: mlp(self, x) / torch.tensor(float(x.shape[1])), "was made a tensor"),
    "length in a full tensor": (lambda self, x: mlp(self, x) / torch.full((), x.shape[1]), "depends on the length"),
    "branches": (lambda self, x: mlp(self, x if x.shape[1] > 3 else x.relu()), "depends on the length"),
    "counts in an attribute": (lambda self, x: (setattr(self, "calls", 1), mlp(self, x))[1], "changes its attributes"),
    "keeps what it computed": (lambda self, x: self.kept.append(x) or mlp(self, x), "changes its attributes"),
    "counts in a buffer": (lambda self, x: mlp(self, x * self.count.add_(1)), "writes to"),
    "writes to its input": (lambda self, x: mlp(self, x.view(-1, WIDTH).relu_()).view(x.shape), "writes to"),
}


@pytest.mark.parametrize("name", list(POSITION_WISE))
def test_position_wise_modules(name):
    model = Around(Around(Body(POSITION_WISE[name])))
    mlps = find_mlps(record(model, (torch.randn(2, 5, WIDTH),)))
    assert mlps.module_fqns == ("inner",)  # the outermost that is one, but not the model itself


@pytest.mark.parametrize("name", list(NOT_POSITION_WISE))
def test_modules_that_may_mix_positions(name):
    function, reason = NOT_POSITION_WISE[name]
    mlps = find_mlps(record(Around(Body(function)), (torch.randn(2, 5, WIDTH),)))
    assert not mlps
    assert reason in mlps.reason or "does not run on fake tensors" in mlps.reason


def test_weights_that_change_with_every_forward():
    """Power iteration: every stretch would have weights of its own."""
    body = Body(mlp)
    torch.nn.utils.parametrizations.spectral_norm(body.up)
    assert "writes to" in find_mlps(record(Around(body), (torch.randn(2, 5, WIDTH),))).reason


def test_hooks_inside_an_mlp():
    body = Body(mlp)
    body.up.register_forward_hook(lambda *_: None)
    assert "hooks" in find_mlps(record(Around(body), (torch.randn(2, 5, WIDTH),))).reason


def test_recording_leaves_the_model_as_it_was():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.last = None

        def forward(self, x):
            self.last = self.norm(x)
            self.register_buffer("new", self.last.detach())
            return self.last

    model = Remembers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, WIDTH)
    state = torch.get_rng_state()
    record(model, (x,))
    assert model.last is None
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_hooks
    assert not model.norm._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), state)


def test_only_what_this_thread_builds_is_counted():
    def build():
        lazy_linear(torch.randn(6, 4), torch.randn(8, 4), tile_rows=2).value()

    with _Builds() as outer:
        with _Builds() as inner:
            build()
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        build()
    build()
    assert (outer.count, inner.count) == (2, 1)
