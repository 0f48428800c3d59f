"""Batches of many shapes: buckets of them, and plans that do less where a batch is smaller.

    inputs = bucket_below(inputs, demand)           # the largest batch of its bucket, if that is below this demand
    loosened(planner, plan, config)                 # what the plan may leave undone for that batch

NOTE [plans by shape]: all plans of a run share what must not change from step to step: where parameters and optimizer
state live, and 16 bits. They differ in what belongs to a single step: what is recomputed, which activations wait
elsewhere, tiles. So the plan for the largest batch is made first, and those for smaller ones are found by leaving
things out of it, which takes a few rehearsals and no search.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._decide import plan_as_it_is
from memscale._decide.choice import choice_of
from memscale._decide.eligible import Eligible
from memscale._errors import DoesNotFitError, MemScaleError, shown
from memscale._plan import Action, LayerAction, Plan
from memscale._planning.loop.demand import Demand
from memscale._planning.one_way import OneWay
from memscale._planning.planner import Planner
from memscale._profile import STREAM, TraceKey
from memscale._profile.inputs import Inputs, derive_inputs
from memscale.techniques import technique_of

Lengths = Iterable[int] | Mapping[int, int]
"""Lengths of sequences, as they come or as a histogram."""

LOOSENED = "the plan for larger batches, without what this shape does not need"
_MAX_REHEARSALS = 3


def bucket_top(size: int) -> int:
    """The largest size of a bucket: powers of two, and what lies half-way between them."""
    power = 1 << max(0, size - 1).bit_length()
    return 3 * power // 4 if size <= 3 * power // 4 else power


def samples_of(sample: Any, lengths: Lengths | None, model: nn.Module) -> list[Inputs]:
    """The batches that a run will have, the largest first; none where nothing is known of them.

    A list is several batches. `lengths`: one batch, in as many lengths as there are buckets of these.
    """
    if lengths is None:
        given = sample if isinstance(sample, list) else [] if sample is None else [sample]
        if isinstance(sample, list) and not sample:
            raise ValueError("sample_input is an empty list; it must have a batch, or several")
        return sorted(map(Inputs.from_sample, given), key=_num_elements, reverse=True)
    if isinstance(sample, list):
        raise TypeError("sample_input must be one batch where lengths are given, not a list")
    one = derive_inputs(model) if sample is None else Inputs.from_sample(sample)
    if one is None or one.size(1) is None:
        raise MemScaleError("lengths= needs a sample_input whose integer tensors agree in their second dimension")
    known = checked_lengths(lengths)
    sizes = {min(bucket_top(length), max(known)) for length in known}
    return [one.resized(1, size) for size in sorted(sizes, reverse=True)]


def checked_lengths(lengths: Lengths) -> set[int]:
    """The lengths that come, each once; `TypeError` or `ValueError` where they are none.

    Numbers of NumPy and of tensors are whole numbers, too: lengths of a dataset are often in an array.
    """
    given: object = lengths
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"lengths= must be whole numbers, or a histogram of them, not {lengths!r}")
    read = [(length, _whole(length)) for length in lengths]
    found = {whole for _, whole in read if whole is not None and whole >= 1}
    wrong = [length for length, whole in read if whole is None or whole < 1]
    if wrong or not found:
        what = shown(wrong[0]) if wrong else "nothing"
        raise ValueError(f"lengths= must be positive whole numbers (int), at least one of them; it has {what}")
    counts = list(lengths.values()) if isinstance(lengths, Mapping) else []
    if wrong := [count for count in counts if (_whole(count) or 0) < 0 or _whole(count) is None]:
        raise ValueError(f"lengths= counts how often each length comes, which cannot be {shown(wrong[0])}")
    if not isinstance(lengths, Mapping):
        return found
    coming = {whole for (_, whole), count in zip(read, counts, strict=True) if whole is not None and count}
    if not coming:
        raise ValueError("lengths= counts no length at all: each of them comes 0 times")
    return coming


def _whole(value: object) -> int | None:
    """The whole number that this is; None: it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _num_elements(inputs: Inputs) -> int:
    return sum(tensor.numel() for tensor in inputs.tensors())


def shape_text(inputs: Inputs) -> str:
    """The shapes of a batch: "input_ids 8x512, labels 8x512"; positional inputs have no name."""
    shapes = [(spec.name, "x".join(map(str, spec.shape))) for spec in inputs.specs()]
    return ", ".join(shape if name.isdigit() else f"{name} {shape}" for name, shape in shapes)


def largest_that_fits(samples: Sequence[Inputs], fits: Callable[[Inputs], bool]) -> Inputs | None:
    """The first batch that fits, found by halving, where they come in falling size and the first does not fit."""
    too_large, found = 0, len(samples)
    while too_large + 1 < found:
        middle = (too_large + found) // 2
        too_large, found = (too_large, middle) if fits(samples[middle]) else (middle, found)
    return samples[found] if found < len(samples) else None


def misfit_of(largest: Inputs, fitting: Inputs | None, error: DoesNotFitError) -> DoesNotFitError:
    """The error about the largest of several batches, with the largest of them that fits; None: none does."""
    found = "none fits" if fitting is None else f"the largest that fits is {shape_text(fitting)}"
    misfit = DoesNotFitError(f"With {shape_text(largest)}: {error} Of the batches given, {found}.")
    misfit.batch_size = error.batch_size
    return misfit


def bucket_below(inputs: Inputs, demand: Demand) -> Inputs | None:
    """The largest batch, without data, of the bucket that these inputs are in; None if the demand is in it, too.

    Dimensions in which the two agree are left alone: they are not what varies.
    """
    if len(inputs.specs()) != len(demand.inputs):
        return None
    shapes: dict[int, tuple[int, ...]] = {}
    for tensor, spec in zip(inputs.tensors(), demand.inputs, strict=True):
        tops = [min(bucket_top(size), most) for size, most in zip(tensor.shape, spec.shape, strict=True)]
        pairs = zip(tensor.shape, tops, spec.shape, strict=True)
        shapes[id(tensor)] = tuple(size if size == most else top for size, top, most in pairs)
    if all(shape == spec.shape for shape, spec in zip(shapes.values(), demand.inputs, strict=False)):
        return None
    return inputs.map_tensors(lambda tensor: _without_data(tensor, shapes[id(tensor)]))


def _without_data(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)


def placement_of(actions: Iterable[Action]) -> frozenset[Hashable]:
    """What of a plan cannot change from step to step without moving parameters or state. See NOTE [plans by shape]."""
    return frozenset(_key(action) for action in actions if _places(action))


def does_less(one: Plan, other: Plan) -> bool:
    """Whether a plan does a part of what another does, and places parameters and state alike."""
    mine, theirs = ({_key(action) for action in plan.actions} for plan in (one, other))
    return mine < theirs and placement_of(one.actions) == placement_of(other.actions)


def _places(action: Action) -> bool:
    technique = technique_of(action)
    return technique.places_model or technique.step is not None or not technique.is_exact or technique.changes_loop


def _key(action: Action) -> Hashable:
    names = (field.name for field in dataclasses.fields(action) if field.name != "reason")
    return type(action), *(getattr(action, name) for name in names)


def loosened(planner: Planner, plan: Plan, eligible: Eligible) -> Plan | None:
    """The plan, without what the planner's batch does not need; None where it needs all of it.

    What is left out first is left out of the blocks that come last. Much smaller batches need nothing beside what
    cannot be left out, and for these nothing else is tried.
    """
    travel = eligible.travel_of(plan)
    way, eligible = planner.by(travel), eligible.by(travel)
    rungs = _rungs(plan.actions)
    if not rungs:
        return None
    found = _lowest_rung(way, rungs[:1], rungs[0], eligible) or _lowest_rung(way, rungs, plan.actions, eligible)
    if found is None:
        return None
    return dataclasses.replace(found, strategy=plan.strategy, decision_source=plan.decision_source)


def _lowest_rung(
    way: OneWay, rungs: Sequence[tuple[Action, ...]], everything: tuple[Action, ...], eligible: Eligible
) -> Plan | None:
    """The first of these plans that fits; none does more than `everything`."""
    look_into(way, everything, eligible)
    spare_bytes = eligible.budget.device_bytes - way.first_reserve(eligible)
    model, profile = way.cost_model(), way.profile
    choice = choice_of(everything, profile)
    if not (model.can_run(choice.run) and all(model.can_treat(choice.run, t) for _, t in choice.blocks)):
        return None
    first = next(
        (i for i, rung in enumerate(rungs) if model.evaluate(choice_of(rung, profile)).peak_bytes <= spare_bytes),
        len(rungs),
    )
    for rung in rungs[first : first + _MAX_REHEARSALS]:
        shown = way.confirm(plan_as_it_is(profile, eligible, rung, LOOSENED), eligible)
        if shown.fits:
            return shown
    return None


def predicted_ms(planner: Planner, plan: Plan, eligible: Eligible) -> float:
    """How long a step with the planner's batch is predicted to take under a plan that was made for another."""
    travel = eligible.travel_of(plan)
    way, eligible = planner.by(travel), eligible.by(travel)
    look_into(way, plan.actions, eligible)
    return way.cost_model().evaluate(choice_of(plan.actions, way.profile)).step_ms


def _rungs(actions: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    """From what cannot be left out to nearly everything, a block more at each."""
    streamed = {a.module_fqn for a in actions if isinstance(a, LayerAction) and _places(a)}
    stays = [_places(action) or getattr(action, "module_fqn", None) in streamed for action in actions]
    grouped = [("" if stay else _group(action), action) for stay, action in zip(stays, actions, strict=True)]
    groups = list(dict.fromkeys(group for group, _ in grouped if group))
    left_out = [frozenset(groups[num_kept:]) for num_kept in range(len(groups))]
    return [tuple(action for group, action in grouped if group not in out) for out in left_out]


def _group(action: Action) -> str:
    """What is done to one block is left out together, and so is what one technique does to the rest."""
    technique = technique_of(action)
    if isinstance(action, LayerAction) and technique.scope == "block":
        return action.module_fqn
    return f"({technique.name})"


def look_into(planner: OneWay, actions: tuple[Action, ...], eligible: Eligible) -> None:
    """Try what the plan does, and nothing else."""
    choice = choice_of(actions, planner.profile)
    treatments = planner.treatments(eligible)
    used = {treatment for _, treatment in choice.blocks}
    if any(technique_of(action).places_model for action in actions):
        used.add(STREAM)  # what streams the rest goes by whether blocks can be streamed
    planner.try_variants({TraceKey(t): treatments[t] for t in used if t in treatments}, eligible)
    for technique in dict.fromkeys(technique_of(action) for action in actions):
        if technique.rehearse is not None:
            technique.rehearse(planner, eligible)
