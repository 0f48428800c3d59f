"""Profiles of sizes that were not profiled: between two that were, and beyond them. No torch.

Bytes and arithmetic of a segment are straight lines in the batch, and curves that bend upwards in the length of a
sequence, where attention keeps its scores. So between two profiles the line through both is never below the truth;
beyond them it may be, which is why what is found there is rehearsed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

from memscale._plan import Action
from memscale._profile import Profile, Segment, StepTrace, TensorSpec, TraceKey
from memscale.techniques import technique_of

AnyAction = TypeVar("AnyAction", bound=Action)


def at_size(small: Profile, large: Profile, sizes: tuple[int, int], size: int) -> Profile:
    """The profile at `size` from those at `sizes`; what only one of them has is left out."""
    position = (size - sizes[0]) / (sizes[1] - sizes[0])
    pairs = _paired(small, large)
    variants = {key: _trace(small.variants[pairs[key]], large.variants[key], position) for key in pairs}
    plain = _trace(small.plain, large.plain, position)
    assert plain is not None, "the plain step has the same pieces at every size"
    return dataclasses.replace(
        large,
        inputs=tuple(_spec(a, b, sizes[0], size) for a, b in zip(small.inputs, large.inputs, strict=True)),
        input_bytes=_line(small.input_bytes, large.input_bytes, position),
        plain=plain,
        variants={key: trace for key, trace in variants.items() if trace is not None},
        inside=tuple(_action(a, b, position) for a, b in zip(small.inside, large.inside, strict=False)),
    )


def can_scale(small: Profile, large: Profile) -> bool:
    """Whether a step has the same pieces at both sizes."""
    return _trace(small.plain, large.plain, 0.5) is not None and len(small.inputs) == len(large.inputs)


def _paired(small: Profile, large: Profile) -> dict[TraceKey, TraceKey]:
    """The trace of the small profile for each of the large one. Tiles are matched by the rank of their size."""
    keys = {ranked: key for key, ranked in _ranked(small).items()}
    return {key: keys[ranked] for key, ranked in _ranked(large).items() if ranked in keys}


def _ranked(profile: Profile) -> dict[TraceKey, tuple[TraceKey, int]]:
    """Which trace each is, without the size of its tiles, and the rank of that size."""
    sizes: dict[TraceKey, list[int]] = {}
    for key in profile.variants:
        sizes.setdefault(key.of_any_size, []).append(key.tile_size)
    return {key: (key.of_any_size, sorted(sizes[key.of_any_size]).index(key.tile_size)) for key in profile.variants}


def _trace(small: StepTrace, large: StepTrace, position: float) -> StepTrace | None:
    """The trace between the two; None where the step has other pieces."""
    places = [[(s.phase, s.module_fqn) for s in trace.segments] for trace in (small, large)]
    if places[0] != places[1]:
        return None
    pairs = zip(small.segments, large.segments, strict=True)
    return StepTrace(
        tuple(_segment(a, b, position) for a, b in pairs),
        _line(small.gradients_at_peak, large.gradients_at_peak, position),
        _line(small.activations_at_peak, large.activations_at_peak, position),
    )


def _segment(small: Segment, large: Segment, position: float) -> Segment:
    lines = {
        field.name: _line(getattr(small, field.name), getattr(large, field.name), position)
        for field in dataclasses.fields(Segment)
        if field.name not in ("phase", "module_fqn")
    }
    least = {name: number if name == "net_bytes" else max(0, number) for name, number in lines.items()}
    return Segment(phase=large.phase, module_fqn=large.module_fqn, **least)


def _line(small: int, large: int, position: float) -> int:
    return small + math.ceil((large - small) * position)


def _spec(small: TensorSpec, large: TensorSpec, small_size: int, size: int) -> TensorSpec:
    shape = tuple(a if a == b else a * size // small_size for a, b in zip(small.shape, large.shape, strict=True))
    return TensorSpec(large.name, shape, large.dtype)


def _action(small: AnyAction, large: AnyAction, position: float) -> AnyAction:
    between = technique_of(large).between
    if between is None:
        return large
    scaled: AnyAction = between(small, large, lambda low, high: _line(low, high, position))
    return scaled
