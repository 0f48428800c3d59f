"""A plan as words: the one place where actions, reasons and numbers are turned into text.

    explain(plan)                  # what `Plan.explain()` returns
    what_is_done(plan)             # "checkpoint: 20 layers, tile the head: 256 rows"
    words_of_block(actions)        # "checkpoint, input offloaded"

Everything here reads data and nothing else, so a plan that was saved explains itself in the same words.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from memscale._plan import Action, FrontPoint, LayerAction, LayerRow, Reason, ReleasePoint
from memscale._units import show_bytes, show_speed
from memscale.report.tables import table
from memscale.techniques import TECHNIQUES, by_technique, technique_of

if TYPE_CHECKING:
    from memscale._plan import Conditions, Plan

_BEGINS = tuple(begin for technique in TECHNIQUES for begin in technique.begins)


# ---- actions


def words_of_block(actions: Iterable[Action]) -> str:
    """What is done to one block: "checkpoint, input offloaded"; "keep" for nothing."""
    found = [(technique_of(action), action) for action in actions]
    mains = [(technique, action) for technique, action in found if not technique.beside]
    if not mains:
        return found[0][0].words(found[0][1]) if found else "keep"
    technique, action = max(mains, key=lambda one: one[0].place)
    return ", ".join([technique.words(action), *(other.beside for other, _ in found if other.beside)])


def words_of_run(action: Action) -> str:
    """What is done to the run, by one action that is not about a block; "" for one that is."""
    technique = technique_of(action)
    return "" if technique.scope == "block" else technique.words(action)


def what_is_done(plan: Plan) -> str:
    """The plan in a few words: "checkpoint: 20 layers, offload optimizer"."""
    return words_of_actions(plan.actions, {row.module_fqn for row in plan.rows if row.is_block} or None)


def words_of_actions(actions: Iterable[Action], blocks: Collection[str] | None = None) -> str:
    """What these actions do together, in a few words; "nothing" for none.

    Blocks that are treated alike are counted, and what is done to the run is said once. What is streamed and is none of
    the `blocks` is the rest; None: nobody knows them, and everything is counted.
    """
    actions = list(actions)
    by_block: dict[str, list[Action]] = {}
    streams_rest = False
    for action in actions:
        technique = technique_of(action)
        if technique.scope == "block" and isinstance(action, LayerAction):
            if blocks is not None and action.module_fqn not in blocks and technique.option is not None:
                streams_rest = True
            else:
                by_block.setdefault(action.module_fqn, []).append(action)
    counts = collections.Counter(map(words_of_block, by_block.values()))
    parts = [
        f"{words}: {counts[words]} layer{'s' if counts[words] > 1 else ''}" for words in sorted(counts, key=_mildness)
    ]
    return ", ".join([*parts, *words_for_run(actions), *(["stream the rest"] if streams_rest else [])]) or "nothing"


def _mildness(words: str) -> tuple[int, str]:
    """What keeps more of a block on the device comes first."""
    return next((index for index, begin in enumerate(_BEGINS) if words.startswith(begin)), len(_BEGINS)), words


def words_for_run(actions: Sequence[Action]) -> list[str]:
    """What these actions do to the run as a whole; what is said of all of them is said once."""
    said: list[Action] = []
    for mine in by_technique(actions).values():
        once = technique_of(mine[0]).said_once
        said += mine if once is None else once(mine)
    return list(dict.fromkeys(words for action in said if (words := words_of_run(action))))


# ---- a whole plan


def explain(plan: Plan) -> str:
    """Each choice with its rule and numbers, and what there would be instead."""
    parts = (head_lines(plan), _run_lines(plan), _table_lines(plan), _front_lines(plan))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def head_lines(plan: Plan) -> list[str]:
    """What the plan is for, its numbers and the rule that settled it."""
    conditions = plan.conditions
    return [
        f"Plan for {plan.model_class} on {plan.device_name} ({plan.device_type}), mode {plan.mode}, "
        f"decided by {plan.decision_source}",
        f"  batch:     {'; '.join(plan.inputs) or 'unknown'}",
        f"  optimizer: {plan.optimizer_name}; profile: {plan.profile_source}",
        *_number_lines(plan),
        f"  rule:      {reason_text(plan.summary)}",
        *([f"  strategy:  {reason_text(plan.strategy)}"] if plan.strategy is not None else []),
        *_transfer_lines(plan),
        *([f"  times by:  {speeds_text(conditions)}"] if conditions is not None and conditions.speeds else []),
        *_bits_lines(plan),
    ]


def _number_lines(plan: Plan) -> list[str]:
    if plan.provisional:
        return [
            f"  planned:   not known until a training step has been seen; at least "
            f"{show_bytes(plan.predicted_peak_bytes)}, budget {show_bytes(plan.budget_bytes)}"
        ]
    how = "confirmed by a rehearsal" if plan.rehearsed else "from the peak model"
    return [
        f"  baseline:  {show_bytes(plan.baseline_peak_bytes)} peak; budget {show_bytes(plan.budget_bytes)}",
        f"  planned:   {show_bytes(plan.predicted_peak_bytes)} peak ({plan.reduction:.1%} less, {how}), "
        f"{plan.predicted_slowdown:.2f}x the time, {'fits' if plan.fits else 'does not fit'}",
        *_bound_lines(plan),
        *_held_lines(plan),
        *_waiting_lines(plan),
    ]


def _bound_lines(plan: Plan) -> list[str]:
    """How far the plan's time is from what no exact plan could be below."""
    least, of_bound = plan.least_slowdown, plan.of_bound
    if least is None or of_bound is None:
        return []
    return [
        f"  bound:     {of_bound:.2f}x of the least time that any exact plan could take here, which is {least:.2f}x"
    ]


def _held_lines(plan: Plan) -> list[str]:
    """What the allocator and the card hold; nothing where no allocator keeps memory."""
    if plan.predicted_allocated_bytes is None or plan.predicted_reserved_bytes is None:
        return []
    allocated, reserved = show_bytes(plan.predicted_allocated_bytes), show_bytes(plan.predicted_reserved_bytes)
    total = show_bytes(plan.predicted_total_bytes or 0)
    return [
        f"  card:      {allocated} allocated, {reserved} reserved; {total} with the context and what others hold",
        *_allocator_lines(plan),
    ]


def _waiting_lines(plan: Plan) -> list[str]:
    """What waits elsewhere: below a CPU there is only its disk."""
    lower = "on the disk" if plan.device_type == "cpu" else "on the host or the disk"
    beside = [(plan.host_bytes, "on the host"), (plan.movable_bytes, lower)]
    waits = " and ".join(f"{show_bytes(num_bytes)} {where}" for num_bytes, where in beside if num_bytes)
    return [f"  waiting:   {waits}"] if waits else []


def _transfer_lines(plan: Plan) -> list[str]:
    """How tensors travel, where any does and could do otherwise."""
    found = plan.conditions
    if found is None or plan.device_type == "cpu" or not any(technique_of(action).travels for action in plan.actions):
        return []
    if found.async_offload:
        window, ahead = show_bytes(found.window_bytes), found.prefetch_depth
        layers = f"{ahead} layer{'s' if ahead > 1 else ''}"
        why = "" if found.nearer is None else f", since {reason_text(found.nearer)}"
        return [f"  transfers: beside compute, with {window} on their way out at most and {layers} fetched ahead{why}"]
    why = "" if found.blocking is None else f", since {reason_text(found.blocking)}"
    return [f"  transfers: without overlap, compute waits for them{why}"]


def _allocator_lines(plan: Plan) -> list[str]:
    """What is asked of the allocator, and what that saves."""
    use = plan.allocator
    if use is None:
        return []
    asked = [f"{use.settings} while the plan is attached"] if use.settings else []
    if use.releases:
        asked.append(f"unused memory goes back {', '.join(map(_moment, use.releases))}")
    if use.compacted_bytes:
        moved = show_bytes(use.compacted_bytes)
        asked.append(f"{moved} of weights and optimizer state are moved together once, by way of host memory")
    return [f"  allocator: {'; '.join(asked)}; otherwise {show_bytes(use.otherwise_reserved_bytes)} would be reserved"]


def _moment(point: ReleasePoint) -> str:
    when, phase = ("after", "forward") if point.phase == "after" else ("before", point.phase)
    return f"{when} the {phase} of {point.module_fqn}" if point.module_fqn else f"{when} the {phase} pass"


def _bits_lines(plan: Plan) -> list[str]:
    """What techniques say about the bits on this type of device."""
    used = [technique_of(mine[0]) for mine in by_technique(plan.actions).values()]
    names = frozenset(technique.name for technique in used)
    notes = [technique.note(plan.device_type, names) for technique in used if technique.note is not None]
    return [f"  bits:      {note}" for note in notes if note]


def _run_lines(plan: Plan) -> list[str]:
    """What is not about one layer; and the head, whose rows a layer's line does not say."""
    of_the_run = [action for action in plan.actions if technique_of(action).scope == "run"]
    rows = [(words_of_run(action), reason_text(action.reason)) for action in of_the_run]
    return table([("for the run", "rule"), *rows], underlined=True) if rows else []


def _table_lines(plan: Plan) -> list[str]:
    header = ("layer", "class", "calls", "params", "activations", "forward", "techniques", "rule")
    return table([header, *(_row_cells(row) for row in plan.rows)], underlined=True)


def _row_cells(row: LayerRow) -> tuple[str, ...]:
    return (
        row.module_fqn or "(model)",
        row.class_name,
        str(row.num_calls),
        show_bytes(row.param_bytes),
        show_bytes(row.activation_bytes),
        f"{row.forward_ms:.2f} ms",
        techniques_text(row),
        reason_text(row.reason),
    )


def techniques_text(row: LayerRow) -> str:
    return " + ".join(row.techniques) or "keep"


# ---- what there would be instead


def _front_lines(plan: Plan) -> list[str]:
    note = [f"({plan.front_note})"] if plan.front_note else []
    if not plan.front:
        return note or ["(no front of peak against time: this plan does not carry one)"]
    header = ("", "peak", "time", "what would be done")
    cells = [header, *map(_front_cells, plan.front)]
    lines = ["Peak against time, by the peak model:", *table(cells, underlined=True)]
    if plan.chosen is not None:
        lines += [
            _neighbour("next cheaper", plan.next_cheaper, plan.chosen, _live_budget_bytes(plan)),
            _neighbour("next smaller", plan.next_smaller, plan.chosen, _live_budget_bytes(plan)),
        ]
    return [*lines, *note]


def _front_cells(point: FrontPoint) -> tuple[str, ...]:
    mark = ">" if point.is_chosen else ""
    what = point.what if point.is_exact else f"{point.what} (not exact)"
    return mark, show_bytes(point.peak_bytes), f"{point.slowdown:.2f}x", what


def _live_budget_bytes(plan: Plan) -> int:
    """What may be live: what the allocator holds above that is taken to be the same for other plans."""
    reserved_bytes = plan.predicted_reserved_bytes
    above_bytes = 0 if reserved_bytes is None else reserved_bytes - plan.predicted_peak_bytes
    return plan.budget_bytes - max(0, above_bytes)


def _neighbour(name: str, point: FrontPoint | None, chosen: FrontPoint, budget_bytes: int) -> str:
    if point is None:
        return f"{name}: none"
    change = point.peak_bytes - chosen.peak_bytes
    over = ", above the budget" if point.peak_bytes > budget_bytes else ""
    exact = "" if point.is_exact else ", not exact"
    return (
        f"{name}: {show_bytes(abs(change))} {'more' if change > 0 else 'less'}{over}, {point.slowdown:.2f}x the time "
        f"instead of {chosen.slowdown:.2f}x{exact}: {point.what}"
    )


# ---- reasons and numbers


def reason_text(reason: Reason) -> str:
    """The rule, and the numbers that it saw: "checkpoint (costs 0.1 ms, frees 12 MB)"."""
    # Sorted, as they are in JSON: a plan that was saved explains itself in the same words.
    numbers = ", ".join(_named_number(name, value) for name, value in sorted(reason.numbers.items()))
    return f"{reason.rule} ({numbers})" if numbers else reason.rule


def speeds_text(conditions: Conditions) -> str:
    """The figures that times were reckoned with: "link 24 GB/s, memory 936 GB/s"."""
    return ", ".join(_named_speed(name, value) for name, value in sorted(conditions.speeds.items()))


def _named_speed(field_name: str, value: float) -> str:
    """ "link_bytes_per_s": 2.4e10 reads as "link 24 GB/s"."""
    name = re.sub("_(bytes_per_s|flops|s)$", "", field_name).replace("_", " ")
    return f"{name} {show_speed(field_name, value)}"


def _named_number(name: str, value: int | float | str) -> str:
    """ "budget_bytes": 2_610_000_000 reads as "budget 2.610 GB"."""
    if name.endswith("_bytes") and not isinstance(value, str):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {show_bytes(value)}"
    if name.endswith("_ms"):
        return f"{name.removesuffix('_ms').replace('_', ' ')} {value} ms"
    return f"{name.replace('_', ' ')} {value}"


# ---- groups of layers


def grouped(rows: Sequence[LayerRow]) -> list[list[LayerRow]]:
    """Neighbours of one class that are treated alike, together."""
    groups: list[list[LayerRow]] = []
    for row in rows:
        if groups and _likeness(groups[-1][0]) == _likeness(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _likeness(row: LayerRow) -> tuple[str, str, tuple[str, ...]]:
    return row.module_fqn.rpartition(".")[0], row.class_name, row.techniques
