"""Everything that is no block can be streamed too: embeddings, norms, heads, tied and tiled."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, MixedPrecision, OffloadActivations, OffloadOptimizer, StreamParameters, TileHead
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import FakeRehearsal
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.parameters.borrowed_weights import Lender
from memscale.techniques.tiling.head import attach_head, sweep
from memscale.techniques.tiling.head.lazy import LazyLogits
from tests.lanes import in_turns, pairwise
from tests.models import SUITE, Case
from tests.techniques.offload.runs import (
    DEVICE,
    MODES,
    VOCABULARY,
    Gpt,
    Run,
    backward,
    gradients,
    let_autograd_finish,
    on,
    pair,
    same,
    tokens,
    train,
    without_caches,
)

ACCELERATOR = torch.accelerator
TILE_ROWS = 8


def whole_model(model: nn.Module) -> list[Action]:
    blocks = list(find_blocks(model))
    return [StreamParameters(fqn) for fqn in (*streaming.rest_of(model, blocks), *blocks)]


def executor_of(model: nn.Module, actions: list[Action], asynchronous: bool = False, **settings: Any) -> Executor:
    settings = {"async_config": AsyncOffloadConfig(min_tensor_bytes=1024), **settings}
    executor = Executor(model, ExecutionSettings(device=DEVICE, asynchronous=asynchronous, **settings))
    executor.attach(actions)
    return executor


def settle() -> int:
    let_autograd_finish()
    gc.collect()
    ACCELERATOR.synchronize()
    return ACCELERATOR.memory_allocated()


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize(("case", "way"), in_turns(SUITE, ("async", "sync"), whole=["gpt2"]))
def test_trains_the_same_with_nothing_resident(
    case: Case, way: str, plain_runs: dict[str, Run], no_races: Any, no_leaks: Any
):
    plain, model = pair(lambda: without_caches(case.build()))
    if case.name not in plain_runs:
        plain_runs[case.name] = train(plain, case)
    del plain
    executor = executor_of(model, whole_model(model), way == "async")
    resident = {name for name, p in model.named_parameters() if p.device.type != "cpu"}
    assert resident <= {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings", "cls.predictions.bias"} | {
        "predictions.bias"
    }, "only parameters of modules that contain others stay"
    train(model, case).assert_same(plain_runs[case.name])
    executor.detach()


class TiledGpt(Gpt):
    def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


TIED = Case("tied", TiledGpt, lambda n: {"ids": tokens(n)}, lambda output: output["loss"])


def build_untied() -> nn.Module:
    model = TiledGpt()
    model.head = nn.Linear(model.head.in_features, VOCABULARY)
    return model


def build_frozen_head() -> nn.Module:
    model = build_untied()
    model.head.requires_grad_(False)
    return model


@MODES
@pytest.mark.parametrize("build", [TiledGpt, build_untied, build_frozen_head], ids=["tied", "untied", "frozen head"])
def test_with_a_tiled_head_it_is_the_training_of_the_tiled_head(build: Any, asynchronous: bool, no_races: Any):
    resident, model = pair(build)
    tile = TileHead("head", rows=TILE_ROWS)
    reference = executor_of(resident, [tile])
    expected = train(resident, TIED)
    executor = executor_of(
        model,
        [tile, *whole_model(model), *(OffloadActivations(fqn) for fqn in find_blocks(model)), OffloadOptimizer(4096)],
        asynchronous,
    )
    assert all(p.device.type == "cpu" for p in model.parameters())
    train(model, TIED).assert_same(expected)
    executor.detach()
    reference.detach()


@pytest.mark.parametrize(
    ("build", "dtype", "way"),
    pairwise([TiledGpt, build_untied, build_frozen_head], ["bfloat16", "float16"], ["sync", "async"]),
)
def test_a_tiled_head_in_16_bits_trains_as_one_that_stays(
    build: Any, dtype: Any, way: str, no_races: Any, no_leaks: Any
):
    resident, model = pair(build)
    lossy = [TileHead("head", rows=TILE_ROWS), MixedPrecision(dtype)]
    reference = executor_of(resident, lossy)
    expected = train(resident, TIED)
    executor = executor_of(model, [*lossy, *whole_model(model)], way == "async")
    train(model, TIED).assert_same(expected)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    executor.detach()
    reference.detach()


def test_verification_does_not_build_what_a_tiled_head_leaves_lazy(monkeypatch: pytest.MonkeyPatch):
    resident, model = pair(TiledGpt)
    tile = TileHead("head", rows=TILE_ROWS)
    reference = executor_of(resident, [tile])
    expected = train(resident, TIED)
    built: list[LazyLogits] = []
    monkeypatch.setattr(LazyLogits, "on_build", [built.append])
    executor = executor_of(model, [tile, *whole_model(model)], verify=True)
    train(model, TIED).assert_same(expected)
    assert not built
    executor.detach()
    reference.detach()


# ------------------------------------------------------------------------------------------------------------- bytes


def build_wide() -> nn.Module:
    """The head is by far the largest of all."""
    model = TiledGpt(2, 16, dropout=0.0)
    model.embed = nn.Embedding(16_384, 16)
    model.head = nn.Linear(16, 16_384, bias=False)
    model.head.weight = model.embed.weight
    for block in model.blocks:
        del block.scale
        block.scale = 1.0  # of a buffer without values nobody knows whether it changes
    return model


def peak_above_rest(model: nn.Module, batch: torch.Tensor) -> int:
    for _ in range(2):
        before = settle()
        ACCELERATOR.reset_peak_memory_stats()
        output = model(batch)
        output["loss"].backward()  # the output is alive all the while, and with it the lazy logits
        peak = ACCELERATOR.max_memory_allocated() - before
        model.zero_grad()
        del output
    return peak


def test_the_head_costs_its_weight_and_its_gradient_and_only_while_it_computes(no_leaks: Any):
    model = build_wide()
    head_bytes = model.head.weight.nbytes
    batch = tokens(0, (2, 16))
    executor = executor_of(model, [TileHead("head", rows=2), *whole_model(model)])
    assert settle() < 100_000
    assert 2 * head_bytes < peak_above_rest(model, batch) < 2.4 * head_bytes
    output = model(batch)
    assert settle() < 1.2 * head_bytes, "of the head, only the gradient waits for backward"
    output["loss"].backward()
    assert settle() < 0.2 * head_bytes
    del output
    executor.detach()


def test_in_16_bits_the_head_costs_half_its_weight_beside_its_gradient(monkeypatch: Any, no_leaks: Any):
    """The fp32 weight has left when the sums of its gradient begin, and the product in 16 bits is never whole."""
    monkeypatch.setattr(sweep, "PRODUCT_BYTES", 64 * 1024)
    model = build_wide()
    head_bytes = model.head.weight.nbytes
    actions: list[Action] = [TileHead("head", rows=2), *whole_model(model)]
    executor = executor_of(model, [*actions, MixedPrecision("bfloat16")])
    assert settle() < 100_000
    assert 1.5 * head_bytes < peak_above_rest(model, tokens(0, (2, 16))) < 1.9 * head_bytes
    executor.detach()


def test_an_embedding_is_not_fetched_for_its_backward():
    _, model = pair(build_untied)
    rest = [StreamParameters("embed")]
    executor = executor_of(model, rest, asynchronous=True)
    for step in range(3):
        backward(model, step, lambda model: model(tokens(0))["loss"])
        assert executor.stats().transfers["streaming"].num_visits == step + 1
    executor.detach()


@MODES
@pytest.mark.parametrize("lossy", [[], [MixedPrecision("bfloat16")], [MixedPrecision("float16")]], ids=str)
def test_a_rehearsal_predicts_its_peak_to_the_byte(asynchronous: bool, lossy: list[Action], monkeypatch: Any):
    monkeypatch.setattr(sweep, "PRODUCT_BYTES", 64 * 1024)
    model = build_wide().to(DEVICE)
    batch = {"ids": tokens(0, (2, 16))}
    actions = [TileHead("head", rows=2), *whole_model(model), *lossy]

    def attach(target: nn.Module) -> Executor:
        return executor_of(target, actions, asynchronous)

    trace = FakeRehearsal(model, Inputs((), batch), "simgpu").run(attach)
    executor = attach(model)
    before = settle()
    ACCELERATOR.reset_peak_memory_stats()
    model(**batch)["loss"].backward()
    assert ACCELERATOR.max_memory_allocated() - before == trace.peak_bytes
    executor.detach()


# ---------------------------------------------------------------------------------------- the head outside its layer


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def heads(request: pytest.FixtureRequest, no_races: Any, no_leaks: Any) -> Any:
    """The same tied model with its head tiled: resident, and with everything streamed."""
    resident, model = pair(TiledGpt)
    tile = TileHead("head", rows=TILE_ROWS)
    executors = [executor_of(resident, [tile]), executor_of(model, [tile, *whole_model(model)], request.param)]
    models = [resident, model]
    del resident, model
    yield models
    models.clear()
    for executor in executors:
        executor.detach()


def test_logits_can_be_read_before_and_after_backward(heads: Any):
    read = []
    for model in heads:
        torch.manual_seed(0)
        output = model(tokens())
        before = output["logits"].argmax(-1).cpu()
        output["loss"].backward()
        read.append((before, output["logits"].detach().clone().cpu()))
    for ours, theirs in zip(*read, strict=True):
        assert torch.equal(ours, theirs)


def test_two_backward_passes_through_one_graph(heads: Any):
    for model in heads:
        torch.manual_seed(0)
        loss = model(tokens())["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(*(gradients(model) for model in heads))


def test_someone_asks_for_the_gradient_of_the_logits(heads: Any):
    seen = []
    for model in heads:
        torch.manual_seed(0)
        output = model(tokens())
        output["logits"].register_hook(lambda gradient: seen.append(gradient.cpu().clone()))
        output["loss"].backward()
    assert torch.equal(*seen)
    assert same(*(gradients(model) for model in heads))


def test_a_loss_for_each_row(heads: Any):
    for model in heads:
        torch.manual_seed(0)
        logits = model(tokens())["logits"]
        rows = F.cross_entropy(logits.flatten(0, 1), tokens().flatten(), reduction="none")
        (rows * torch.arange(len(rows), device=DEVICE)).sum().backward()
    assert same(*(gradients(model) for model in heads))


def test_evaluation_and_training_alternate(heads: Any):
    losses = []
    for model in heads:
        model.eval()
        with torch.no_grad():
            losses.append(model(tokens())["loss"].item())
        model.train()
        torch.manual_seed(0)
        model(tokens())["loss"].backward()
    assert losses[0] == losses[1]
    assert same(*(gradients(model) for model in heads))


def test_a_weight_that_changed_meanwhile_is_refused(heads: Any):
    _, model = heads
    loss = model(tokens())["loss"]
    loss.backward(retain_graph=True)  # the next one brings the weight again
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed between|has changed since"):
        loss.backward()
    del loss
    let_autograd_finish()


def test_a_lent_weight_is_hollow_when_nobody_uses_it():
    _, model = pair(TiledGpt)
    seen: list[Any] = []
    executor = executor_of(model, [TileHead("head", rows=TILE_ROWS), *whole_model(model)])
    output = model(tokens())
    weight = output["logits"].block.projections[0].weight
    lender = Lender.of(weight)
    assert lender is not None
    assert weight.untyped_storage().nbytes() == weight.itemsize
    with lender.present(), lender.present():
        seen.append(weight.detach().cpu().clone())
    assert torch.equal(seen[0], model.head.weight)
    assert weight.untyped_storage().nbytes() == weight.itemsize
    del output, weight, lender
    executor.detach()


# ------------------------------------------------------------------------------------------------- what cannot travel


def test_a_forward_that_changes_its_parameters_is_refused():
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 4))
    executor = executor_of(model, [StreamParameters("0")])
    with pytest.raises(RuntimeError, match="max_norm"):
        model(torch.arange(8, device=DEVICE))
    executor.detach()


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Normalised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = nn.Parameter(self.weight.detach() * 2)
        return super().forward(x)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [Clamped, Normalised, Replaced])
def test_changes_past_the_version_counter_are_refused(kind: type[nn.Linear], asynchronous: bool):
    model = nn.Sequential(kind(4, 4), nn.Linear(4, 4))
    weight = model[0].weight
    looks = kind is Clamped
    executor = executor_of(model, [StreamParameters("0")], asynchronous=asynchronous, verify=looks)
    with pytest.raises(RuntimeError, match="changes its parameters"):
        model(torch.ones(2, 4, device=DEVICE))
    assert model[0].weight is weight
    executor.detach()


class Squared(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * weight


class OwnForward(nn.Sequential):
    """An embedding whose forward somebody has replaced."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(8, 4), nn.Linear(4, 4))
        embedding = self[0]
        embedding.forward = lambda ids: nn.functional.embedding(ids, embedding.weight * embedding.weight)


def parametrized() -> nn.Module:
    embedding = nn.Embedding(8, 4)
    nn.utils.parametrize.register_parametrization(embedding, "weight", Squared())
    return nn.Sequential(embedding, nn.Linear(4, 4))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("build", [parametrized, OwnForward])
def test_an_embedding_that_computes_its_weight_is_fetched_for_backward(build: Any, asynchronous: bool):
    found = []
    for streams in (False, True):
        torch.manual_seed(0)
        model = build()
        actions = [StreamParameters("0"), StreamParameters("1")]
        executor = executor_of(model, actions if streams else [], asynchronous=asynchronous)
        model(torch.arange(8, device=DEVICE)).square().mean().backward()
        found.append([p.grad.cpu() for p in model.parameters()])
        executor.detach()
    assert all(map(torch.equal, *found))


def test_a_batch_of_one_tile_takes_the_plain_path_inside_the_layer(no_leaks: Any):
    resident, model = pair(TiledGpt)
    tile = TileHead("head", rows=1000)
    executors = [executor_of(resident, [tile]), executor_of(model, [tile, *whole_model(model)])]
    for each in (resident, model):
        backward(each, 0, lambda model: model(tokens())["loss"])
    assert same(gradients(resident), gradients(model))
    for executor in executors:
        executor.detach()


def test_the_rest_of_a_model_is_its_smallest_modules_with_parameters():
    model = Gpt()
    assert streaming.rest_of(model, find_blocks(model)) == ("embed", "norm", "head")


def test_layers_are_fetched_in_the_order_of_the_model_whatever_that_of_the_plan():
    _, model = pair(Gpt)
    executor = executor_of(model, whole_model(model)[::-1], asynchronous=True)
    backward(model, 0, lambda model: model(tokens()).square().mean())
    stats = executor.stats().transfers["streaming"]
    assert stats.num_visits - stats.num_hits <= 2, "the first of the model; all others were fetched ahead or kept"
    executor.detach()


def test_a_head_attached_alone_uses_its_weight_as_it_is():
    """Without streaming there is no lender."""
    model = TiledGpt().to(DEVICE)
    with contextlib.ExitStack() as undo:
        attach_head(TileHead("head", rows=TILE_ROWS), model, undo)
        assert Lender.of(model(on(DEVICE, tokens()))["logits"].block.projections[0].weight) is None


class Pooled(Gpt):
    """Attention beside the blocks, as in the heads of image classifiers: it reads its output's weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MultiheadAttention(self.embed.embedding_dim, 2, batch_first=True)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        return x + self.pool(x, x, x, need_weights=False)[0]


def test_attention_beside_the_blocks_is_streamed_as_a_whole() -> None:
    plain, model = pair(Pooled)
    assert streaming.rest_of(model, find_blocks(model)) == ("embed", "norm", "head", "pool")
    executor = executor_of(model, whole_model(model))
    for step in range(2):
        assert torch.equal(backward(model, step), backward(plain, step))
    assert same(gradients(model), gradients(plain))
    executor.detach()
