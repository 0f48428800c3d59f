"""When plans are made: from a sample, at the first training forward, and again when a step may need more."""

from __future__ import annotations

import copy
import gc
import logging
import pathlib
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config, DoesNotFitError
from memscale._execute.executor import executor_of
from memscale._planning import job
from tests.models import case, small, square_loss
from tests.parity import assert_same, attached_plan, seed, train

QUIET = Config(force_optimize=True, enable_logging=False)
SAMPLE = torch.ones(64, 16)


def plain_peak(model: nn.Module, sample: Any = None) -> int:
    """What a step peaks at as it is. Where all of it fits, an estimate tries nothing else."""
    return memscale.estimate(model, sample, config=QUIET.replace(force_optimize=False)).baseline_peak_bytes


def test_without_a_sample_the_plan_is_made_at_the_first_training_forward() -> None:
    model = memscale.wrap(small(), QUIET)
    assert attached_plan(model) is None
    with torch.no_grad():
        model(SAMPLE)
        model.eval()
        model(SAMPLE)
    assert attached_plan(model) is None
    model.train()
    model(SAMPLE)
    assert attached_plan(model).actions
    assert attached_plan(model).inputs == ("0: 64x16 float32",)


def test_a_transformers_config_is_enough() -> None:
    model = memscale.wrap(case("gpt2").build(), QUIET)
    assert attached_plan(model) is not None


def test_a_larger_batch_is_planned_again_a_smaller_is_not() -> None:
    model = memscale.wrap(small(), QUIET, SAMPLE)
    planned = attached_plan(model)
    model(torch.ones(8, 16))
    assert attached_plan(model) is planned
    model(torch.ones(64, 16))
    assert attached_plan(model) is planned
    model(torch.ones(128, 16))
    assert attached_plan(model) is not planned
    assert attached_plan(model).predicted_peak_bytes > planned.predicted_peak_bytes


def test_a_batch_that_does_not_fit_leaves_the_plan_for_those_that_do() -> None:
    model = small()
    budget = plain_peak(model, SAMPLE) - 1000
    memscale.wrap(model, Config(memory_budget_gb=budget / 1e9, enable_logging=False), SAMPLE)
    planned = attached_plan(model)
    assert planned.actions
    with pytest.raises(DoesNotFitError):
        model(torch.ones(20_000, 16))
    assert attached_plan(model) == planned, "the smaller batches still need it"
    square_loss(model(SAMPLE)).backward()
    assert executor_of(model).stats().num_recomputes == len(planned.actions)


def test_planning_at_the_first_forward_changes_nothing_about_it() -> None:
    entry = case("resnet")
    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    memscale.wrap(model, QUIET)
    assert_same(train(model, entry), train(twin, entry))


# ---- what makes a plan hold no longer


class Quadratic(nn.Module):
    """Memory grows with the square of the length, as in attention that materialises its scores."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Scores()) for _ in range(depth))

    def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2) / 8).softmax(-1) @ x


def budget_for(model: nn.Module, sample: torch.Tensor, share: float) -> Config:
    return QUIET.replace(force_optimize=False, memory_budget_gb=share * plain_peak(model, sample) / 1e9)


def test_a_longer_batch_of_as_many_elements_is_planned_again() -> None:
    wide, long = torch.ones(64, 4, 8), torch.ones(1, 256, 8)
    model = Quadratic()
    memscale.wrap(model, budget_for(model, long, 0.9), wide)
    before = attached_plan(model)
    assert before.actions == ()
    model(long)
    assert attached_plan(model).actions
    assert attached_plan(model).inputs == ("0: 1x256x8 float32",)


def test_batches_that_alternate_are_planned_once_each(caplog: pytest.LogCaptureFixture) -> None:
    wide, long = torch.ones(64, 4, 8), torch.ones(1, 256, 8)
    model = Quadratic()
    memscale.wrap(model, budget_for(model, long, 0.9), wide)
    with caplog.at_level(logging.INFO, "memscale"):
        plans = []
        for batch in (long, wide, long, wide):
            model.zero_grad()
            square_loss(model(batch)).backward()
            plans.append(attached_plan(model))
    assert caplog.text.count("planning again") == 1
    assert plans[0] is plans[2]
    assert plans[1] is plans[3]
    assert plans[0].actions
    assert not plans[1].actions, "short batches do not pay for long ones"


def test_layers_that_begin_to_train_are_planned_for() -> None:
    model = small()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    list(model.parameters())[-1].requires_grad_(True)
    config = budget_for(small(), SAMPLE, 0.9)
    memscale.wrap(model, config, SAMPLE)
    assert attached_plan(model).actions == ()
    model.requires_grad_(True)
    model(SAMPLE)
    assert attached_plan(model).actions


def test_another_switch_is_another_step() -> None:
    model = Quadratic()
    memscale.wrap(model, QUIET, torch.ones(2, 8, 8))
    planned = attached_plan(model)
    model(torch.ones(2, 8, 8), flag=True)
    assert attached_plan(model) is not planned


def test_another_attention_inside_a_module_without_a_config_is_planned_for() -> None:
    """Attention that keeps its scores takes more: the step that begins with it must be within the budget already."""
    seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=4, attn_pdrop=0.0, eos_token_id=0)
    model, ids = nn.Sequential(GPT2LMHeadModel(config)), torch.zeros(2, 32, dtype=torch.long)
    memscale.wrap(model, Config(enable_logging=False))
    plans = []
    for implementation in ("sdpa", "sdpa", "eager"):
        model[0].set_attn_implementation(implementation)
        model(ids).logits.square().mean().backward()
        model.zero_grad()
        plans.append(attached_plan(model))
    assert plans[0] is plans[1]
    assert plans[2].baseline_peak_bytes > plans[1].baseline_peak_bytes


@pytest.mark.parametrize("first", ["eval", "train"])
def test_a_training_in_evaluation_mode_keeps_the_budget(first: str) -> None:
    """With gradients a forward in that mode holds what one of training holds."""
    seed(0)
    layers = (nn.TransformerEncoderLayer(32, 4, 128, batch_first=True, dropout=0.0) for _ in range(4))
    plain = nn.Sequential(*layers).to("simgpu")
    model = copy.deepcopy(plain)
    batch = torch.randn(8, 16, 32, device="cpu").to("simgpu")
    device = torch.get_device_module("simgpu")
    peaks, losses, budget, held = [], [], 0.0, 0
    for each in (plain, model):
        if each is model:
            budget = 0.7 * (peaks[-1] - held)
            memscale.wrap(model, Config(memory_budget_gb=budget / 1e9, enable_logging=False))
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.train(first == "train")
        held = device.memory_allocated() - sum(p.nbytes for p in each.parameters())
        for _ in range(3):
            device.reset_peak_memory_stats()
            loss = square_loss(each(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peaks.append(device.max_memory_allocated())
            each.eval()
            del loss
    assert attached_plan(model).actions
    assert peaks[-1] - held <= budget
    assert losses[:3] == losses[3:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("num_forwards", [1, 4])
def test_several_graphs_in_evaluation_mode_that_exceed_the_budget_are_told_once(
    num_forwards: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Their plan counts one. In training mode such a step is observed; here nobody can tell that it is a step."""
    model = small().to("simgpu").eval()
    batch = torch.ones(512, 16, device="simgpu")
    plain_bytes = memscale.estimate(model, batch, config=Config(enable_logging=False)).baseline_peak_bytes
    memscale.wrap(model, Config(memory_budget_gb=0.8 * plain_bytes / 1e9, enable_logging=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.get_device_module("simgpu").reset_peak_memory_stats()
    with caplog.at_level(logging.WARNING, logger="memscale"):
        for _ in range(3):
            sum(square_loss(model(batch)) for _ in range(num_forwards)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("Several forwards before one backward hold several graphs") == (num_forwards > 1)
    memscale.detach(model)


def test_an_evaluation_with_gradients_that_does_not_fit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = small().eval()
    memscale.wrap(model, Config(memory_budget_gb=1e-6, enable_logging=False))
    with caplog.at_level(logging.WARNING, logger="memscale"):
        for _ in range(2):
            model(SAMPLE)
    assert attached_plan(model) is None
    assert caplog.text.count("torch.no_grad() around it takes far less") == 1
    with pytest.raises(DoesNotFitError):
        model.train()(SAMPLE)
    with torch.no_grad():
        model(SAMPLE)
    memscale.detach(model)


# ---- values that decide sizes


class Packs(nn.Module):
    """Goes on with a part of the batch that values of another input say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def part(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        x = self.part(x, which)
        for block in self.blocks:
            x = x + block(x)
        return x


class ByMask(Packs):
    def part(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return x[which.bool()]


class ByLength(Packs):
    def part(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return x[:, : int(which.sum(1).max())]


class ByKind(Packs):
    def part(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return x[:, : len((which.cumsum(1) * which).unique())]


def shown(num_columns: int, device: str) -> torch.Tensor:
    return (torch.arange(32, device=device) < num_columns).long().expand(16, 32).contiguous()


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("kind", [ByMask, ByLength, ByKind])
def test_values_that_make_a_larger_step_are_planned_for(kind: type[Packs], device: str) -> None:
    seed(1)
    model = kind().to(device)
    twin = copy.deepcopy(model)
    x = torch.randn(16, 32, 8).to(device)
    largest = plain_peak(model, (x, shown(32, device)))
    memscale.wrap(
        model, QUIET.replace(force_optimize=False, memory_budget_gb=0.9 * largest / 1e9), (x, shown(2, device))
    )
    few = attached_plan(model)
    assert few.actions == ()
    plans = []
    for num_columns in (2, 1, 32, 30, 32, 2):
        model.zero_grad()
        square_loss(model(x, shown(num_columns, device))).backward()
        plans.append(attached_plan(model))
    for num_columns in (
        2,
        1,
        32,
        30,
        32,
        2,
    ):  # afterwards: what others do on the device during a step counts as its own
        twin.zero_grad()
        square_loss(twin(x, shown(num_columns, device))).backward()
    assert plans[1] is few, "fewer need no other plan"
    assert plans[2].actions
    assert few.predicted_peak_bytes < plans[2].predicted_peak_bytes <= plans[2].budget_bytes
    assert plans[2] is plans[3] is plans[4], "what goes no further is planned for"
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_gradients_that_are_held_beside_a_smaller_step_promise_no_less_for_a_larger_one() -> None:
    """Values that go less far make a smaller step, of the same shapes."""
    model = ByMask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, config = torch.randn(16, 32, 8), Config(memory_budget_gb=1, enable_logging=False)
    with memscale.optimize(model, optimizer, config, (x, shown(32, "cpu"))) as executor:
        first = executor.plan
        for num_columns in (32, 1):
            square_loss(model(x, shown(num_columns, "cpu"))).backward()
        assert executor.plan.predicted_peak_bytes > first.predicted_peak_bytes
        optimizer.step()


class Looks(nn.Module):
    """Asks for values, and does the same whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5000, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not (ids < 0).any()
        return self.out(self.embed(ids))


def test_values_that_change_nothing_are_not_followed_for_long(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Looks(), QUIET, torch.full((2, 8), 1))
    planned = attached_plan(model)
    with caplog.at_level(logging.INFO, "memscale"):
        for step in range(2, 12):
            model(torch.full((2, 8), step))
    assert caplog.text.count("rehearsing this batch") == 4
    assert caplog.text.count("are not followed any more") == 1
    assert attached_plan(model) is planned


def test_values_that_go_no_further_are_not_rehearsed(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.arange(16).reshape(2, 8)
    model = memscale.wrap(Looks(), QUIET, ids)
    with caplog.at_level(logging.INFO, "memscale"):
        for step in range(8):
            model(ids.clamp(max=15 - step))
    assert "rehearsing this batch" not in caplog.text


# ---- models that move


def test_a_model_that_is_moved_is_planned_for_where_it_computes() -> None:
    entry = case("gpt2")
    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    memscale.wrap(model, QUIET.replace(mode="conservative"))
    assert attached_plan(model).device_type == "cpu"
    model.to("simgpu")
    twin.to("simgpu")
    batch = {name: value.to("simgpu") for name, value in entry.batch(0).items()}
    losses = []
    for each in (model, twin):
        torch.manual_seed(2)
        losses.append(each(**batch).loss)
    plan = attached_plan(model)
    assert plan.device_type == "simgpu"
    assert plan.actions
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert next(model.parameters()).device.type == "simgpu"
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_optimizer_state_follows_a_model_that_is_moved(tmp_path: pathlib.Path) -> None:
    """It waited on the disk, the next tier of the CPU; below a device it waits in host memory."""
    model = small()
    config = QUIET.replace(offload_dir=str(tmp_path))
    memscale.wrap(model, config, SAMPLE)
    optimizer = torch.optim.AdamW(model.parameters())
    for device in ("cpu", "simgpu", "simgpu"):
        model.to(device)
        square_loss(model(SAMPLE.to(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert attached_plan(model).device_type == "simgpu"
    memscale.detach(model)
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    assert state
    assert {value.device.type for value in state} == {"simgpu"}


def test_what_does_not_fit_the_host_may_fit_where_the_model_goes() -> None:
    """Nobody gave a batch, and on the CPU nothing can wait elsewhere."""
    entry = case("gpt2")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    plain = plain_peak(model)
    memscale.wrap(model, QUIET.replace(force_optimize=False, memory_budget_gb=0.35 * plain / 1e9))
    assert attached_plan(model) is None
    model.to("simgpu")
    batch = {name: value.to("simgpu") for name, value in entry.batch(0).items()}
    model(**{name: value[:1] for name, value in batch.items()}).loss.backward()
    assert attached_plan(model).device_type == "simgpu"
    assert attached_plan(model).fits


def test_derived_inputs_that_do_not_fit_are_no_error_of_the_user() -> None:
    """They have 64 tokens, where the batch that comes has 8: it fits, and is planned for."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=2, n_head=2)).to("simgpu")
    ids = torch.zeros(1, 8, dtype=torch.long, device="simgpu")
    config = QUIET.replace(enable_offloading=False)
    memscale.wrap(model, config, {"input_ids": ids, "labels": ids})
    lowest = attached_plan(model).predicted_peak_bytes
    memscale.wrap(model, config.replace(force_optimize=False, memory_budget_gb=1.05 * lowest / 1e9))
    assert attached_plan(model) is None
    model(input_ids=ids, labels=ids).loss.backward()
    assert attached_plan(model).fits
    memscale.detach(model)


def test_a_batch_that_fits_neither_the_host_nor_the_device_is_refused_for_both() -> None:
    """Whoever gives a batch wants the answer now."""
    model = small()
    config = QUIET.replace(force_optimize=False, memory_budget_gb=1e-6)
    with pytest.raises(DoesNotFitError, match=r"for simgpu; on the CPU, where the model is now.*does not fit either"):
        memscale.wrap(model, config, SAMPLE)
    with pytest.raises(DoesNotFitError) as caught:
        memscale.wrap(model, config.replace(device="cpu"), SAMPLE)
    assert "where the model is now" not in str(caught.value)
    assert executor_of(model) is None


@pytest.mark.parametrize("says_where", [False, True])
def test_a_batch_that_fits_the_device_alone_is_planned_for_where_the_model_goes(
    says_where: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU nothing can wait elsewhere, so that only the device meets this budget."""
    seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    twin = copy.deepcopy(model)
    ids = torch.arange(16).reshape(1, 16)
    batch = {"input_ids": ids, "labels": ids}
    config = QUIET.replace(force_optimize=False, memory_budget_gb=0.35 * plain_peak(model) / 1e9)
    with caplog.at_level(logging.WARNING, "memscale"):
        memscale.wrap(model, config.replace(device="simgpu" if says_where else None), batch)
    assert ("but fits simgpu" in caplog.text) is not says_where
    assert (attached_plan(model) is None) is not says_where
    on_device = {name: value.to("simgpu") for name, value in batch.items()}
    for each in (model, twin):
        each.to("simgpu")
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(each.parameters())
        for _ in range(2):
            each(**on_device).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert attached_plan(model).device_type == "simgpu"
    assert attached_plan(model).fits
    memscale.detach(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def test_a_sample_does_not_outlive_its_planning() -> None:
    model = small()
    sample = torch.ones(64, 16)
    alive = weakref.ref(sample)
    with memscale.optimize(model, None, QUIET, sample):
        del sample
        gc.collect()
        assert alive() is None


def test_wrapping_looks_at_the_machine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    detect = job.detect_hardware

    def counted(*args: Any) -> memscale.Hardware:
        looks.append(args)
        return detect(*args)

    monkeypatch.setattr(job, "detect_hardware", counted)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memscale.wrap(model, memscale.Config(enable_logging=False), sample_input=torch.ones(2, 4))
    memscale.detach(model)
    assert len(looks) == 1


def test_a_forward_under_autocast_is_another_than_the_one_that_was_planned_for() -> None:
    """`wrap` comes before the loop, and mostly outside of its autocast."""
    model, config = small(), Config(enable_logging=False)
    with memscale.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), config, SAMPLE) as executor:
        plain = executor.plan
        model(SAMPLE).sum().backward()
        assert executor.plan is plain
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(SAMPLE).sum().backward()
            cast = executor.plan
            expected = memscale.estimate(model, SAMPLE, optimizer="sgd", config=config)
        assert cast.predicted_peak_bytes == expected.baseline_peak_bytes != plain.predicted_peak_bytes
        model.zero_grad()
        model(SAMPLE).sum().backward()
        assert executor.plan is plain
