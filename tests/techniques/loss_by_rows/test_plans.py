"""Plans with the loss by rows: they are made where it helps, and what they promise is what there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from memscale._decide import decide
from memscale._decide.choice import RunOptions
from memscale._decide.eligible import resolve
from memscale._execute.executor import Executor, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Plan
from memscale._profile import KEEP, TraceKey
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch import private
from memscale.report.explain import what_is_done
from memscale.techniques.loss_by_rows import LossByRows
from tests.profiles import Block, full_profile, hardware_of, trace_of
from tests.techniques.offload.runs import let_autograd_finish

WIDTH, BATCH, LENGTH = 6000, 16, 64
LOGITS_BYTES = BATCH * LENGTH * WIDTH * 4
"""Three chunks of the size that plans have."""


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


def build(device: str = "simgpu") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WIDTH,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    config.loss_type = "ForCausalLMLoss"
    return GPT2LMHeadModel(config).to(device).train()


def batch(device: str = "simgpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WIDTH, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5)).to(device)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, torch.Tensor]) -> float:
    loss = model(**given).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ---- what is promised


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20, 8 << 20])
def test_a_rehearsal_on_fake_tensors_predicts_the_peak_to_the_byte(chunk_bytes: int) -> None:
    model, actions = build(), [LossByRows(chunk_bytes)]
    settings = ExecutionSettings(device=torch.device("simgpu"))

    def attach(target: nn.Module) -> Executor:
        executor = Executor(target, settings)
        executor.attach(actions)
        return executor

    trace = FakeRehearsal(model, Inputs((), batch()), "simgpu").run(attach)
    executor, accelerator, given = attach(model), torch.accelerator, batch()
    accelerator.synchronize()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    model(**given).loss.backward()
    assert accelerator.max_memory_allocated() - before == trace.peak_bytes
    executor.detach()


@pytest.mark.parametrize("device", ["simgpu", "cpu"])
def test_a_plan_with_it_holds_its_number_and_trains_the_same(device: str) -> None:
    """The plain step takes 84 and 88 MB: this is the cheapest way to save some of them."""
    model, given = build(device), batch(device)
    config = Config(mode="conservative", memory_budget_gb=0.07, enable_bucketed_step=False, enable_logging=False)
    memscale.wrap(model, config, sample_input=given)
    plan = executor_of(model).plan
    assert [type(action) for action in plan.actions] == [LossByRows]
    assert what_is_done(plan) == "loss by rows"
    assert "loss by rows" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, ours, given)
    with memscale.measure(device) as measured:
        step(model, ours, given)
    assert measured.peak_bytes == plan.predicted_peak_bytes
    assert plan.baseline_peak_bytes - plan.predicted_peak_bytes == pytest.approx(LOGITS_BYTES, rel=0.01)
    memscale.detach(model)
    plain = build(device)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(2):
        step(plain, theirs, given)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


class _WithLoss(nn.Module):
    """No input of this can be derived, so that it is planned for when its first batch is there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.fails, self.fails_late = model, False, False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        if self.fails and not (self.fails_late and private.is_fake(loss)):
            raise ValueError("on purpose")
        return loss


def test_the_forward_that_a_plan_is_made_in_follows_it() -> None:
    """PyTorch has looked up what it calls by then: the first batch was trained without, and took more than promised."""
    model, ids = _WithLoss(build()), batch()["input_ids"]
    config = Config(mode="conservative", memory_budget_gb=0.07, enable_bucketed_step=False, enable_logging=False)
    memscale.wrap(model, config)
    with memscale.measure("simgpu") as measured:
        loss = model(ids)
        loss.backward()
    plan = executor_of(model).plan
    assert what_is_done(plan) == "loss by rows"
    assert loss.grad_fn is not None
    assert loss.grad_fn.name() == "_ByRowsBackward"
    assert measured.peak_bytes <= plan.predicted_peak_bytes
    hooks = dict(model._forward_hooks)
    model(ids).backward()
    assert model._forward_hooks == hooks, "that of the first forward has gone with it"
    memscale.detach(model)


def test_a_first_forward_that_fails_is_over() -> None:
    model, ids = _WithLoss(build()), batch()["input_ids"]
    config = Config(mode="conservative", memory_budget_gb=0.07, enable_bucketed_step=False, enable_logging=False)
    memscale.wrap(model, config)
    model.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(ids)
    logits = torch.zeros(BATCH * LENGTH, WIDTH, device="simgpu", requires_grad=True)
    loss = nn.functional.cross_entropy(logits, ids.reshape(-1))
    assert loss.grad_fn is not None
    assert loss.grad_fn.name() == "NllLossBackward0", "it is not the model's"
    memscale.detach(model)


@pytest.mark.filterwarnings("ignore:_WithLoss trains with `use_cache=False`")
def test_what_a_first_forward_raises_is_what_the_user_sees() -> None:
    """Two hooks end a forward that has begun. PyTorch goes through them when it fails, and none may go meanwhile."""
    model, ids = _WithLoss(build()), batch()["input_ids"]
    model.config = GPT2Config(use_cache=True)  # it is switched off, which ends with the forward
    hooks = dict(model._forward_hooks)
    memscale.wrap(model, Config(mode="conservative", force_optimize=True, enable_logging=False))
    model.fails = model.fails_late = True  # when its plan has been made and attached
    with pytest.raises(ValueError, match="on purpose"):
        model(ids)
    assert "loss by rows" in what_is_done(executor_of(model).plan)
    assert model.config.use_cache is True
    model.fails = False
    model(ids).backward()
    memscale.detach(model)
    assert model._forward_hooks == hooks


# ---- deciding


def test_where_it_gains_nothing_it_is_in_no_plan() -> None:
    """Its trace is one that rises as high: no candidate has it, and plans are those without it."""
    blocks = {f"blocks.{index}": Block() for index in range(4)}
    without = full_profile(blocks)
    with_it = full_profile(blocks, variants={**without.variants, TraceKey(loss_by_rows=True): without.plain})
    for config in (Config(force_optimize=True), Config(memory_budget_gb=0.3)):
        plans = [
            decide(profile, resolve(config, hardware_of()), raise_if_unfit=False) for profile in (without, with_it)
        ]
        assert plans[0].actions == plans[1].actions


def test_it_is_chosen_before_anything_is_computed_again() -> None:
    blocks = {f"blocks.{index}": Block(time=1000) for index in range(4)}
    profile = full_profile(blocks)
    lower = trace_of(blocks, KEEP, head=1)
    profile = full_profile(blocks, variants={**profile.variants, TraceKey(loss_by_rows=True): lower})
    baseline = decide(profile, resolve(Config(), hardware_of())).baseline_peak_bytes
    config = Config(mode="conservative", memory_budget_gb=(baseline - 1) / 1e9, enable_bucketed_step=False)
    plan = decide(profile, resolve(config, hardware_of()))
    assert [type(action) for action in plan.actions] == [LossByRows]
    assert plan.actions[0].reason.numbers["frees_bytes"] > 0
    off = decide(profile, resolve(config.replace(enable_loss_by_rows=False), hardware_of()))
    assert off.predicted_slowdown > plan.predicted_slowdown
    assert not any(isinstance(action, LossByRows) for action in off.actions)


def test_every_mode_has_it() -> None:
    assert all(Config(mode=mode).enable_loss_by_rows for mode in memscale.OptimizationMode)
    assert RunOptions(loss_by_rows=True).is_exact
