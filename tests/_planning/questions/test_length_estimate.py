"""Peak and time over a distribution of lengths."""

from __future__ import annotations

import pytest
import torch

import memscale
from memscale._planning.job import open_job
from memscale._planning.questions.length_estimate import estimate_lengths
from memscale._profile.inputs import Inputs
from memscale.report.terminal import length_lines
from tests._planning.loop.test_shapes import LONG, MIDDLE, SHORT, Words, config, ids

LENGTHS = {SHORT: 6, 11: 1, MIDDLE: 2, LONG: 1}


def test_each_bucket_has_the_plan_that_a_run_would_have() -> None:
    tight = config(0.6)
    model = Words()
    found = estimate_lengths(open_job(model, tight), Inputs((ids(LONG),), {}), LENGTHS)
    assert [(row.longest, row.share) for row in found.rows] == [(LONG, 0.1), (48, 0.2), (SHORT, 0.7)]
    plans = [row.plan for row in found.rows]
    assert all(plan is not None and plan.fits for plan in plans)
    assert all(row.planned_bytes is not None and row.planned_bytes <= found.budget_bytes for row in found.rows)
    assert [bool(plan and plan.actions) for plan in plans] == [True, False, False]
    assert found.rows[1].planned_ms == found.rows[1].plain_ms
    assert found.slowdown is not None
    assert 1.0 < found.slowdown < plans[0].predicted_slowdown  # type: ignore[union-attr]
    memscale.wrap(model, tight, sample_input=ids(LONG), lengths=LENGTHS)
    assert model._memscale_executor.plan.predicted_peak_bytes == found.rows[0].planned_bytes  # type: ignore[union-attr]
    memscale.detach(model)


def test_where_nothing_is_done_each_length_has_the_peak_of_its_own_plain_step() -> None:
    found = estimate_lengths(open_job(Words(), config(2.0)), Inputs((ids(LONG),), {}), LENGTHS)
    assert not any(row.plan and row.plan.actions for row in found.rows)
    assert [row.planned_bytes for row in found.rows] == [row.plain_bytes for row in found.rows]
    assert found.rows[-1].plain_bytes < found.rows[0].plain_bytes


def test_lengths_that_do_not_fit_are_said_with_the_longest_that_does() -> None:
    tight = config(0.6)
    found = estimate_lengths(open_job(Words(), tight), Inputs((ids(LONG),), {}), {SHORT: 1, 8 * LONG: 3})
    text = "\n".join(length_lines("words", found))
    assert found.rows[0].plan is None
    assert found.slowdown is None
    assert "does not fit" in text
    assert "The longest length that fits is 12." in text


def test_a_batch_without_a_length_is_refused() -> None:
    with pytest.raises(memscale.MemScaleError, match="agree in their second dimension"):
        estimate_lengths(open_job(Words(), config(0.6)), Inputs((torch.zeros(3),), {}), {4: 1})
