"""fit: the largest size that fits is one that fits, and the next ones do not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, DoesNotFitError, Hardware, OptimizationMode, zoo
from memscale._decide import decide
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible, resolve
from memscale._decide.policy import choose_strategy
from memscale._plan import Plan
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.questions.largest_batch import Fit, Fitting, _Search, fit
from memscale._profile.inputs import Inputs, derive_inputs
from tests.lanes import some
from tests.profiles import full_profile, hardware_of

HARDWARE = hardware_of()
MODES = (OptimizationMode.CONSERVATIVE, OptimizationMode.BALANCED)


def encoder(num_layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(num_layers)))


def six_layers() -> nn.Module:
    return encoder(6)


def batch_of(size: int) -> Inputs:
    return Inputs((torch.zeros(size, 32, 64, device="meta"),))


class Rows(nn.Module):
    """Blocks without attention; what they keep is in proportion to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64 * (1 + n)), nn.GELU(), nn.Linear(64 * (1 + n), 16)) for n in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def rows() -> nn.Module:
    with torch.device("meta"):
        return Rows()


def rows_of(size: int) -> Inputs:
    return Inputs((torch.zeros(size, 16, device="meta"),))


@functools.cache
def plain_peak(
    size: int,
    build: Callable[[], nn.Module] = encoder,
    inputs_of: Callable[[int], Inputs] = batch_of,
    hardware: Hardware = HARDWARE,
) -> int:
    """An estimate says it as well, but plans for every mode."""
    planner = Planner(Job(build(), Config(), hardware), inputs_of(size))
    return CostModel(planner.profile, hardware).evaluate(Choice()).peak_bytes


@functools.cache
def fitting() -> Fit:
    """Of the encoder, where twenty rows fit a plain step."""
    config = Config(memory_budget_gb=plain_peak(20) / 1e9)
    return fit(encoder(), batch_of, config=config, hardware=HARDWARE, modes=MODES)


@pytest.mark.slow
def test_every_mode_holds_more_than_the_one_before() -> None:
    found = fitting()
    assert found.plain.size == 20
    sizes = [found.plain.size, *(found.by_mode[mode].size for mode in MODES)]
    assert sizes == sorted(sizes)
    assert sizes[1] > 1.3 * sizes[0]
    for entry in found.by_mode.values():
        assert entry.plan is not None
        assert entry.plan.rehearsed
        assert entry.predicted_peak_bytes <= found.budget_bytes


HOST = dataclasses.replace(HARDWARE, device_type="cpu")
ONE_BY_ONE = {
    "encoder, conservative": (encoder, batch_of, HARDWARE, "conservative", 20),
    "rows, balanced": (rows, rows_of, HARDWARE, "balanced", 70),
    "rows on a host": (rows, rows_of, HOST, "conservative", 33),
    "rows, aggressive": (rows, rows_of, HARDWARE, "aggressive", 12),
    "encoder, balanced": (encoder, batch_of, HARDWARE, "balanced", 7),
    "deep encoder": (lambda: encoder(10), batch_of, HARDWARE, "balanced", 9),
}


@pytest.mark.slow
@pytest.mark.parametrize("reach", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", some(list(ONE_BY_ONE), "encoder, conservative", "rows, balanced", "rows on a host"))
def test_the_answer_is_the_largest_when_sizes_are_checked_one_by_one(name: str, reach: int) -> None:
    """By plans that are made from nothing, as `wrap` makes them, some sizes up and down."""
    build, inputs_of, hardware, mode, plain_size = ONE_BY_ONE[name]
    config = Config(memory_budget_gb=plain_peak(plain_size, build, inputs_of, hardware) / 1e9, mode=mode)
    if (build, hardware, mode) == (encoder, HARDWARE, "conservative"):
        found = fitting()
    else:
        found = fit(build(), inputs_of, config=config, hardware=hardware, modes=(OptimizationMode(mode),))
    answer = found.by_mode[OptimizationMode(mode)].size
    assert found.plain.size == plain_size < answer
    for size in range(answer - reach, answer + reach + 1):
        job = Job(build(), config, hardware)
        plan = Planner(job, inputs_of(size)).plan(choose_strategy(job.eligible))
        assert plan.fits is (size <= answer), f"{size} where the answer is {answer}"


@pytest.mark.full
def test_a_window_that_holds_a_tiny_batch_does_not_mislead() -> None:
    """At a batch of 2 whatever is offloaded fits into the transfer window; drawn from there, no answer held."""
    model = zoo.build("bert-mini")
    modes = (OptimizationMode.BALANCED, OptimizationMode.AGGRESSIVE)

    def inputs_of(size: int) -> Inputs:
        inputs = derive_inputs(model, size, 128)
        assert inputs is not None
        return inputs

    hardware = Hardware.from_name("RTX 3070")
    found = fit(model, inputs_of, config=Config(memory_budget_gb=2.0), hardware=hardware, modes=modes)
    assert found.plain.size == 33
    assert found.by_mode[OptimizationMode.BALANCED].size > 33
    assert found.by_mode[OptimizationMode.AGGRESSIVE].size > 700  # it was 538


@pytest.mark.slow
def test_16_bits_are_considered_for_a_card_that_has_them_wherever_it_is() -> None:
    card = dataclasses.replace(HARDWARE, has_fast_16bit=True, supports_bf16=True, device_type="cuda")
    budget_gb = plain_peak(24, rows, rows_of) / 1e9
    config = Config(memory_budget_gb=budget_gb, enable_offloading=False, enable_tiling=False, use_8bit_optimizer=False)
    mode = OptimizationMode.AGGRESSIVE
    sizes = [
        fit(rows(), rows_of, config=wish, hardware=card, modes=(mode,)).by_mode[mode].size
        for wish in (config, config.replace(use_mixed_precision=False))
    ]
    assert sizes[0] > sizes[1]


class _Refused(_Search):
    """A search whose rehearsals refuse whatever is drawn, from 340 down, and whose plans fit up to a size."""

    def __init__(self, largest: int) -> None:
        self.limit, self.anchors, self.on_progress = 1000, (2, 4), str
        self.size, self.planned = largest, []
        profile = full_profile(2)
        self.plan = decide(profile, resolve(Config(memory_budget_gb=1e3), HARDWARE))

    def _leanest(self, eligible: Eligible) -> Eligible:
        return eligible

    def _look_into_everything(self, eligible: Eligible, name: str) -> None:
        pass

    def _solve(self, eligible: Eligible, device_bytes: int, upper: int) -> tuple[int, Plan | None]:
        return min(340, upper), self.plan

    def _confirmed(self, size: int, plan: Plan, eligible: Eligible) -> Plan:
        return dataclasses.replace(plan, fits=False)

    def _full_plan(self, size: int, eligible: Eligible, name: str) -> Plan:
        self.planned.append(size)
        return dataclasses.replace(self.plan, fits=size <= self.size)


@pytest.mark.parametrize("largest", [4, 5, 300, 335, 336, 337, 351, 1000])
def test_a_refused_guess_is_still_where_the_search_begins(largest: int) -> None:
    """It began at what fits without any technique, and made a plan for every power of two in between."""
    search = _Refused(largest)
    known = Fitting(4, 0, 1.0, None)
    assert search.largest(resolve(Config(), HARDWARE), "", known).size == largest
    assert search.planned[0] == 336
    assert len(search.planned) <= 2 * math.log2(abs(largest - 336) + 2) + 3
    assert min(search.planned) >= 4


def test_nothing_fits_where_parameters_do_not() -> None:
    found = fit(encoder(), batch_of, config=Config(memory_budget_gb=1e-4), hardware=HARDWARE, modes=MODES[:1])
    assert found.plain.size == found.by_mode[MODES[0]].size == 0
    assert found.by_mode[MODES[0]].plan is None


def test_what_has_an_end_stops_there() -> None:
    found = fit(encoder(), batch_of, config=Config(), hardware=HARDWARE, modes=MODES[:1], limit=6, vary="seq")
    assert found.plain.size == 6
    assert found.plain.is_limited


# ---- what is said when nothing fits


@pytest.mark.slow
def test_a_misfit_names_a_batch_that_fits() -> None:
    config = Config(memory_budget_gb=plain_peak(4) / 1e9, enable_offloading=False)
    with pytest.raises(DoesNotFitError, match="lower the batch size from 64 to") as caught:
        make_plan(Job(encoder(), config, HARDWARE), batch_of(64))
    named = int(str(caught.value).split("from 64 to ")[1].split()[0])
    assert make_plan(Job(encoder(), config, HARDWARE), batch_of(named)).fits
    with pytest.raises(DoesNotFitError):
        make_plan(Job(encoder(), config, HARDWARE), batch_of(named + max(2, named // 8)))


@pytest.mark.slow
def test_no_batch_is_named_where_none_fits() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(Job(rows(), Config(memory_budget_gb=1e-4), HARDWARE), rows_of(8))
    assert "lower the" not in str(caught.value)
    assert "none of them fits" in str(caught.value)


@pytest.mark.slow
def test_the_estimate_gives_advice_when_no_mode_fits() -> None:
    exact = Config(use_mixed_precision=False, use_8bit_optimizer=False, enable_tiling=False)
    job = Job(rows(), exact, HARDWARE)
    lowest = Planner(job, rows_of(2)).plan(choose_strategy(job.eligible.replace(force_optimize=True)))
    config = exact.replace(memory_budget_gb=1.02 * lowest.predicted_peak_bytes / 1e9)
    estimate = memscale.estimate(rows(), rows_of(512), config=config, hardware=HARDWARE)
    assert estimate.recommended_mode is None
    assert estimate.advice.startswith("lower the batch size from 512 to ")


# ---- the rule table of the memory-budget guide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pressure", "mode"),
    [(0.9, "conservative"), (1.5, "balanced"), pytest.param(3.0, "aggressive", marks=pytest.mark.full)],
)
def test_the_rule_table_falls_out(pressure: float, mode: str) -> None:
    """The mode of the guide fits; what fits as it is is left alone."""
    config = Config(memory_budget_gb=plain_peak(64, six_layers) / pressure / 1e9)
    estimate = memscale.estimate(six_layers(), batch_of(64), config=config, hardware=HARDWARE)
    order = [each.value for each in OptimizationMode]
    assert estimate.recommended_mode is not None
    assert order.index(estimate.recommended_mode.value) <= order.index(mode)
    assert estimate.by_mode[OptimizationMode(mode)].fits
    if pressure < 1:
        assert all(not entry.plan.actions for entry in estimate.by_mode.values())
