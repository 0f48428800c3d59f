"""Sizes of tiles come from the budget, through `memscale.wrap`: the tighter, the smaller; and training is the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._execute.executor import executor_of
from memscale._plan import TileAttention, TileHead, TileMlp
from memscale.techniques.tiling.head.lazy import LazyLogits
from tests.techniques.tiling.models import LOSS_BOUND, assert_near, assert_same_gradients

VOCABULARY = 2048
CONFIG = Config(
    enable_logging=False,
    enable_tiling=True,
    enable_offloading=False,
    use_mixed_precision=False,
    use_8bit_optimizer=False,
)


def wide_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=256, attn_implementation="eager",
        use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch(num_samples=4, length=256):
    ids = torch.randint(0, VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def under(budget_bytes, config=CONFIG):
    """The plan under this budget, after a step that is right."""
    model = wide_gpt2()
    plain = copy.deepcopy(model)
    memscale.wrap(model, config.replace(memory_budget_gb=budget_bytes / 1e9), batch())
    executor = executor_of(model)
    assert executor is not None
    losses = []
    for each in (model, plain):
        losses.append(each(**batch()).loss)
        losses[-1].backward()
    memscale.detach(model)
    assert executor.plan.fits
    assert executor.plan.predicted_peak_bytes <= budget_bytes
    assert_near(losses[0], losses[1], LOSS_BOUND)
    assert_same_gradients(model, plain)
    return executor.plan


def rows_of_head(plan):
    return [action.rows for action in plan.actions if isinstance(action, TileHead)]


@pytest.mark.slow
def test_rows_of_the_head():
    """No tiles where the model fits; half the rows of the batch; a byte less, and they are smaller."""
    config = CONFIG.replace(enable_checkpointing=False)
    assert rows_of_head(under(100e6, config)) == []
    first = under(32e6, config)
    assert rows_of_head(first) == [512]
    assert rows_of_head(under(first.predicted_peak_bytes - 1, config)) == [256]


class Unsure(nn.Module):
    """Wide inside, but it divides by the length of its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()) / x.shape[1]


def test_what_is_not_sure_is_left_alone_and_said(caplog):
    model = nn.Sequential(nn.Linear(8, 8), Unsure(), nn.Linear(8, 8))
    with caplog.at_level("INFO", "memscale"):
        memscale.wrap(model, CONFIG.replace(force_optimize=True), torch.randn(2, 64, 8))
    executor = executor_of(model)
    assert executor is not None
    assert not [a for a in executor.plan.actions if isinstance(a, TileHead | TileAttention | TileMlp)]
    (said,) = [record.getMessage() for record in caplog.records if "nothing to tile" in record.getMessage()]
    assert "no head" in said
    assert "no attention was seen" in said
    assert "depends on the length of the sequence" in said
    memscale.detach(model)


def test_a_batch_no_larger_than_a_tile_takes_the_plain_path():
    model = wide_gpt2()
    plain = copy.deepcopy(model)
    memscale.wrap(model, CONFIG.replace(enable_checkpointing=False, memory_budget_gb=0.032), batch())
    for num_samples, kind in ((4, LazyLogits), (2, torch.Tensor)):  # 1024 rows in tiles of 512; 512 rows
        model.zero_grad()
        plain.zero_grad()
        outputs = [each(**batch(num_samples)) for each in (model, plain)]
        assert type(outputs[0].logits) is kind
        for output in outputs:
            output.loss.backward()
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    memscale.detach(model)


@pytest.mark.full
def test_numbers_of_tiles_inside_the_blocks():
    """When checkpoints and a tiled head are not enough, scores and MLPs are cut, and the finer the less there is."""
    first = under(13e6)
    second = under(first.predicted_peak_bytes - 1_000_000)
    for plan, rows, num_tiles in ((first, 128, 2), (second, 64, 4)):
        assert {action.rows for action in plan.actions if isinstance(action, TileAttention)} == {rows}
        assert {action.num_tiles for action in plan.actions if isinstance(action, TileMlp)} == {num_tiles}
