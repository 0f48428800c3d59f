"""`fit`: the largest batch, or the longest sequence, that fits a device in each mode. By prediction alone.

A step is profiled at two sizes with all that the modes allow: for a batch, what fits plain training, and twice that.
Between and beyond them profiles are drawn (`profile_scaling`), so any size can be decided in no time. What comes out is
rehearsed at its very size, and the search goes on from there if the rehearsal says otherwise. That is a good guess; the
answer is the size that has a plan, made as `wrap` makes one, while the next size has none.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from memscale._config import SWITCHES, Config, OptimizationMode
from memscale._decide import decide
from memscale._decide.budget import needed_bytes
from memscale._decide.choice import Choice
from memscale._decide.eligible import Eligible
from memscale._decide.policy import choose_strategy
from memscale._errors import ProfileError
from memscale._hardware import Hardware
from memscale._hardware.detect import detect_hardware
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.one_way import OneWay
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.planner import Planner
from memscale._planning.questions.profile_scaling import at_size, can_scale
from memscale._profile import Profile
from memscale._profile.inputs import Inputs

logger = logging.getLogger("memscale")

Vary = Literal["batch", "seq"]
MAX_SIZE = 1 << 20
_MAX_ROUNDS = 4
"""Rehearsals of one guess."""
_WORTH_LOOKING = 0.95
"""Where a drawn peak is less than this share of the rehearsed one, steps of about that size are profiled."""
_PLAIN = dict.fromkeys(SWITCHES, False)


@dataclasses.dataclass(frozen=True, slots=True)
class Fitting:
    """The largest size that fits, in one way of training."""

    size: int
    """The size; 0 when not even the smallest fits."""
    predicted_peak_bytes: int
    predicted_slowdown: float
    plan: Plan | None
    is_limited: bool = False
    """The model takes no more (its positions end here); memory would."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What fits a device."""

    vary: Vary
    budget_bytes: int
    device_name: str
    plain: Fitting
    by_mode: dict[OptimizationMode, Fitting]


def fit(
    model: nn.Module,
    inputs_at: Callable[[int], Inputs],
    *,
    vary: Vary = "batch",
    config: Config | None = None,
    optimizer: str | Optimizer = "adamw",
    hardware: Hardware | None = None,
    modes: tuple[OptimizationMode, ...] = tuple(OptimizationMode),
    limit: int | None = None,
    on_progress: Callable[[str], None] = logger.debug,
) -> Fit:
    """The largest size in each mode. `inputs_at` makes the batch of a size, `limit` is what the model can take."""
    config = (config or Config()).replace(force_optimize=False)
    hardware = hardware or detect_hardware(config.device, config.offload_dir)
    job = Job(model, config, hardware, optimizer)
    search, own = _Search(job, inputs_at, _anchors(vary, limit), limit, on_progress), job.eligible
    plain = search.largest(own.replace(**_PLAIN), "plain")
    if vary == "batch" and plain.size > search.anchors[0]:
        search.anchors = (
            plain.size,
            2 * plain.size,
        )  # tiny batches fit into transfer windows: nothing is drawn from them
    by_mode, best = {}, plain
    for mode in (mode for mode in OptimizationMode if mode in modes):  # each may do all that the one before may
        best = by_mode[mode] = search.largest(own.replace(mode=mode), mode.value, best)
    return Fit(vary, own.budget.device_bytes, hardware.device_name, plain, by_mode)


class _Search:
    """Sizes of one model's batch on one device."""

    def __init__(
        self,
        job: Job,
        inputs_at: Callable[[int], Inputs],
        anchors: tuple[int, int],
        limit: int | None,
        on_progress: Callable[[str], None],
    ) -> None:
        self.inputs_at = inputs_at
        self.limit = limit or MAX_SIZE
        self.on_progress = on_progress
        costs = OptimizerCosts(job)  # the same at every size
        self.planner_at: Callable[[int], Planner] = functools.cache(
            lambda size: Planner(job, inputs_at(size), costs=costs)
        )
        self.anchors = anchors
        self._plans: dict[tuple[int, Config], Plan] = {}

    def largest(self, eligible: Eligible, name: str, at_least: Fitting | None = None) -> Fitting:
        """The largest size that has a plan which fits: the next size has none."""
        lean = self._leanest(eligible)
        self._look_into_everything(lean, name)
        known = at_least.size if at_least is not None else 0
        low, high = self._bracket(self._guess(lean, name, known), known, eligible, name)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, eligible, name) else (low, middle)
        if not low:
            return _none()
        return _fitting(low, self._full_plan(low, eligible, name), is_limited=low == self.limit)

    def _leanest(self, eligible: Eligible) -> Eligible:
        """The same with tensors that travel in the way that takes the least memory: what fits in any way fits in that
        one."""
        return eligible.by(eligible.travels[-1])

    def _guess(self, eligible: Eligible, name: str, known: int) -> int:
        """The largest size that drawn profiles, each rehearsed at its size, were found to fit at. Where none was, the
        size below the last of them: what is drawn is near, and a plan in full may do more than it."""
        budget = eligible.budget.device_bytes
        share, upper, best, near = 1.0, self.limit, known, known
        anchors = self.anchors
        for _ in range(_MAX_ROUNDS):
            size, plan = self._solve(eligible, int(budget * share), upper)
            if plan is None or size <= best:
                near = best
                break
            self.on_progress(f"{name}: rehearsing at {size}")
            confirmed = self._confirmed(size, plan, eligible)
            # What was drawn from small sizes is wrong by a share of the size.
            share = plan.predicted_peak_bytes / max(1, needed_bytes(confirmed))
            if confirmed.fits:
                best = size
            else:
                upper = near = size - 1
                if share < _WORTH_LOOKING and self.anchors == anchors and size > 2:
                    self.anchors, share = (size // 2, size), 1.0
                    self._look_into_everything(eligible, name)
        self.anchors = anchors
        return best if best > known else near

    def _bracket(self, guess: int, known: int, eligible: Eligible, name: str) -> tuple[int, int]:
        """A size that fits, or 0, and a larger one that does not: by ever longer strides from the guess, and not across
        a size that is known to fit with less."""
        low, high, stride = 0, self.limit + 1, 1
        size = min(max(guess, 1), self.limit)
        while low < size < high:
            if self._fits(size, eligible, name):
                low, size = size, min(size + stride, self.limit)
            else:
                high, size = size, max(known, size - stride) if known < size else size - stride
            if low and high <= self.limit:
                break
            stride *= 2
        return low, high

    def _fits(self, size: int, eligible: Eligible, name: str) -> bool:
        return self._full_plan(size, self._leanest(eligible), name).fits

    def _full_plan(self, size: int, eligible: Eligible, name: str) -> Plan:
        """What `wrap` would do with a batch of this size."""
        key = (size, eligible.config)
        if key not in self._plans:
            self.on_progress(f"{name}: planning for {size}")
            self._plans[key] = self.planner_at(size).plan(choose_strategy(eligible))
        return self._plans[key]

    def _look_into_everything(self, eligible: Eligible, name: str) -> None:
        self.on_progress(f"{name}: profiling at {self.anchors[0]} and {self.anchors[1]}")
        for size in self.anchors:
            self._planner(size, eligible).look_into_everything(eligible)
        small, large = (self._planner(size, eligible).profile for size in self.anchors)
        if not can_scale(small, large):
            raise ProfileError("a step of this model has other pieces at another size: it cannot be scaled")

    def _solve(self, eligible: Eligible, device_bytes: int, upper: int) -> tuple[int, Plan | None]:
        """The largest size at which the drawn profiles have a plan within so many bytes, found by halving."""
        if device_bytes <= 0:
            return 0, None
        eligible = eligible.replace(memory_budget_gb=device_bytes / 1e9)
        low, plan = 0, None
        high = upper + 1
        probe = min(self.anchors[1], upper)
        while low + 1 < high:
            made = self._plan_at(probe, eligible)
            if made.fits:
                low, plan = probe, made
            else:
                high = probe
            # Doubling until something does not fit: most sizes up to the limit are absurd.
            probe = min(2 * low, high - 1) if high > upper and low else (low + high) // 2
            probe = max(low + 1, probe)
        return low, plan

    def _planner(self, size: int, eligible: Eligible) -> OneWay:
        """The planner of one size, with tensors that travel in the way that is tried first."""
        return self.planner_at(size).by(eligible.travel)

    def _profile_at(self, size: int, eligible: Eligible) -> Profile:
        small, large = (self._planner(anchor, eligible).profile for anchor in self.anchors)
        return at_size(small, large, self.anchors, size)

    def _plan_at(self, size: int, eligible: Eligible) -> Plan:
        profile, strategy = self._profile_at(size, eligible), choose_strategy(eligible)
        return decide(profile, eligible, strategy.source, raise_if_unfit=False)

    def _confirmed(self, size: int, plan: Plan, eligible: Eligible) -> Plan:
        """This very plan at this very size; its peak is the rehearsal's."""
        planner = self._planner(size, eligible)
        budget = eligible.budget.device_bytes
        if plan.actions:
            seen = planner.profile
            if size not in self.anchors:  # what the techniques cost there was drawn, not tried
                drawn = self._profile_at(size, eligible)
                planner.profile = dataclasses.replace(drawn, plain=seen.plain, input_bytes=seen.input_bytes)
            confirmed = planner.confirm(plan, eligible)
            planner.profile = seen  # what was tried: it may be planned for in full
        else:
            peak_bytes = planner.cost_model().evaluate(Choice()).peak_bytes
            confirmed = planner.confirm(dataclasses.replace(plan, predicted_peak_bytes=peak_bytes), eligible)
        fits = confirmed.fits and confirmed.predicted_peak_bytes <= budget
        return dataclasses.replace(confirmed, budget_bytes=budget, fits=fits)


def _none() -> Fitting:
    return Fitting(0, 0, 1.0, None)


def _fitting(size: int, plan: Plan, *, is_limited: bool) -> Fitting:
    return Fitting(size, plan.predicted_peak_bytes, plan.predicted_slowdown, plan, is_limited)


def _anchors(vary: Vary, limit: int | None) -> tuple[int, int]:
    """Sizes that are profiled: small batches; for sequences the model's own range, where attention may bend upwards."""
    if vary == "batch":
        return 2, 4
    longest = min(limit or 2048, 2048)
    return max(1, longest // 2), max(2, longest)
