"""Estimates and plans as the command line prints them. Plain text; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memscale.report.explain import grouped, head_lines, techniques_text, what_is_done, words_for_run
from memscale.report.tables import table

if TYPE_CHECKING:
    import pathlib

    from memscale._config import OptimizationMode
    from memscale._hardware import Hardware
    from memscale._plan import LayerRow, Plan
    from memscale._planning.questions.estimate import Estimate, ModeEstimate
    from memscale._planning.questions.largest_batch import Fit, Fitting
    from memscale._planning.questions.length_estimate import LengthEstimate, LengthRow
    from memscale._planning.saved.plan_cache import KeptPlan

GIB = 1024**3

_KIND_NAMES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "other": "inputs and buffers",
}


def estimate_lines(name: str, num_parameters: int, hardware: Hardware, result: Estimate) -> list[str]:
    """The breakdown, the peak and slowdown of each mode, what fits, and the recommendation."""
    any_plan = next(iter(result.by_mode.values())).plan
    return [
        f"{name}: {any_plan.model_class}, {num_parameters / 1e6:,.1f} M parameters, on {result.device_name}",
        f"batch: {'; '.join(result.inputs)}; optimizer: {result.optimizer_name}",
        "",
        f"A plain training step peaks at {both_units(result.baseline_peak_bytes)}{_reserved_words(result)}; "
        f"the budget is {both_units(result.budget_bytes)}: {'fits' if result.baseline_fits else 'does not fit'}.",
        *_breakdown_lines(result),
        "",
        *_mode_lines(result),
        "",
        _recommendation(result),
        _provenance(hardware, any_plan),
    ]


def _reserved_words(result: Estimate) -> str:
    """What the allocator and the card hold for the plain step."""
    if result.baseline_reserved_bytes is None:
        return ""
    allocated, reserved = result.baseline_allocated_bytes or 0, result.baseline_reserved_bytes
    return (
        f", for which PyTorch allocates {allocated / 1e9:.3f} and reserves {reserved / 1e9:.3f} GB, "
        f"{(result.baseline_total_bytes or 0) / 1e9:.3f} GB in all"
    )


def cache_lines(directory: pathlib.Path, kept: Sequence[KeptPlan]) -> list[str]:
    """The plans that are kept for the next start, the newest first."""
    if not kept:
        return [f"No plan is kept in {directory}."]
    total_bytes = sum(each.num_bytes for each in kept)
    rows = [("made", "model", "batch", "on", "mode", "peak GB"), *map(_kept_row, kept)]
    return [f"Plans kept in {directory}: {len(kept)}, {total_bytes / 1e6:.1f} MB", "", *table(rows)]


def _kept_row(kept: KeptPlan) -> tuple[str, ...]:
    plan = kept.plan
    if plan is None:
        return (kept.made, f"{kept.file_name} cannot be read", "", "", "", "")
    peak = f"{plan.predicted_peak_bytes / 1e9:.3f}"
    return (kept.made, plan.model_class, "; ".join(plan.inputs), plan.device_name, plan.mode, peak)


def fit_lines(name: str, result: Fit) -> list[str]:
    """The largest size in each mode."""
    what = "batch" if result.vary == "batch" else "sequence"
    header = (f"{'largest' if what == 'batch' else 'longest'} {what}", "size", "peak GB", "time", "what is done")
    entries = {"plain": result.plain, **{mode.value: entry for mode, entry in result.by_mode.items()}}
    some = next((entry.plan for entry in entries.values() if entry.plan is not None), None)
    return [
        f"{name} on {result.device_name}: what fits a budget of {both_units(result.budget_bytes)}",
        *([f"batch: {'; '.join(some.inputs)}, at the size below; optimizer: {some.optimizer_name}"] if some else []),
        "",
        *table([header, *(_fit_cells(mode, entry) for mode, entry in entries.items())], left=(0, 4)),
        "",
        "Each size was rehearsed on fake tensors with the plan shown. Times: a model, not measured.",
    ]


def _fit_cells(mode: str, entry: Fitting) -> tuple[str, ...]:
    if entry.plan is None:
        return mode, "none", "", "", "not even the smallest fits"
    size = f"{entry.size}{' (all it has)' if entry.is_limited else ''}"
    peak, time = f"{entry.predicted_peak_bytes / 1e9:.3f}", f"{entry.predicted_slowdown:.2f}x"
    return mode, size, peak, time, what_is_done(entry.plan)


def length_lines(name: str, result: LengthEstimate) -> list[str]:
    """Peak and time over a distribution of lengths."""
    header = ("up to", "share", "plain GB", "planned GB", "time", "what is done")
    longest = next((row for row in result.rows if row.plan is not None), None)
    misfits = [row for row in result.rows if row.plan is None]
    said = "No length fits." if longest is None else f"The longest length that fits is {longest.longest}."
    slowdown = result.slowdown
    budget = both_units(result.budget_bytes)
    return [
        f"{name} on {result.device_name}, mode {result.mode}: lengths under a budget of {budget}",
        *([f"batch: {'; '.join(longest.plan.inputs)}"] if longest is not None and longest.plan is not None else []),
        "",
        *table([header, *map(_length_cells, result.rows)], left=(5,)),
        "",
        *([said] if misfits else []),
        *([f"Over all batches: {slowdown:.2f}x the time of plain steps."] if slowdown is not None else []),
        "Each length was rehearsed on fake tensors with the plan shown. Times: a model, not measured.",
    ]


def _length_cells(row: LengthRow) -> tuple[str, ...]:
    length, share, plain = str(row.longest), f"{row.share:.1%}", f"{row.plain_bytes / 1e9:.3f}"
    if row.plan is None or row.planned_bytes is None or row.planned_ms is None:
        return length, share, plain, "", "", "does not fit"
    time = f"{row.planned_ms / row.plain_ms:.2f}x" if row.plain_ms else ""
    return length, share, plain, f"{row.planned_bytes / 1e9:.3f}", time, what_is_done(row.plan)


def both_units(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB ({num_bytes / GIB:.3f} GiB)"


def _breakdown_lines(result: Estimate) -> list[str]:
    peak_bytes = result.baseline_peak_bytes
    return [
        f"  {label:<18} {result.breakdown[kind] / 1e9:>8.3f} GB  {result.breakdown[kind] / peak_bytes:>6.1%}"
        for kind, label in _KIND_NAMES.items()
    ]


def _mode_lines(result: Estimate) -> list[str]:
    reserves = result.baseline_reserved_bytes is not None
    held = ("allocated GB", "reserved GB", "total GB") if reserves else ()
    elsewhere = [name for name in ("host", "disk") if any(_waiting(entry, name) for entry in result.by_mode.values())]
    waits = (f"{name} GB" for name in elsewhere)
    header = ("mode", "peak GB", "peak GiB", *held, *waits, "less", "time", "of bound", "fits", "what is done")
    cells = [header, *(_mode_cells(mode, entry, reserves, elsewhere) for mode, entry in result.by_mode.items())]
    return table(cells, left=(0, len(header) - 2, len(header) - 1))


def _waiting(entry: ModeEstimate, tier: str) -> int:
    """What waits on the host or the disk."""
    return entry.host_bytes if tier == "host" else entry.disk_bytes


def _mode_cells(mode: OptimizationMode, entry: ModeEstimate, reserves: bool, elsewhere: list[str]) -> tuple[str, ...]:
    plan = entry.plan
    held = (plan.predicted_allocated_bytes, plan.predicted_reserved_bytes, plan.predicted_total_bytes)
    return (
        mode.value,
        f"{entry.predicted_peak_bytes / 1e9:.3f}",
        f"{entry.predicted_peak_bytes / GIB:.3f}",
        *("-" if num_bytes is None else f"{num_bytes / 1e9:.3f}" for num_bytes in held if reserves),
        *(f"{_waiting(entry, tier) / 1e9:.3f}" for tier in elsewhere),
        f"{max(0.0, entry.plan.reduction):.1%}",
        f"{entry.predicted_slowdown:.2f}x",
        "-" if entry.of_bound is None else f"{entry.of_bound:.2f}x",
        "yes" if entry.fits else "no",
        what_is_done(entry.plan),
    )


def _recommendation(result: Estimate) -> str:
    mode = result.recommended_mode
    if mode is None:
        needed = min(entry.predicted_peak_bytes for entry in result.by_mode.values())
        advice = f"{result.advice[:1].upper()}{result.advice[1:]}" if result.advice else "Lower the sequence length"
        last = f" in mode {list(result.by_mode)[-1].value}" if result.advice else ""
        return f"No mode fits: the lowest peak is {both_units(needed)}. {advice}{last}, or take a larger device."
    if result.baseline_fits:
        return f"Recommended: {mode.value}. It fits as it is, and wrap() will leave it alone unless forced."
    entry = result.by_mode[mode]
    peak_gb, slowdown = entry.predicted_peak_bytes / 1e9, entry.predicted_slowdown
    return f"Recommended: {mode.value}, {peak_gb:.3f} GB at {slowdown:.2f}x the time."


def _provenance(hardware: Hardware, plan: Plan) -> str:
    """Where the numbers come from: none of them was measured on the device."""
    if plan.profile_source == "empirical":
        return "Peaks: from observed training steps on this machine. Times: a model, not measured."
    kernels = "" if hardware.present else ", with the kernels that such a card is assumed to use"
    return f"Peaks: predicted on fake tensors{kernels}. Times: a model, not measured."


def plan_lines(plan: Plan) -> list[str]:
    """The head of `Plan.explain()` and, instead of a line a layer, one a group of neighbours treated alike; then what
    is done to the whole run."""
    header = ("layers", "params", "activations", "what is done")
    run = [("the whole run", "", "", words) for words in words_for_run(plan.actions)]
    cells = [header, *(_group_cells(group) for group in grouped(plan.rows)), *run]
    return [*head_lines(plan), "", *table(cells, left=(0, 3))]


def _group_cells(group: list[LayerRow]) -> tuple[str, ...]:
    first, last = group[0].module_fqn or "(model)", group[-1].module_fqn.rpartition(".")[2]
    return (
        first if len(group) == 1 else f"{first} to {last}",
        f"{sum(row.param_bytes for row in group) / 1e6:.1f} MB",
        f"{sum(row.activation_bytes for row in group) / 1e6:.1f} MB",
        techniques_text(group[0]),
    )
