"""Transfers overlap wherever a device has streams, and block only where the plan shows that they must, and says so."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from memscale import AsyncOffloadConfig, Config, Hardware, Plan
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import choose_strategy
from memscale._decide.travel import Travel, most_in_flight_bytes, travels
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import KEEP
from memscale._profile.inputs import Inputs
from tests.models import WIDTH, Chain, TwoLinears

CARD = dataclasses.replace(Hardware.from_name("T4"), has_caching_allocator=False)
ROWS, DEPTH = 1 << 14, 4
SMALL = AsyncOffloadConfig(min_tensor_bytes=1024, window_bytes=1 << 21, prefetch_bytes=1 << 21)
"""Windows of about a block's output, as those of large models are."""


def config_of(**fields: Any) -> Config:
    return Config(enable_logging=False, **{"async_config": SMALL, **fields})


def planner_of(config: Config, hardware: Hardware = CARD) -> Planner:
    model = Chain(*(TwoLinears() for _ in range(DEPTH)))
    return Planner(Job(model, config, hardware), Inputs(args=(torch.empty(ROWS, WIDTH, device="meta"),)))


def plan_of(hardware: Hardware = CARD, **fields: Any) -> Plan:
    config = config_of(**fields)
    planner = planner_of(config, hardware)
    return planner.plan(choose_strategy(planner.job.eligible))


@functools.cache
def lowest(overlaps: bool | None) -> Plan:
    return plan_of(async_offload=overlaps, force_optimize=True)


def lines(plan: Plan) -> list[str]:
    return [line for line in plan.explain().splitlines() if line.startswith("  transfers:")]


def is_overlapped(plan: Plan) -> bool:
    assert plan.conditions is not None
    return plan.conditions.async_offload


def test_transfers_overlap_where_nobody_says_otherwise() -> None:
    """Without recomputation, which needs no transfers and may be as fast."""
    kept = plan_of(async_offload=True, force_optimize=True, enable_checkpointing=False)
    wishes: dict[str, Any] = {"memory_budget_gb": 1.1 * kept.predicted_peak_bytes / 1e9, "enable_checkpointing": False}
    plan, blocking = plan_of(**wishes), plan_of(**wishes, async_offload=False)
    assert plan.fits
    assert is_overlapped(plan)
    assert not is_overlapped(blocking)
    assert plan.predicted_slowdown < blocking.predicted_slowdown
    assert lines(plan) == [
        "  transfers: beside compute, with 2.1 MB on their way out at most and 2 layers fetched ahead"
    ]
    assert lines(blocking) == ["  transfers: without overlap, compute waits for them"]
    assert Plan.from_json(plan.to_json()) == plan


def test_they_block_where_only_that_fits_and_the_plan_says_so() -> None:
    assert lowest(False).predicted_peak_bytes < lowest(True).predicted_peak_bytes
    between = (lowest(False).predicted_peak_bytes + lowest(True).predicted_peak_bytes) // 2
    plan = plan_of(memory_budget_gb=between / 1e9)
    assert plan.fits
    assert not is_overlapped(plan)
    assert plan == dataclasses.replace(
        plan_of(memory_budget_gb=between / 1e9, async_offload=False), conditions=plan.conditions
    )
    (line,) = lines(plan)
    assert "without overlap" in line
    assert "nothing fits the budget" in line
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert lines(read) == [line]


def test_the_lowest_peak_is_that_of_the_lower_way() -> None:
    found = lowest(None)
    assert found.predicted_peak_bytes == min(lowest(way).predicted_peak_bytes for way in (True, False))
    assert "the lowest peak is higher" in lines(found)[0]


def test_of_equally_low_peaks_the_overlapped_one_is_taken() -> None:
    """Where all that travels is smaller than what is worth a transfer, both ways are the same."""
    nothing = AsyncOffloadConfig(min_tensor_bytes=1 << 30)
    plan = plan_of(force_optimize=True, async_config=nothing, enable_checkpointing=False)
    assert is_overlapped(plan)


def test_the_other_way_is_not_rehearsed_where_it_cannot_be_better() -> None:
    config = config_of(memory_budget_gb=0.85 * lowest(True).baseline_peak_bytes / 1e9)
    planner = planner_of(config)
    assert planner.plan(choose_strategy(planner.job.eligible.under(config))).fits
    assert not planner._others


def test_where_blocking_is_faster_it_is_taken() -> None:
    """A slow link, and nothing but transfers to save memory by: what windows hold must be sent away as well."""
    slow = dataclasses.replace(CARD, link_bytes_per_s=1e8, blocking_link_bytes_per_s=None)
    fields = {"enable_checkpointing": False, "memory_budget_gb": 0.85 * lowest(True).baseline_peak_bytes / 1e9}
    overlapped, blocking, plan = (plan_of(slow, **fields, async_offload=way) for way in (True, False, None))
    assert overlapped.fits
    assert blocking.predicted_slowdown < overlapped.predicted_slowdown
    assert plan.predicted_slowdown == blocking.predicted_slowdown
    assert "this budget takes longer" in lines(plan)[0]


def test_neither_is_looked_into_where_the_model_fits() -> None:
    config = config_of()
    planner = planner_of(config)
    plan = planner.plan(choose_strategy(planner.job.eligible.under(config)))
    assert not plan.actions
    assert not lines(plan)
    assert not planner._others
    assert not planner.profile.variants


def test_a_device_without_streams_blocks_silently() -> None:
    cpu = dataclasses.replace(CARD, device_type="cpu", disk_free_bytes=10**12)
    plan = plan_of(cpu, force_optimize=True, offload_dir=".")
    assert plan.conditions is not None
    assert not is_overlapped(plan)
    assert plan.conditions.blocking is None
    assert not lines(plan)


def test_a_planner_of_another_way_shares_the_stage() -> None:
    planner = planner_of(config_of())
    other = planner.by(Travel(False, SMALL))
    assert other is planner.by(Travel(False, SMALL))
    assert planner.by(planner.travel) is planner
    assert other.stage is planner.stage
    assert (planner.costs.travel, other.costs.travel) == (planner.travel, other.travel)


def test_no_plan_is_lower_by_more_than_what_can_be_on_its_way() -> None:
    """What the search for a better plan is cut short by."""
    overlapped = planner_of(config_of())
    travel, blocking = travels(overlapped.job.config, CARD)
    other = overlapped.by(blocking)
    for planner in (overlapped, other):
        planner.look_into_everything(planner.job.eligible.under(config_of()))
    models = overlapped.cost_model(), other.cost_model()
    spare_bytes = most_in_flight_bytes(models[0], travel)
    assert most_in_flight_bytes(models[1], blocking) == 0
    for treatment in (KEEP, *models[0].treatments):
        choice = Choice(tuple((fqn, treatment) for fqn in models[0].blocks))
        high, low = (model.evaluate(choice).peak_bytes for model in models)
        assert low <= high <= low + spare_bytes, treatment
        fast, slow = (one.evaluate(choice).step_ms for one in (CostModel(overlapped.profile, CARD), models[1]))
        assert fast <= slow * (1 + 1e-9), treatment
