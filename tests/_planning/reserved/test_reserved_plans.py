"""A budget bounds reserved bytes where an allocator caches, and live ones elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memscale import Config, Hardware, Plan
from memscale._decide.eligible import resolve
from memscale._decide.policy import choose_strategy
from memscale._errors import DoesNotFitError
from memscale._plan import Checkpoint, StreamParameters
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.reserved.allocation_log import Allocated, Freed
from memscale._planning.saved.saved_plans import refuse_plan
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes

MB = 10**6
CARD = dataclasses.replace(Hardware.from_name("RTX 3090"), host_available_bytes=10**11, host_total_bytes=10**11)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def stack() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Layer() for _ in range(6)))


class Repeated(nn.Module):
    """A batch that is small beside what becomes of it: it does not matter when it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).repeat(8, 1)


def planned(hardware: Hardware = CARD, *, is_batch_small: bool = False, **fields: object) -> Plan:
    config = Config(enable_logging=False, async_offload=False, **fields)  # type: ignore[arg-type]
    model = nn.Sequential(Repeated(), *stack()) if is_batch_small else stack()
    job = Job(model, config, hardware, "adamw")
    planner = Planner(job, Inputs((torch.empty(512 if is_batch_small else 4096, 512, device="meta"),), {}))
    return planner.plan(choose_strategy(planner.job.eligible.under(config)))


def test_a_plain_plan_states_three_numbers() -> None:
    plan = planned()
    assert plan.actions == ()
    assert plan.predicted_allocated_bytes is not None
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_total_bytes is not None
    assert plan.predicted_peak_bytes + 2 * CARD.workspace_bytes <= plan.predicted_allocated_bytes
    assert plan.predicted_allocated_bytes <= plan.predicted_reserved_bytes
    assert plan.predicted_total_bytes == plan.predicted_reserved_bytes + CARD.context_bytes


def test_reserved_bytes_decide_whether_it_fits_as_it_is() -> None:
    plain = planned()
    assert plain.predicted_reserved_bytes is not None
    between = (plain.predicted_peak_bytes + plain.predicted_reserved_bytes) / 2
    plan = planned(memory_budget_gb=between / 1e9)
    assert plan.actions, "live bytes would fit, and what is reserved for them does not"
    assert plan.fits
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_reserved_bytes <= plan.budget_bytes == round(between)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_what_is_promised_is_reserved(share: float) -> None:
    plain = planned()
    budget = share * plain.predicted_peak_bytes
    plan = planned(memory_budget_gb=budget / 1e9)
    assert plan.fits
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_reserved_bytes <= budget


def test_a_budget_above_the_card_does_not_make_it_fit() -> None:
    plain = planned()
    assert plain.predicted_reserved_bytes is not None
    full = dataclasses.replace(CARD, free_bytes=plain.predicted_reserved_bytes - 1)
    assert planned(full, memory_budget_gb=20).predicted_reserved_bytes != plain.predicted_reserved_bytes


def test_without_a_caching_allocator_nothing_is_reserved() -> None:
    elsewhere = dataclasses.replace(CARD, has_caching_allocator=False, workspace_bytes=0)
    plan = planned(elsewhere)
    assert plan.predicted_reserved_bytes is None
    assert plan.predicted_allocated_bytes is None
    assert plan.predicted_total_bytes is None
    assert "reserved" not in plan.explain()


def test_the_numbers_are_in_the_json_and_in_words() -> None:
    plan = planned()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.predicted_reserved_bytes is not None
    assert f"{plan.predicted_reserved_bytes / 1e6:.1f} MB reserved" in plan.explain()


def test_a_saved_plan_is_refused_where_its_reserved_bytes_do_not_fit() -> None:
    plan = planned()
    assert plan.predicted_reserved_bytes is not None
    config = Config(memory_budget_gb=(plan.predicted_reserved_bytes - 1) / 1e9, enable_logging=False)
    with pytest.raises(DoesNotFitError, match="reserves"):
        refuse_plan(plan, resolve(config, CARD))


def test_what_does_not_fit_says_how_much_would_be_reserved() -> None:
    config = Config(mode="conservative", memory_budget_gb=0.25, enable_logging=False, async_offload=False)
    job = Job(stack(), config, CARD, "adamw")
    with pytest.raises(DoesNotFitError, match="raise the budget to"):
        make_plan(job, Inputs((torch.empty(64, 512, device="meta"),), {}))


def test_a_plain_step_whose_live_bytes_fit_says_what_it_reserves_where_that_does_not() -> None:
    """The error named its live bytes, which were within the budget, as what the budget had to be raised to."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    inputs = Inputs((torch.empty(4, 1024, device="meta"),), {})

    def job(budget_gb: float) -> Job:
        return Job(
            model, Config(memory_budget_gb=budget_gb, max_cpu_offload_gb=0.02, enable_logging=False), CARD, "adamw"
        )

    plain = make_plan(job(1.0), inputs)
    assert plain.actions == ()
    assert plain.predicted_reserved_bytes is not None
    between_gb = (plain.predicted_peak_bytes + plain.predicted_reserved_bytes) / 2e9
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(job(between_gb), inputs)
    assert f"raise the budget to {show_bytes(plain.predicted_reserved_bytes)}" in str(refusal.value)
    assert make_plan(job(plain.predicted_reserved_bytes / 1e9), inputs).fits


# ---- less is reserved


def test_the_lowest_plan_asks_the_allocator() -> None:
    plan = planned(mode="conservative", force_optimize=True)
    assert plan.allocator is not None
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_allocated_bytes is not None
    assert plan.predicted_reserved_bytes < 0.98 * plan.allocator.otherwise_reserved_bytes
    assert plan.allocator.otherwise_reserved_bytes == planned_as_it_comes().predicted_reserved_bytes
    assert planned().allocator is None, "a plan that fits leaves the allocator alone"


def planned_as_it_comes() -> Plan:
    config = Config(enable_logging=False, async_offload=False, mode="conservative", force_optimize=True)
    planner = Planner(Job(stack(), config, CARD, "adamw"), Inputs((torch.empty(4096, 512, device="meta"),), {}))
    plan = planner.plan(choose_strategy(planner.job.eligible.under(config)))
    held = planner.held(plan.actions, config)
    assert held is not None
    return held.written_in(plan)


def test_segments_that_grow_come_before_a_slower_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no time. Where the user has settings of his own, the next plan is taken."""
    plain = planned()
    assert plain.predicted_reserved_bytes is not None
    budget_gb = 0.7 * plain.predicted_reserved_bytes / 1e9
    plan = planned(memory_budget_gb=budget_gb)
    assert plan.fits
    assert plan.allocator is not None
    assert plan.allocator.settings
    assert not plan.allocator.releases
    assert "otherwise" in plan.explain()
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_reserved_bytes <= plan.budget_bytes < plan.allocator.otherwise_reserved_bytes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    other = planned(dataclasses.replace(CARD, present=True), memory_budget_gb=budget_gb)
    assert other.fits
    assert other.predicted_slowdown > plan.predicted_slowdown


def test_a_mode_that_allows_more_is_never_slower() -> None:
    """What plans with transfers hold above live bytes is not what plans without them do."""
    job = Job(stack(), Config(enable_logging=False), CARD, "adamw")
    planner = Planner(job, Inputs((torch.empty(2048, 512, device="meta"),), {}))
    held = planner.held((), job.config)
    assert held is not None
    wishes = {"memory_budget_gb": 0.9 * held.reserved_bytes / 1e9, "enable_logging": False}
    narrow, wide = (
        planner.plan(choose_strategy(planner.job.eligible.under(Config(mode=m, **wishes))))
        for m in ("conservative", "balanced")
    )  # type: ignore[arg-type]
    assert narrow.fits
    assert wide.fits
    assert wide.predicted_slowdown <= narrow.predicted_slowdown
    assert wide.mode == "balanced"


def test_what_the_user_has_set_for_the_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(CARD, present=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    plan = planned(here, mode="conservative", force_optimize=True)
    assert plan.allocator is None or not plan.allocator.settings


def test_a_plan_that_would_not_fit_otherwise_asks_the_allocator() -> None:
    lowest = planned(is_batch_small=True, mode="conservative", force_optimize=True)
    assert lowest.allocator is not None
    assert lowest.predicted_reserved_bytes is not None
    assert lowest.allocator.releases
    budget = lowest.predicted_reserved_bytes + MB
    plan = planned(is_batch_small=True, mode="conservative", memory_budget_gb=budget / 1e9)
    assert plan.fits
    assert plan.allocator is not None
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_reserved_bytes <= budget < plan.allocator.otherwise_reserved_bytes
    assert "asked of the allocator" in plan.summary.rule
    below = planned(
        is_batch_small=True, mode="conservative", memory_budget_gb=(lowest.predicted_reserved_bytes - MB) / 1e9
    )
    assert not below.fits
    assert below.predicted_reserved_bytes == lowest.predicted_reserved_bytes, "what a budget would have to be"


@pytest.mark.parametrize("is_on_host", [True, False])
def test_streamed_parameters_of_a_model_on_the_host_leave_no_hole(is_on_host: bool) -> None:
    """They never come to the card whole: weights that stay lie close together, and later ones find no room between."""
    model = stack() if not is_on_host else nn.Sequential(*(Layer() for _ in range(6)))
    here = dataclasses.replace(CARD, present=is_on_host)
    config = Config(enable_logging=False, async_offload=False)
    planner = Planner(Job(model, config, here, "sgd"), Inputs((torch.empty(64, 512, device="meta"),), {}))
    blocks = list(planner.rehearsal.blocks)[:3]
    log = planner.steps((*map(Checkpoint, blocks), *map(StreamParameters, blocks)), config)
    came = sum(isinstance(event, Allocated) for event in log.before)
    left = sum(isinstance(event, Freed) for event in log.before)
    assert (came, left) == ((13, 0) if is_on_host else (25, 12))
