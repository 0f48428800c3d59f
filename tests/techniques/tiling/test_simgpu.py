"""Tiling on an accelerator whose bytes are counted exactly."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale
import simgpu  # noqa: F401  the device must be there before the first backward of this process
from memscale import Config
from memscale._execute.executor import executor_of
from memscale._plan import TileAttention, TileHead, TileMlp
from memscale.techniques.tiling.head.lazy import LazyLogits
from tests.techniques.tiling.models import (
    LOSS_BOUND,
    Attached,
    HandWritten,
    assert_near,
    assert_same_gradients,
    builds,
    hugging_face,
    labels,
    relative,
    shifted_loss,
    tokens,
)

A = torch.accelerator
VOCABULARY = 50257


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_races):
    """Every test here must also be free of races."""


@pytest.fixture(autouse=True)
def _nothing_survives() -> None:
    """In place of the check of that name: torch's device threads rightly outlive a test here."""


def head_peak(rows: int | None, *, batch: int, length: int, width: int) -> tuple[int, int, torch.Tensor]:
    """(peak, what is left of it, loss) of head, loss and backward; the plain head with None."""
    torch.manual_seed(0)
    box = nn.ModuleDict({"head": nn.Linear(width, VOCABULARY, bias=False)}).to("simgpu")
    hidden = torch.randn(batch, length, width).to("simgpu").requires_grad_()
    target = torch.randint(0, VOCABULARY, (batch, length)).to("simgpu")
    with Attached(box, *([] if rows is None else [TileHead("head", rows)])):
        before = A.memory_allocated()
        A.reset_peak_memory_stats()
        loss = F.cross_entropy(box["head"](hidden).view(-1, VOCABULARY), target.view(-1))
        loss.backward()
        return A.max_memory_allocated() - before, A.memory_allocated() - before, loss.detach().cpu()


def test_the_heads_share_falls_tenfold():
    """Absolute bytes, as the allocator counts them. The share is what the head needs above the gradients it leaves."""
    shape = {"batch": 1, "length": 256, "width": 64}
    plain_peak, plain_left, plain_loss = head_peak(None, **shape)
    peak, left, loss = head_peak(16, **shape)
    logits_bytes = 256 * VOCABULARY * 4
    assert plain_peak >= 2.9 * logits_bytes
    assert peak - left <= (plain_peak - plain_left) / 10
    assert peak <= plain_peak / 5  # gradients included
    assert abs(peak - left - 16 * VOCABULARY * 4) < 200_000
    assert_near(loss, plain_loss, LOSS_BOUND)


@pytest.mark.full
def test_the_heads_share_falls_tenfold_at_the_size_of_the_issue():
    shape = {"batch": 4, "length": 512, "width": 128}
    plain_peak, plain_left, plain_loss = head_peak(None, **shape)
    peak, left, loss = head_peak(128, **shape)
    assert peak - left <= (plain_peak - plain_left) / 10
    assert peak <= plain_peak / 10
    assert_near(loss, plain_loss, LOSS_BOUND)


def on_device(build) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build().to("simgpu")
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("name", ["hand-written", "gpt2", "t5"])
def test_same_training_on_the_device(name):
    ours, plain = on_device(
        lambda: HandWritten() if name == "hand-written" else hugging_face(name, attn_implementation="eager").train()
    )
    actions = [TileHead("head" if name == "hand-written" else "lm_head", 7)]
    if name == "gpt2":
        actions += [TileAttention(f"transformer.h.{layer}.attn", 5) for layer in range(2)]
        actions += [TileMlp(f"transformer.h.{layer}.mlp", 3) for layer in range(2)]
    ids, target = tokens().to("simgpu"), labels().to("simgpu")
    with Attached(ours, *actions), builds() as built:
        losses = []
        for model in (ours, plain):
            torch.manual_seed(3)
            if name == "hand-written":
                losses.append(shifted_loss(model(ids), target))
            else:
                losses.append(model(input_ids=ids, labels=target).loss)
            losses[-1].backward()
        assert not built
    assert_near(losses[0].cpu(), losses[1].cpu(), LOSS_BOUND)
    assert_same_gradients(ours.cpu(), plain.cpu())


@pytest.mark.parametrize("recovers", [False, True])
def test_logits_that_a_wrapped_model_returns_stay_lazy(recovers):
    """Whoever follows the forwards of a wrapped model looks at the nodes of its outputs, and must not be taken for
    someone who hooks them: backward would build the logits, which the plan's number does not hold."""
    model = hugging_face("gpt2", vocab_size=VOCABULARY, n_positions=256).train().to("simgpu")
    ids = torch.randint(0, VOCABULARY, (2, 256)).to("simgpu")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    config = Config(
        enable_logging=False, enable_tiling=True, enable_checkpointing=False, enable_offloading=False,
        use_8bit_optimizer=False, use_mixed_precision=False, memory_budget_gb=0.12, recover_from_oom=recovers,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with memscale.optimize(model, optimizer, config, batch) as executor, builds() as built:
        assert any(isinstance(action, TileHead) for action in executor.plan.actions)
        for _ in range(2):
            A.reset_peak_memory_stats()
            output = model(**batch)
            output.loss.backward()
            assert type(output.logits) is LazyLogits
            assert A.max_memory_allocated() <= 1.01 * executor.plan.predicted_peak_bytes
            optimizer.step()
            optimizer.zero_grad()
    assert not built


@pytest.mark.full
def test_a_long_sequence_trains_under_a_cap_where_the_plain_model_does_not(cap):
    """4 x 4096 tokens of a small GPT-2, one step each."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=1, n_positions=4096, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to("simgpu")
    ids = torch.randint(0, VOCABULARY, (4, 4096)).to("simgpu")
    logits_bytes = ids.numel() * VOCABULARY * 4
    cap_bytes = A.memory_allocated() + logits_bytes // 4
    cap(cap_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config = Config(
        enable_logging=False, enable_tiling=True, enable_checkpointing=False, enable_offloading=False,
        use_8bit_optimizer=False, use_mixed_precision=False, memory_budget_gb=cap_bytes / 1e9,
    )  # fmt: skip
    with memscale.optimize(model, optimizer, config, {"input_ids": ids, "labels": ids}):
        executor = executor_of(model)
        assert executor is not None
        assert any(isinstance(action, TileHead) for action in executor.plan.actions)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        assert A.max_memory_allocated() <= cap_bytes
    assert relative(loss.cpu(), torch.tensor(10.8)) < 0.02  # ln(50257) at random weights
