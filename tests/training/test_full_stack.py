"""`apply_all_optimizations`: the pair to train with, what it reports, and that it is undone."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
import simgpu  # noqa: F401  before the first backward: autograd counts the devices then
from memscale import Config, MemScaleError
from memscale._execute.executor import executor_of
from memscale._plan import Checkpoint, MixedPrecision, OffloadOptimizer, QuantizeOptimizer, StreamParameters
from tests._torch.test_overrides import snapshot
from tests.lanes import some
from tests.techniques.optimizer8bit.test_in_place import unavailable

QUIET = Config(mode="aggressive", force_optimize=True, enable_logging=False)
ONLY_8_BITS = QUIET.replace(
    enable_checkpointing=False, enable_offloading=False, enable_tiling=False, use_mixed_precision=False
)
"""For tests of what happens to the optimizer: planning for the rest would take most of their time."""


def build(device: str = "cpu") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    config.loss_type = "ForCausalLMLoss"
    return GPT2LMHeadModel(config).to(device)


def batch(number: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (32, 32), generator=torch.Generator().manual_seed(number)).to(device)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: str = "cpu") -> float:
    loss = model(**batch(number, device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def actions(model: nn.Module) -> set[type]:
    return {type(action) for action in executor_of(model).plan.actions}


def test_the_pair_trains_and_schedulers_go_on() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    groups = optimizer.param_groups
    ours, eight_bit = memscale.apply_all_optimizations(model, optimizer, QUIET, sample_input=batch(0))
    assert ours is model
    assert type(eight_bit) is bnb.optim.AdamW8bit
    assert eight_bit.param_groups is groups
    losses = []
    for number in range(8):
        losses.append(step(model, eight_bit, 0))
        scheduler.step()
        assert groups[0]["lr"] == pytest.approx(3e-3 * 0.9 ** (number + 1))
    assert losses[-1] < losses[0] - 0.5
    assert eight_bit.state[model.transformer.wte.weight]["state1"].dtype == torch.float32
    assert eight_bit.state[model.transformer.h[0].mlp.c_fc.weight]["state1"].dtype == torch.uint8
    memscale.detach(model)


def test_detach_undoes_all_of_it() -> None:
    model = build()
    before = snapshot(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    options = list(optimizer.param_groups[0])
    _, eight_bit = memscale.apply_all_optimizations(model, optimizer, QUIET, sample_input=batch(0))
    with pytest.raises(MemScaleError, match="was replaced"):
        optimizer.step()
    step(model, eight_bit, 1)
    memscale.detach(model)
    assert snapshot(model) == before
    assert list(optimizer.param_groups[0]) == options
    assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} == {torch.float32}
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {2.0}
    step(model, optimizer, 2)
    step(model, eight_bit, 3)  # whoever has only the pair can go on with it


def test_it_is_as_low_as_the_mode_goes_and_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level("INFO", "memscale"):
        memscale.apply_all_optimizations(model, optimizer, sample_input=batch(0))
    found = {outcome.technique: outcome for outcome in executor_of(model).outcomes}
    named = {"checkpointing", "tiling", "loss by rows", "offloading", "bucketed step"}
    named |= {"mixed precision", "8-bit optimizer"}
    assert set(found) == named
    assert found["checkpointing"].applied
    assert "2 blocks" in found["checkpointing"].detail
    assert not found["offloading"].applied
    assert "offload_dir" in found["offloading"].detail
    assert (
        found["8-bit optimizer"].detail == "AdamW is replaced by bitsandbytes' AdamW8bit; 2 embeddings stay in 32 bits"
    )
    shown = caplog.text
    assert "the full stack on GPT2LMHeadModel" in shown
    assert "offloading: skipped, the next tier of a CPU is the disk" in shown
    memscale.detach(model)


def test_what_is_switched_off_is_skipped_by_name() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    config = QUIET.replace(use_8bit_optimizer=False, enable_tiling=False, use_mixed_precision=False)
    _, same = memscale.apply_all_optimizations(model, optimizer, config, sample_input=batch(0))
    assert same is optimizer
    found = {outcome.technique: str(outcome) for outcome in executor_of(model).outcomes}
    assert found["8-bit optimizer"] == "8-bit optimizer: skipped, use_8bit_optimizer=False"
    assert found["tiling"] == "tiling: skipped, enable_tiling=False"
    step(model, optimizer, 0)
    memscale.detach(model)


@pytest.mark.slow
@pytest.mark.parametrize("known", some([True, False], "True"))
def test_on_an_accelerator_all_of_it_at_once(known: bool, simgpu_device: Any, no_leaks: Any) -> None:
    """bitsandbytes has no step for this device: the optimizer stays the user's, its state waits in 8 bits."""
    model = build("simgpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sample = batch(0, "simgpu") if known else None
    _, same = memscale.apply_all_optimizations(model, optimizer, QUIET, sample_input=sample)
    assert same is optimizer
    losses = [step(model, optimizer, 0, "simgpu") for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    used = actions(model)
    assert used >= {MixedPrecision, QuantizeOptimizer}
    assert used & {StreamParameters, Checkpoint}
    stats = executor_of(model).stats().transfers
    assert stats["optimizer"].packed_bytes > 0
    if OffloadOptimizer in used:
        assert stats["optimizer"].bytes_to_store > 0
    detail = {outcome.technique: outcome for outcome in executor_of(model).outcomes}["8-bit optimizer"].detail
    assert "packed in place (bitsandbytes has no 8-bit step for simgpu)" in detail
    memscale.detach(model)
    assert all(type(entry) is dict for entry in optimizer.state.values())


@pytest.mark.slow
def test_offloading_takes_bitsandbytes_state_as_it_is(tmp_path: Any) -> None:
    """Together with state offload, the 8-bit state is what waits and travels."""
    losses = {}
    for directory in (None, tmp_path):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        config = QUIET.replace(offload_dir=directory, enable_tiling=False)
        _, eight_bit = memscale.apply_all_optimizations(model, optimizer, config, sample_input=batch(0))
        losses[directory] = [step(model, eight_bit, number) for number in range(4)]
        if directory is not None and OffloadOptimizer in actions(model):
            stats = executor_of(model).stats().transfers["optimizer"]
            assert 0 < stats.bytes_to_store < 4 * 4 * 8 * sum(p.numel() for p in model.parameters()) / 2
        memscale.detach(model)
    assert losses[None] == losses[tmp_path]


def test_an_error_leaves_the_optimizer_as_it_was() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(memscale.DoesNotFitError):
        memscale.apply_all_optimizations(
            model, optimizer, ONLY_8_BITS.replace(force_optimize=False, memory_budget_gb=1e-6), batch(0)
        )
    assert executor_of(model) is None
    assert list(optimizer.state_dict()["param_groups"][0]) == list(saved["param_groups"][0])
    assert optimizer.state.keys() == set(model.parameters())
    step(model, optimizer, 1)


@pytest.mark.parametrize("wrong", [None, "adamw", 3])
def test_it_takes_an_optimizer(wrong: Any) -> None:
    model = build()
    with pytest.raises(TypeError, match="optimizer"):
        memscale.apply_all_optimizations(model, wrong)
    assert executor_of(model) is None


def test_an_optimizer_of_another_model_is_named() -> None:
    model, optimizer = nn.Linear(8, 8), torch.optim.AdamW(nn.Linear(8, 8).parameters())
    with pytest.warns(UserWarning, match="AdamW has no parameter of the Linear"):
        memscale.apply_all_optimizations(model, optimizer, QUIET, torch.ones(2, 8))
    memscale.detach(model)
    with pytest.warns(UserWarning, match="AdamW has no parameter of the Linear"):  # noqa: SIM117
        with memscale.optimize(model, optimizer, QUIET, torch.ones(2, 8)):
            pass


def test_an_8_bit_class_that_came_is_planned_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(128, 128)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    _, same = memscale.apply_all_optimizations(model, optimizer, QUIET, torch.ones(2, 128))
    assert same is optimizer
    assert "cannot be tried" not in caplog.text
    memscale.detach(model)


def test_without_a_counterpart_the_optimizer_is_named_once() -> None:
    model = build()
    optimizer = torch.optim.NAdam(model.parameters())
    with pytest.warns(UserWarning, match="NAdam has no 8-bit counterpart"):
        _, same = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    assert same is optimizer
    step(model, optimizer, 0)
    memscale.detach(model)


def test_calling_it_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pair, and with the optimizer that was replaced: no state is lost either way."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    _, first = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    step(model, first, 0)
    _, second = memscale.apply_all_optimizations(model, first, ONLY_8_BITS, sample_input=batch(0))
    assert second is first
    found = {outcome.technique: outcome for outcome in executor_of(model).outcomes}
    assert "by itself" in found["8-bit optimizer"].detail
    step(model, second, 1)
    assert {entry["step"] for entry in second.state.values()} == {2}
    memscale.detach(model)
    _, third = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    _, fourth = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    assert type(fourth) is bnb.optim.AdamW8bit
    assert fourth is not third
    assert {entry["step"] for entry in fourth.state.values()} == {1}
    memscale.detach(model)


def test_the_optimizer_of_an_earlier_call_refuses_to_step() -> None:
    """Beside its successor it would train the same weights with state that is no longer theirs."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    _, first = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    step(model, first, 0)
    _, second = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(memscale.MemScaleError, match="AdamW8bit is that of an earlier"):
        step(model, first, 1)
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    step(model, second, 1)
    memscale.detach(model)
    step(model, first, 2)  # nothing stands in now: it may be used again


def test_without_bitsandbytes_it_warns_once_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable(monkeypatch)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="bitsandbytes") as caught:
        _, same = memscale.apply_all_optimizations(model, optimizer, ONLY_8_BITS, sample_input=batch(0))
    assert len(caught) == 1
    step(model, same, 0)  # no second warning: warnings are errors here
    assert same is optimizer
    memscale.detach(model)
