"""Advice where nothing fits: true, bounded, and it says what was tried."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from memscale import Config, DoesNotFitError, Hardware
from memscale._decide.policy import choose_strategy
from memscale._plan import Plan
from memscale._planning import advice as advice
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale._units import round_up
from tests.profiles import hardware_of

HARDWARE = hardware_of()
CONSERVATIVE = Config(mode="conservative")


def encoder() -> nn.Module:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
        return nn.Sequential(nn.Embedding(50, 32), *blocks)


def batch_of(size: int, length: int = 32) -> Inputs:
    return Inputs((torch.zeros(size, length, dtype=torch.long, device="meta"),))


def lowest(inputs: Inputs) -> tuple[Planner, Plan]:
    planner = Planner(Job(encoder(), CONSERVATIVE, HARDWARE), inputs)
    return planner, planner.plan(choose_strategy(planner.job.eligible.under(CONSERVATIVE.replace(force_optimize=True))))


def too_tight(planner: Planner) -> Config:
    """Room for what does not depend on the batch, and none for anything else."""
    return CONSERVATIVE.replace(
        memory_budget_gb=advice._least_bytes(planner, planner.job.eligible.under(CONSERVATIVE)) / 1e9
    )


@pytest.fixture(scope="module")
def small() -> tuple[int, int]:
    """What the lowest plan peaks at with a batch of 8, and with one sample."""
    return lowest(batch_of(8))[1].predicted_peak_bytes, lowest(batch_of(1))[1].predicted_peak_bytes


@pytest.fixture
def sizes_rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    plan_at = advice._Descent._plan_at

    def counted(self: advice._Descent, size: int) -> Plan | None:
        found.append(size)
        return plan_at(self, size)

    monkeypatch.setattr(advice._Descent, "_plan_at", counted)
    return found


def test_a_batch_is_named_that_fits_and_what_was_tried(small: tuple[int, int], sizes_rehearsed: list[int]) -> None:
    config = CONSERVATIVE.replace(memory_budget_gb=small[0] * 1.01 / 1e9)
    with pytest.raises(DoesNotFitError, match="lower the batch size from 64 to") as caught:
        make_plan(Job(encoder(), config, HARDWARE), batch_of(64))
    named = int(str(caught.value).split("from 64 to ")[1].split()[0])
    assert named >= 8
    assert make_plan(Job(encoder(), config, HARDWARE), batch_of(named)).fits
    assert len(sizes_rehearsed) <= advice.MAX_SIZES
    assert f"Sizes that were rehearsed: batch size {', '.join(map(str, sizes_rehearsed))}." in str(caught.value)


def test_a_shorter_sequence_is_named_where_no_batch_fits(small: tuple[int, int]) -> None:
    planner, plan = lowest(batch_of(1, 256))
    found = advice.find_smaller(
        planner, planner.job.eligible.under(CONSERVATIVE.replace(memory_budget_gb=small[1] * 1.01 / 1e9)), plan
    )
    assert found is not None
    assert found.remedy.startswith("lower the sequence length from 256 to ")
    assert found.tried.startswith("sequence length 128, ")


def test_where_nothing_fits_no_more_is_tried_than_the_bound(sizes_rehearsed: list[int]) -> None:
    planner, plan = lowest(batch_of(64))
    found = advice.find_smaller(planner, planner.job.eligible.under(too_tight(planner)), plan)
    assert found is not None
    assert found.remedy == ""
    assert found.tried.startswith("batch size 32, ")
    assert " and sequence length 16, " in found.tried
    assert len(sizes_rehearsed) <= 2 * advice.MAX_SIZES


def test_long_steps_are_tried_less_often_and_the_longest_not_at_all(
    monkeypatch: pytest.MonkeyPatch, sizes_rehearsed: list[int]
) -> None:
    planner, plan = lowest(batch_of(64))
    num_operators = sum(segment.num_launches for segment in planner.profile.plain.segments)
    config = too_tight(planner)
    monkeypatch.setattr(advice, "MAX_OPERATORS", 5 * num_operators)
    assert advice.find_smaller(planner, planner.job.eligible.under(config), plan) is not None
    assert len(sizes_rehearsed) == 2
    monkeypatch.setattr(advice, "MAX_OPERATORS", num_operators)
    assert advice.find_smaller(planner, planner.job.eligible.under(config), plan) is None
    assert len(sizes_rehearsed) == 2


def test_no_size_is_tried_where_parameters_and_their_company_do_not_fit(sizes_rehearsed: list[int]) -> None:
    planner, _ = lowest(batch_of(64))
    parameter_bytes = sum(round_up(parameter.nbytes, 512) for parameter in planner.model.parameters())
    least_bytes = advice._least_bytes(planner, planner.job.eligible.under(CONSERVATIVE))
    assert least_bytes == 4 * parameter_bytes  # with gradients and AdamW's state
    config = CONSERVATIVE.replace(memory_budget_gb=0.9 * least_bytes / 1e9)
    with pytest.raises(DoesNotFitError, match="no smaller batch fits") as caught:
        make_plan(Job(encoder(), config, HARDWARE), batch_of(64))
    assert sizes_rehearsed == []
    assert caught.value.batch_size is None
    assert "Sizes that were rehearsed" not in str(caught.value)


def test_what_a_step_takes_at_least_is_no_more_than_the_smallest_batch_takes(small: tuple[int, int]) -> None:
    planner, _ = lowest(batch_of(64))
    assert 0 < advice._least_bytes(planner, planner.job.eligible.under(CONSERVATIVE)) < small[1]


@pytest.mark.parametrize("config", [Config(use_8bit_optimizer=True), Config(step_in_backward=True)])
def test_where_state_or_gradients_could_be_less_nothing_is_ruled_out(config: Config) -> None:
    planner, _ = lowest(batch_of(64))
    assert advice._least_bytes(planner, planner.job.eligible.under(config.replace(mode="conservative"))) == 0


def test_where_state_could_wait_elsewhere_nothing_is_ruled_out(tmp_path: pathlib.Path) -> None:
    planner, _ = lowest(batch_of(64))
    assert advice._least_bytes(planner, planner.job.eligible.under(Config(offload_dir=tmp_path))) == 0


def test_on_a_card_the_size_is_found_by_what_is_reserved_not_by_what_is_live() -> None:
    card = Hardware.from_name("RTX 3090")
    inputs = batch_of(2048)
    planner = Planner(Job(encoder(), CONSERVATIVE, card), inputs)
    plan = planner.plan(choose_strategy(planner.job.eligible.under(CONSERVATIVE.replace(force_optimize=True))))
    reserved_bytes = plan.predicted_reserved_bytes
    assert reserved_bytes is not None
    budget = int(0.9 * reserved_bytes)
    assert plan.predicted_peak_bytes < budget  # by live bytes alone this batch fits
    config = CONSERVATIVE.replace(memory_budget_gb=budget / 1e9)
    found = advice.find_smaller(planner, planner.job.eligible.under(config), plan)
    assert found is not None
    assert found.batch_size is not None
    assert found.batch_size > 1.4 * 1024
    assert make_plan(Job(encoder(), config, card), batch_of(found.batch_size)).fits
