"""The first promise: the same training, bit for bit, whatever is checkpointed and whatever the loop does."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from tests.lanes import pairwise, some
from tests.models import ODD_CASES, SUITE, Case, Chain, Mlp, TwoLinears, case, odd, square_loss
from tests.parity import (
    SELECTIVE,
    Record,
    adam,
    assert_same,
    assert_same_training,
    checkpoint_all,
    equal,
    finish,
    seed,
    train,
)

QUIET = memscale.Config(force_optimize=True, enable_logging=False)

by_name = pytest.mark.parametrize("entry", SUITE, ids=lambda entry: entry.name)
odd_by_name = pytest.mark.parametrize("entry", ODD_CASES, ids=lambda entry: entry.name)


REFUSED = {
    "in-place on its input": "changes its input in place",
    "in-place on kept outputs": "changes the output of a matrix product or of attention in place",
}
"""What cannot be computed again says so; planning then leaves it out."""


def recomputes(executor: Any) -> int:
    return executor.stats().num_recomputes


# ---- every model, treated in every way


@by_name
def test_every_block_checkpointed(entry: Case, plain_runs: dict[Any, Record]) -> None:
    _, executor = assert_same_training(entry, checkpoint_all, plain_runs)
    assert recomputes(executor) > 0


@pytest.mark.parametrize("entry", some(SUITE, *(each.name for each in SUITE[::2])))
def test_every_second_block_checkpointed(entry: Case, plain_runs: dict[Any, Record]) -> None:
    _, executor = assert_same_training(entry, lambda model: checkpoint_all(model, every=2), plain_runs)
    assert recomputes(executor) > 0


@by_name
def test_selectively_checkpointed(entry: Case, plain_runs: dict[Any, Record]) -> None:
    _, executor = assert_same_training(entry, lambda model: checkpoint_all(model, keep=SELECTIVE), plain_runs)
    assert recomputes(executor) > 0


@pytest.mark.parametrize("entry", some(SUITE, "mlp", "resnet", "gpt2", "lora llama", "nested"))
def test_wrapped(entry: Case, plain_runs: dict[Any, Record]) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        return memscale.wrap(model, QUIET, sample_input=entry.batch(0))

    _, model = assert_same_training(entry, prepare, plain_runs)
    assert model._memscale_executor.plan.actions
    assert recomputes(model._memscale_executor) > 0


@odd_by_name
@pytest.mark.parametrize("keep", [(), SELECTIVE], ids=["full", "selective"])
def test_odd_models_checkpointed(entry: Case, keep: Any) -> None:
    if entry.name in REFUSED and (keep or entry.name == "in-place on its input"):
        with pytest.raises((RuntimeError, memscale.MemScaleError), match=REFUSED[entry.name]):
            assert_same_training(entry, lambda model: checkpoint_all(model, keep=keep))
        return
    _, executor = assert_same_training(entry, lambda model: checkpoint_all(model, keep=keep))
    assert recomputes(executor) > 0 or entry.name == "blocks without parameters"


@pytest.mark.parametrize("entry", some(ODD_CASES, *(case.name for case in ODD_CASES[::2])))
def test_odd_models_wrapped(entry: Case) -> None:
    _, model = assert_same_training(entry, lambda model: memscale.wrap(model, QUIET, sample_input=entry.batch(0)))
    assert model._memscale_executor.plan is not None


@pytest.mark.parametrize("entry", some(ODD_CASES, *(case.name for case in ODD_CASES[1::2])))
def test_odd_models_planned_at_the_first_forward(entry: Case) -> None:
    _, model = assert_same_training(entry, lambda model: memscale.wrap(model, QUIET))
    planned = model._memscale_executor.plan is not None
    assert planned or entry.name == "empty batch", "nothing can be learned from a batch of nothing"


def test_data_dependent_model_planned_at_the_first_forward() -> None:
    _, model = assert_same_training(case("data-dependent"), lambda model: memscale.wrap(model, QUIET))
    assert model._memscale_executor.plan.profile_source == "empirical"


# ---- every loop


LOOPS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 3},
    "autocast": {"autocast": torch.bfloat16},
    "clipping": {"clip": 0.1},
    "scheduler": {"scheduler": lambda optim: torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)},
    "all of them": {
        "accumulation": 2,
        "autocast": torch.bfloat16,
        "clip": 0.1,
        "scheduler": lambda optim: torch.optim.lr_scheduler.CosineAnnealingLR(optim, 5),
    },
}


@pytest.mark.parametrize(
    ("name", "loop", "keep"),
    pairwise(["mlp", "resnet", "gpt2", "lora llama"], list(LOOPS), ["full", "selective"]),
)
def test_loops(name: str, loop: str, keep: str, plain_runs: dict[Any, Record]) -> None:
    kept = SELECTIVE if keep == "selective" else ()
    _, executor = assert_same_training(
        case(name), lambda model: checkpoint_all(model, keep=kept), plain_runs, **LOOPS[loop]
    )
    assert recomputes(executor) > 0


@pytest.mark.parametrize("keep", [(), SELECTIVE], ids=["full", "selective"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "bert", "t5"])
def test_two_losses_through_one_graph(name: str, keep: Any) -> None:
    entry = case(name)

    def run(model: nn.Module) -> Record:
        record = Record()
        seed()
        for step in range(3):
            loss = entry.loss(model(**entry.batch(step)))
            loss.backward(retain_graph=True)
            (loss * loss).backward()
            record.losses.append(loss.detach())
            record.gradients.append(
                {n: p.grad if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
        return finish(record, model)

    _same(entry.build, run, lambda model: checkpoint_all(model, keep=keep))


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2"])
def test_called_twice_before_one_backward(name: str) -> None:
    entry = case(name)

    def run(model: nn.Module) -> Record:
        record = Record()
        seed()
        for step in range(3):
            loss = entry.loss(model(**entry.batch(2 * step))) + entry.loss(model(**entry.batch(2 * step + 1)))
            loss.backward()
            record.losses.append(loss.detach())
            record.gradients.append(
                {n: p.grad if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
        return finish(record, model)

    _same(entry.build, run, checkpoint_all)


def test_first_of_two_forwards_goes_backward_last() -> None:
    """The BatchNorm statistics and dropout masks of each call are its own."""
    entry = case("resnet")

    def run(model: nn.Module) -> Record:
        seed()
        first, second = entry.loss(model(**entry.batch(0))), entry.loss(model(**entry.batch(1)))
        second.backward()
        first.backward()
        return finish(_gradients(model, [first, second]), model)

    _same(entry.build, run, checkpoint_all)


def test_gradients_of_inputs() -> None:
    def run(model: nn.Module) -> Record:
        seed()
        x = torch.randn(8, 64, requires_grad=True)
        (gradient,) = torch.autograd.grad(square_loss(model(x)), x)
        return Record(losses=[gradient], torch_rng=torch.get_rng_state(), python_rng=0, numpy_rng=())

    _same(Mlp, run, checkpoint_all)


def _penalised(model: nn.Module) -> Record:
    """A gradient penalty: backward with create_graph."""
    seed()
    x = torch.randn(8, 64, requires_grad=True)
    loss = square_loss(model(x))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return finish(_gradients(model, [loss]), model)


def test_double_backward_through_a_full_checkpoint() -> None:
    _same(Mlp, _penalised, checkpoint_all)


def test_double_backward_through_a_selective_checkpoint_is_right_or_refused() -> None:
    _same(Mlp, _penalised, lambda model: checkpoint_all(model, keep=SELECTIVE))


def test_lora_gradients_are_not_zero() -> None:
    """Frozen inputs: a reentrant checkpoint would leave every adapter untrained."""
    record, _ = assert_same_training(case("lora llama"), checkpoint_all)
    adapters = {name: g for name, g in record.gradients[-1].items() if "lora_" in name}
    assert adapters
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in adapters.values())
    frozen = {name: g for name, g in record.gradients[-1].items() if "lora_" not in name}
    assert all(gradient is None for gradient in frozen.values())


# ---- modes of use


@by_name
def test_inference_and_evaluation_are_untouched(entry: Case) -> None:
    model = entry.build()
    twin = copy.deepcopy(model)
    executor = checkpoint_all(model)
    for mode in (torch.no_grad, torch.inference_mode):
        for training in (True, False):
            with mode():
                results = []
                for each in (model, twin):
                    each.train(training)
                    seed()
                    results.append(entry.loss(each(**entry.batch(0))))
            assert torch.equal(*results)
    assert recomputes(executor) == 0, "nothing is recomputed without gradients"


def test_training_and_evaluation_in_turns() -> None:
    entry = case("resnet")

    def run(model: nn.Module) -> Record:
        record, optim = Record(), adam(model)
        seed()
        for step in range(4):
            model.train(step % 2 == 0)
            loss = entry.loss(model(**entry.batch(step)))
            loss.backward()
            optim.step()
            optim.zero_grad()
            record.losses.append(loss.detach())
        return finish(record, model)

    _same(entry.build, run, checkpoint_all)


def test_forward_called_directly() -> None:
    def run(model: nn.Module) -> Record:
        seed()
        loss = square_loss(model.forward(torch.randn(4, 64)))
        loss.backward()
        return finish(_gradients(model, [loss]), model)

    _same(Mlp, run, checkpoint_all)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_hidden_states_and_attentions(name: str) -> None:
    entry = case(name)

    def build() -> nn.Module:
        model: Any = entry.build()
        model.set_attn_implementation("eager")
        return model

    def run(model: nn.Module) -> Record:
        seed()
        output = model(**entry.batch(0), output_hidden_states=True, output_attentions=True)
        attentions = output.get("attentions") or output.get("decoder_attentions")
        hidden = output.get("hidden_states") or output.get("decoder_hidden_states")
        loss = output.loss + sum(h.square().mean() for h in hidden) + sum(a.square().mean() for a in attentions)
        loss.backward()
        return finish(_gradients(model, [loss, *hidden, *attentions]), model)

    _same(build, run, checkpoint_all)


# ---- key-value caches


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_cache_asked_for_explicitly_warns_and_is_right(name: str) -> None:
    entry = case(name)

    def run(model: nn.Module) -> Record:
        seed()
        loss = model(**entry.batch(0), use_cache=True).loss
        loss.backward()
        return finish(_gradients(model, [loss]), model)

    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    with pytest.warns(UserWarning, match="key-value cache"):
        ours = run(model)
    assert_same(ours, run(twin))


# ---- failures


class Fragile(TwoLinears):
    """Fails on demand, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails_in == "forward":
            raise ArithmeticError("forward")
        if self.fails_in == "backward" and y.requires_grad:
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("keep", [(), SELECTIVE], ids=["full", "selective"])
def test_the_step_after_an_exception_is_right(where: str, keep: Any) -> None:
    entry = Case("fragile", lambda: Chain(*(Fragile() for _ in range(3))), odd("lstm").batch, square_loss)

    def prepare(model: nn.Module) -> None:
        checkpoint_all(model, keep=keep)
        _fail_once(model, where)

    def fail_twin(model: nn.Module) -> None:
        _fail_once(model, where)

    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    prepare(model)
    fail_twin(twin)
    assert_same(train(model, entry), train(twin, entry))


def _fail_once(model: Any, where: str) -> None:
    model.blocks[1].fails_in = where
    with pytest.raises(ArithmeticError, match=where):
        square_loss(model(torch.ones(2, 16))).backward()
    model.blocks[1].fails_in = ""
    model.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_live_after_an_exception(where: str) -> None:
    model: Any = Chain(*(Fragile() for _ in range(3)))
    checkpoint_all(model)
    before = _live_bytes()
    _fail_once(model, where)
    assert _live_bytes() == before


def _live_bytes() -> int:
    gc.collect()
    with memscale.measure() as measured:
        pass
    return measured.peak_bytes


# ---- several at once


def test_two_models_do_not_disturb_each_other() -> None:
    first, second = case("mlp"), case("resnet")

    def run(pair: nn.ModuleList) -> Record:
        seed()
        losses = [each.loss(model(**each.batch(0))) for each, model in zip((first, second), pair, strict=True)]
        sum(losses).backward()
        return finish(_gradients(pair, losses), pair)

    def prepare(pair: nn.ModuleList) -> None:
        for model in pair:
            checkpoint_all(model)

    _same(lambda: nn.ModuleList([first.build(), second.build()]), run, prepare)


@pytest.mark.parametrize("inner_first", [True, False], ids=["inner first", "outer first"])
def test_a_wrapped_model_inside_a_wrapped_model(inner_first: bool) -> None:
    entry = odd("parallel wrapper")

    def prepare(model: Any) -> None:
        for each in (model.module, model) if inner_first else (model, model.module):
            checkpoint_all(each)

    assert_same_training(entry, prepare)


def _gradients(model: nn.Module, values: list[torch.Tensor]) -> Record:
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Record(losses=[value.detach() for value in values], gradients=[gradients])


def _same(build: Any, run: Any, prepare: Any) -> None:
    seed(1)
    model = build()
    twin = copy.deepcopy(model)
    prepare(model)
    ours, theirs = run(model), run(twin)
    assert any(g is not None for step in theirs.gradients for g in step.values()) or not theirs.gradients
    assert all(equal(a, b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert_same(ours, theirs)
