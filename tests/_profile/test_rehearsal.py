"""A rehearsal leaves no trace, allocates nothing when fake, and shows what a real step shows."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale
from benchmarks.real_step import RealRehearsal
from memscale import Config, Hardware
from memscale._planning import make_plan
from memscale._planning.job import Job, open_job
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, fake_copy, loss_of
from memscale._torch import private
from tests.models import Chain, Mlp, ResNet, TwoLinears, case, odd
from tests.parity import checkpoint_all

FORCED = Config(force_optimize=True, enable_logging=False)


class Marked(nn.Module):
    """Changes everything about itself that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ResNet()
        self.calls, self.last = 0, None
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += 1
        self.total.data.add_(1)
        result = self.inner(x) * random.random() * numpy.random.randn() * torch.rand(())
        self.last = result
        self.new_attribute = 3
        return result


def world(model: nn.Module) -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
        "buffers": {n: (id(b), b._version, b.tolist()) for n, b in model.named_buffers()},
        "parameters": {n: (id(p), p._version, p.tolist(), id(p.grad)) for n, p in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "hooks": [
            {name: list(table) for name, table in vars(module).items() if name.endswith("_hooks") and table is not None}
            for module in model.modules()
        ],
        "attributes": [{name: id(value) for name, value in vars(module).items()} for module in model.modules()],
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("training", [True, False])
def test_profiling_leaves_no_trace(training: bool) -> None:
    model = Marked()
    model.train(training)
    model.inner.stage1[1].eval()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    random.random(), numpy.random.randn(), torch.rand(1)
    before = world(model)
    hardware = Hardware.detect("cpu")
    plan = make_plan(Job(model, FORCED, hardware), Inputs((torch.randn(4, 3, 8, 8, generator=torch.Generator()),)))
    after = world(model)
    assert plan.profile_source == "static"
    assert before == after


@pytest.mark.parametrize("static", [True, False], ids=["static", "empirical"])
def test_a_failed_profile_leaves_no_trace(static: bool) -> None:
    model = Marked()
    before = world(model)
    with pytest.raises(memscale.ProfileError):
        make_plan(open_job(model, FORCED.replace(use_static_profiling=static)), Inputs((torch.ones(4, 5, 8, 8),)))
    assert before == world(model)


def test_the_planned_inputs_are_not_changed() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    version = x._version
    make_plan(open_job(odd("in-place on kept outputs").build(), FORCED), Inputs((x,)))
    assert x.grad is None
    assert x._version == version


def test_profiling_under_no_grad() -> None:
    with torch.no_grad():
        plan = make_plan(open_job(Mlp(depth=2), FORCED), Inputs((torch.randn(4, 64),)))
    assert plan.baseline_peak_bytes > 0


def test_a_model_without_weights_takes_no_memory() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=6))
    weights = sum(p.nbytes for p in model.parameters())
    assert weights > 300e6
    inputs = Inputs(kwargs={"input_ids": torch.zeros(4, 512, dtype=torch.long, device="meta")})
    before = psutil.Process().memory_info().rss
    rehearsal = FakeRehearsal(model, inputs, "cpu")
    with memscale.measure("cpu") as strangers:
        pass
    with memscale.measure("cpu") as measured:
        trace = rehearsal.run()
    grown = psutil.Process().memory_info().rss - before
    assert trace.peak_bytes > 2e9, "the step would need gigabytes"
    assert grown < 100e6
    assert measured.peak_bytes - strangers.peak_bytes < 10e6


def test_a_fake_copy_keeps_sharing_and_takes_no_memory() -> None:
    model: Any = case("gpt2").build()
    mode = private.fake_tensor_mode()
    fake: Any = fake_copy(model, mode, torch.device("cpu"))
    assert fake.lm_head.weight is fake.transformer.wte.weight
    assert all(private.is_fake(tensor) for tensor in [*fake.parameters(), *fake.buffers()])
    assert [n for n, _ in fake.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [p.requires_grad for p in fake.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not any(private.is_fake(tensor) for tensor in model.parameters())


def test_a_fake_copy_of_a_model_that_holds_results() -> None:
    """Non-leaf tensors cannot be deep-copied; as attributes they are replaced like all others."""
    model = Marked()
    model(torch.randn(2, 3, 8, 8))
    assert model.last is not None
    fake: Any = fake_copy(model, private.fake_tensor_mode(), torch.device("cpu"))
    assert private.is_fake(fake.last)


# ---- what a rehearsal shows


@pytest.mark.parametrize("name", ["mlp", "resnet", "llama", "nested"])
def test_fake_and_real_rehearsals_agree_to_the_byte(name: str) -> None:
    entry = case(name)
    inputs = Inputs.from_sample(entry.batch(0))
    fake = FakeRehearsal(entry.build(), inputs, "cpu").run()
    real = RealRehearsal(entry.build(), inputs, torch.device("cpu"), 1).run()
    assert fake.peak_bytes == real.peak_bytes
    assert fake.end_bytes == real.end_bytes
    assert [dataclasses.astuple(s)[:4] for s in fake.segments] == [dataclasses.astuple(s)[:4] for s in real.segments]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 8, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_keep_on_fake_tensors_what_they_keep(kind: type[nn.RNNBase]) -> None:
    """oneDNN's LSTM keeps a workspace, whose size fake tensors do not know."""
    inputs = Inputs((torch.zeros(5, 3, 8),))
    fake = FakeRehearsal(Recurrent(kind), inputs, "cpu").run()
    real = RealRehearsal(Recurrent(kind), inputs, torch.device("cpu"), 1).run()
    assert fake.end_bytes == real.end_bytes
    # Not to the byte: in backward, an LSTM holds a bias of its own for a moment.
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.002)


def test_a_rehearsal_takes_off_what_it_attached() -> None:
    model = Chain(TwoLinears(), TwoLinears())
    rehearsal = FakeRehearsal(model, Inputs((torch.ones(8, 16),)), "cpu")
    plain = rehearsal.run()
    treated = rehearsal.run(checkpoint_all)
    assert treated != plain
    assert rehearsal.run() == plain


def test_a_wrapped_model_is_rehearsed_plain() -> None:
    model = Chain(TwoLinears(), TwoLinears())
    inputs = Inputs((torch.ones(8, 16),))
    plain = FakeRehearsal(copy.deepcopy(model), inputs, "cpu").run()
    checkpoint_all(model)
    assert FakeRehearsal(model, inputs, "cpu").run() == plain


# ---- the loss


def test_a_models_own_loss_is_used() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert loss_of({"loss": loss, "logits": torch.ones(3)}) is loss


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2, 3, requires_grad=True),
        (torch.ones(2, 1000, requires_grad=True), None, "x"),
        {"a": [torch.ones((), requires_grad=True)]},
        torch.ones(2, dtype=torch.complex64, requires_grad=True),
        torch.ones(2, dtype=torch.float64, requires_grad=True),
        [torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True), torch.ones(3, requires_grad=True)],
    ],
)
def test_any_output_gets_a_stand_in(output: Any) -> None:
    loss = loss_of(output)
    assert loss.dim() == 0
    loss.backward()


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    name: str = "x"


def test_a_dataclass_is_looked_into() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss_of([Result(2 * weight)]).backward()
    assert weight.grad is not None


def test_an_output_without_gradients_is_refused() -> None:
    with pytest.raises(RuntimeError, match="does not depend"):
        loss_of(torch.ones(3))


# ---- what is beside the model


TABLE = torch.zeros(4)


class Outside(nn.Module):
    """Writes to a tensor beside the model through views of it, and uses up what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        TABLE[0] += 1
        TABLE[1:].mul_(1.1)
        TABLE[1:].add_(1)
        if isinstance(extra, numpy.ndarray):
            extra += 1
        elif extra is not None:
            extra.count += 1
        return self.linear(x)


class Counter:
    def __init__(self) -> None:
        self.count = 0


def test_a_rehearsal_writes_to_nothing_beside_the_model() -> None:
    TABLE.zero_()
    make_plan(open_job(Outside(), FORCED), Inputs((torch.ones(2, 4),)))
    assert torch.equal(TABLE, torch.zeros(4))


@pytest.mark.parametrize("make", [Counter, lambda: numpy.zeros(3)], ids=["object", "array"])
def test_a_rehearsal_changes_no_argument(make: Any) -> None:
    extra = make()
    make_plan(open_job(Outside(), FORCED), Inputs((torch.ones(2, 4),), {"extra": extra}))
    assert (extra.count if isinstance(extra, Counter) else extra.sum()) == 0


def test_an_argument_that_would_be_used_up_is_not_rehearsed_with() -> None:
    batches = iter([torch.ones(2, 4)] * 3)
    with pytest.raises(memscale.ProfileError, match="cannot be copied"):
        make_plan(open_job(Outside(), FORCED), Inputs((torch.ones(2, 4),), {"extra": (each for each in batches)}))
    assert len(list(batches)) == 3


class RowsApart(nn.Module):
    """A linear layer over rows that do not lie one after the other, as attention of `torch.nn` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(0, 1)).sum()


def test_a_bias_is_added_in_place_as_in_a_real_step() -> None:
    """On fake tensors PyTorch makes a new sum: both would be there for a moment, as where a mode measures the CPU."""
    inputs = Inputs((torch.zeros(8, 128, 64),))
    steps = {kind: FakeRehearsal(RowsApart(), inputs, kind).run().segments for kind in ("cpu", "cuda")}
    highest = {kind: max(s.peak_bytes for s in step if s.phase == "forward") for kind, step in steps.items()}
    rows_bytes, product_bytes = 8 * 128 * 64 * 4, 8 * 128 * 256 * 4
    assert highest["cuda"] < rows_bytes + 1.1 * product_bytes
    assert highest["cpu"] >= rows_bytes + 2 * product_bytes


def test_a_linear_layer_is_as_it_was_after_a_rehearsal() -> None:
    before = F.linear
    FakeRehearsal(RowsApart(), Inputs((torch.zeros(2, 3, 64),)), "cuda").run()
    assert F.linear is before


def test_a_half_precise_output_gets_a_loss_in_single_precision() -> None:
    output = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    loss = loss_of(output)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, output.float().square().mean())


def test_each_rehearsal_inside_autocast_casts_weights_anew() -> None:
    """A real recompute comes behind the user's autocast, and lets go of its casts: the next step does not find them."""
    rehearsal = FakeRehearsal(Chain(TwoLinears(), TwoLinears()), Inputs((torch.ones(8, 16),)), "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        first = rehearsal.run(checkpoint_all)
        assert rehearsal.run(checkpoint_all) == first
        assert rehearsal.run(checkpoint_all, num_steps=2) == first
