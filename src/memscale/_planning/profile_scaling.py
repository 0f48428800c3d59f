"""Profiles of sizes that were not profiled: between two that were, and beyond them. No torch.

Bytes and arithmetic of a segment are straight lines in the batch, and curves that bend upwards in the length of a
sequence, where attention keeps its scores. So between two profiles the line through both is never below the truth;
beyond them it may be, which is why what is found there is rehearsed.
"""

from __future__ import annotations

import dataclasses
import math

from memscale._decide.choice import INSIDE, TILE_HEAD
from memscale._plan import TileAttention, TileMlp
from memscale._profile import Profile, Segment, StepTrace, TensorSpec


def at_size(small: Profile, large: Profile, sizes: tuple[int, int], size: int) -> Profile:
    """The profile at `size` from those at `sizes`; what only one of them has is left out."""
    position = (size - sizes[0]) / (sizes[1] - sizes[0])
    pairs = _paired(small, large)
    variants = {name: _trace(small.variants[pairs[name]], large.variants[name], position) for name in pairs}
    plain = _trace(small.plain, large.plain, position)
    assert plain is not None, "the plain step has the same pieces at every size"
    return dataclasses.replace(
        large,
        inputs=tuple(_spec(a, b, sizes[0], size) for a, b in zip(small.inputs, large.inputs, strict=True)),
        input_bytes=_line(small.input_bytes, large.input_bytes, position),
        plain=plain,
        variants={name: trace for name, trace in variants.items() if trace is not None},
        inside=tuple(_inside(a, b, position) for a, b in zip(small.inside, large.inside, strict=False)),
    )


def can_scale(small: Profile, large: Profile) -> bool:
    """Whether a step has the same pieces at both sizes."""
    return _trace(small.plain, large.plain, 0.5) is not None and len(small.inputs) == len(large.inputs)


def _paired(small: Profile, large: Profile) -> dict[str, str]:
    """By the name of a trace of the large profile the small one's. Tiles go by rank: their sizes follow the batch's."""
    names = {key: name for name, key in _ranked(small).items()}
    return {name: names[key] for name, key in _ranked(large).items() if key in names}


def _ranked(profile: Profile) -> dict[str, tuple[str, int]]:
    tiled: dict[str, list[tuple[int, str]]] = {}
    found: dict[str, tuple[str, int]] = {}
    for name in profile.variants:
        kind, _, rest = name.partition(":")
        if kind.endswith((TILE_HEAD, INSIDE)) and rest:
            rows, _, treatment = rest.partition(":")
            tiled.setdefault(f"{kind}:{treatment}", []).append((int(rows), name))
        else:
            found[name] = (name, 0)
    for key, sizes in tiled.items():
        found |= {name: (key, rank) for rank, (_, name) in enumerate(sorted(sizes))}
    return found


def _trace(small: StepTrace, large: StepTrace, position: float) -> StepTrace | None:
    """None where the step has other pieces."""
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


def _inside(small: TileAttention | TileMlp, large: TileAttention | TileMlp, position: float) -> TileAttention | TileMlp:
    if isinstance(small, TileAttention) and isinstance(large, TileAttention):
        return dataclasses.replace(large, rows=max(1, _line(small.rows, large.rows, position)))
    return large
