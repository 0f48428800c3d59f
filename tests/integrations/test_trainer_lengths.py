"""A Trainer whose dataset has lengths is planned for all of them before its first step."""

from __future__ import annotations

import copy
import logging
from typing import Any

import datasets
import pytest
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

import memscale
from memscale._execute.executor import executor_of
from memscale.integrations.trainer_lengths import _lengths_of, batches_of
from tests.integrations.test_huggingface import assert_same_training, make_trainer, pad, ragged

LENGTHS = [24, 8, 12, 16, 32, 32, 10, 10, 60, 40, 8, 60]
IN_ORDER = {"max_steps": 3, "train_sampling_strategy": "sequential"}


def config(**fields: Any) -> memscale.Config:
    return memscale.Config(**{"mode": "conservative", "enable_logging": False, **fields})


def test_the_plan_is_made_once_for_the_longest_batch_and_training_is_the_same(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = make_trainer(tmp_path, ragged(LENGTHS), data_collator=pad, **IN_ORDER)
    theirs.train()
    ours = memscale.wrap(make_trainer(tmp_path, ragged(LENGTHS), data_collator=pad, **IN_ORDER), config())
    with caplog.at_level(logging.INFO, "memscale"):
        ours.train()
    assert "has batches of up to 60: planned for the lengths [60, 48, 32, 24, 16, 12, 8]" in caplog.text
    assert "planning again" not in caplog.text
    plan = executor_of(ours.model).plan
    logged = max(entry.get("memscale_peak_gb", 0) for entry in ours.state.log_history)
    assert plan.predicted_peak_bytes == pytest.approx(logged * 1e9, rel=0.02)
    assert_same_training(ours, theirs)
    memscale.detach(ours)


def test_a_longest_batch_that_cannot_fit_is_refused_before_the_first_step(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, ragged([8] * 8 + [60]), data_collator=pad, **IN_ORDER)
    before = copy.deepcopy(trainer.model.state_dict())
    ids = torch.zeros(4, 60, dtype=torch.long)
    estimate = memscale.estimate(trainer.model, {"input_ids": ids, "labels": ids}, config=config())
    short = memscale.estimate(trainer.model, {"input_ids": ids[:, :8], "labels": ids[:, :8]}, config=config())
    lowest, enough = (each.by_mode["conservative"].predicted_peak_bytes for each in (estimate, short))
    budget = (enough + 0.3 * (lowest - enough)) / 1e9
    memscale.wrap(trainer, config(memory_budget_gb=budget, offload_dir=None))
    with pytest.raises(memscale.DoesNotFitError, match=r"input_ids 4x60.*the largest that fits is input_ids 4x8"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert executor_of(trainer.model) is None


ROWS = {"input_ids": [[1] * length for length in (3, 7, 5)], "labels": [[1] * length for length in (3, 7, 5)]}


def test_lengths_are_read_from_what_is_in_memory() -> None:
    table = datasets.Dataset.from_dict(ROWS)
    assert _lengths_of(table, None, "length") == [3, 7, 5]
    assert _lengths_of(table.select([2, 1]), None, "length") == [5, 7]
    assert _lengths_of(table.add_column("length", [30, 70, 50]), None, "length") == [30, 70, 50]
    assert _lengths_of([{"input_ids": torch.zeros(4)}, {"input_ids": [1]}], None, "length") == [4, 1]
    sampler = LengthGroupedSampler(batch_size=1, lengths=[9, 8, 7])
    assert _lengths_of(table, sampler, "length") == [9, 8, 7]


def test_what_would_have_to_be_made_first_is_not_read() -> None:
    def fail(rows: Any) -> Any:
        raise AssertionError("it was read")

    table = datasets.Dataset.from_dict(ROWS)
    assert _lengths_of(table.with_transform(fail), None, "length") == []
    assert _lengths_of(table.remove_columns(["input_ids"]), None, "length") == []
    assert _lengths_of(iter(ROWS), None, "length") == []
    assert _lengths_of([(torch.zeros(3), 1)], None, "length") == []
    assert _lengths_of([], None, "length") == []


def test_random_numbers_that_a_collator_draws_are_drawn_again(tmp_path: Any) -> None:
    def drawing(rows: Any) -> Any:
        torch.rand(3)
        return pad(rows)

    trainer = make_trainer(tmp_path, ragged(LENGTHS), data_collator=drawing)
    state = torch.get_rng_state()
    loader = trainer.get_train_dataloader()
    coming = batches_of(loader, trainer.args, trainer.model, counts_items=False)
    assert coming is not None
    assert coming.batch["input_ids"].shape == (4, 60)
    assert coming.lengths == sorted(set(LENGTHS))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_collator_that_pads_to_one_length_needs_one_plan(tmp_path: Any) -> None:
    def to_the_longest(rows: Any) -> Any:
        padded = pad([*rows, {"input_ids": torch.zeros(60, dtype=torch.long)}])
        return {name: value[:-1] for name, value in padded.items()}

    trainer = make_trainer(tmp_path, ragged(LENGTHS), data_collator=to_the_longest)
    assert batches_of(trainer.get_train_dataloader(), trainer.args, trainer.model, counts_items=None) is None
