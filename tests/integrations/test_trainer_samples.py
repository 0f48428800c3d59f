"""A Trainer that is told what will come is planned for before it trains."""

from __future__ import annotations

import pathlib

import pytest
import torch

import memscale
from memscale._execute.executor import executor_of
from tests.integrations.test_huggingface import LENGTH, assert_same_training, build, make_trainer

QUIET = memscale.Config(enable_logging=False, mode="conservative")


def batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.zeros(4, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def test_a_sample_is_planned_for_at_once_and_training_is_the_same(tmp_path: pathlib.Path) -> None:
    theirs = make_trainer(tmp_path / "theirs")
    theirs.train()
    ours = make_trainer(tmp_path / "ours")
    memscale.wrap(ours, QUIET, sample_input=batch())
    plan = executor_of(ours.model).plan  # type: ignore[union-attr]
    assert plan is not None
    assert any(f"4x{LENGTH}" in line for line in plan.inputs)
    ours.train()
    assert_same_training(ours, theirs)
    memscale.detach(ours)


def test_what_does_not_fit_is_said_before_the_training(tmp_path: pathlib.Path) -> None:
    trainer = make_trainer(tmp_path)
    least = memscale.estimate(build(), batch(), config=QUIET).baseline_peak_bytes
    with pytest.raises(memscale.DoesNotFitError, match="Of the batches given, the largest that fits is"):
        memscale.wrap(
            trainer, QUIET.replace(memory_budget_gb=1.1 * least / 1e9), sample_input=batch(), lengths=[LENGTH, 64]
        )


def test_a_model_that_is_not_there_yet_has_no_sample(tmp_path: pathlib.Path) -> None:
    trainer = make_trainer(tmp_path, model_init=build)
    if trainer.model is None:
        with pytest.raises(ValueError, match="wrap it without them"):
            memscale.wrap(trainer, QUIET, sample_input=batch())
