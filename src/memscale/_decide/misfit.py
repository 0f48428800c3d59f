"""What to say when nothing fits: the numbers, and the nearest thing that does fit. No torch."""

from __future__ import annotations

from memscale._config import Config
from memscale._decide.budget import needed_bytes
from memscale._errors import DoesNotFitError
from memscale._plan import Plan
from memscale._profile import Profile
from memscale._units import show_bytes
from memscale.techniques import TECHNIQUES

ALONE = "Without any activations a step takes at least"


def misfit(
    profile: Profile,
    plan: Plan,
    config: Config,
    smaller: str | None = None,
    tried: str = "",
    batch_size: int | None = None,
    least_bytes: int = 0,
) -> DoesNotFitError:
    """The error to raise, which names what does fit; `batch_size` is the one in `smaller`, if that is a batch."""
    error = DoesNotFitError(explain_misfit(profile, plan, config, smaller, tried, least_bytes))
    if smaller is None:
        batch_size = _fitting_batch(profile, plan.predicted_peak_bytes, plan.budget_bytes, _batch_of(profile)) or None
    error.batch_size = batch_size
    return error


def explain_misfit(
    profile: Profile, plan: Plan, config: Config, smaller: str | None = None, tried: str = "", least_bytes: int = 0
) -> str:
    """What is missing, and the nearest thing that does fit.

    `smaller` is a batch or a sequence that was found to fit, "" when there is none, and `tried` is what was looked at
    for it; None: nobody looked, and the batch that the activations' share suggests is named. `least_bytes`: what a step
    takes without any activations, where that is too much already.
    """
    peak, budget = plan.predicted_peak_bytes, plan.budget_bytes
    reserved = plan.predicted_reserved_bytes
    batch = _batch_of(profile)
    if smaller is None:
        suggested = _fitting_batch(profile, peak, budget, batch)
        smaller = f"lower the batch size from {batch} to {suggested} (an estimate, not tried)" if suggested else ""
    # On a card the budget bounds what is reserved, which is more, and is not known of every step.
    at_least = "at least " if reserved is None and plan.device_type != "cpu" else ""
    remedies = [*([smaller] if smaller else []), f"raise the budget to {at_least}{show_bytes(needed_bytes(plan))}"]
    holds = "" if reserved is None else f", for which PyTorch reserves {show_bytes(reserved)},"
    return (
        f"The peak is {show_bytes(peak)}{holds} after every enabled technique (mode {plan.mode}); "
        f"the budget is {show_bytes(budget)}. To fit, {' or '.join(remedies)}."
        + (f" Sizes that were rehearsed: {tried}{'' if smaller else '; none of them fits'}." if tried else "")
        + (f" {ALONE} {show_bytes(least_bytes)}: no smaller batch fits." if least_bytes else "")
        + _switched_off(config)
    )


def _switched_off(config: Config) -> str:
    """What could still be turned on without rounding anything. What no mode turns on is not for everybody."""
    exact = [technique for technique in TECHNIQUES if technique.is_exact and technique.modes]
    switches = dict.fromkeys(technique.switch for technique in exact if not getattr(config, technique.switch))
    reordering = {technique.switch for technique in exact if technique.reorders_sums}
    named = [f"{switch} (up to the order of summation)" if switch in reordering else switch for switch in switches]
    return f" Exact techniques that are switched off: {' and '.join(named)}." if named else ""


def _batch_of(profile: Profile) -> int:
    return max((spec.shape[0] for spec in profile.inputs if spec.shape), default=0)


def _fitting_batch(profile: Profile, peak: int, budget: int, batch: int) -> int:
    """The largest batch whose share of the activations fits; 0 when parameters and their company alone do not."""
    fixed = profile.static_bytes - profile.input_bytes + profile.plain.end_bytes
    if batch < 2 or peak <= fixed or budget <= fixed:
        return 0
    return min(batch - 1, int(batch * (budget - fixed) / (peak - fixed)))
