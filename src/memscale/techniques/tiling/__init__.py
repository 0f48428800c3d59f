"""Tiling (exact up to the order of summation): tensors that never exist whole.

- `head`: a language-model head and its cross-entropy, a few rows of logits at a time (`lazy`, `recipe`, `loss`);
- `attention`: attention of models that materialise their scores, fused or a few queries at a time (`scores`);
- `mlp`: a position-wise MLP, a stretch of the sequence at a time;
- `find`: which modules of a model are which, from a recorded forward.

Bounds, against the plain model: in fp32 gradients within a relative 1e-5 and the loss within 1e-6.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from memscale._plan import Reason, TileAttention, TileHead, TileMlp
from memscale._profile import Layer, Profile, TraceKey
from memscale.techniques.technique import RunOption, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._decide.step_time import Pace
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials

Inside: TypeAlias = TileAttention | TileMlp


# ---- the head


def _attach_head(actions: Sequence[TileHead], to: Attachment) -> None:
    from memscale.techniques.tiling.head import attach_head

    for action in actions:
        attach_head(action, to.model, to.undo)


def _head_values(traced: Traced, eligible: Eligible) -> tuple[int, ...]:
    """Sizes of the head's tiles that can be chosen."""
    found = traced.sizes.get(TraceKey(head_rows=1))
    return doublings(found[0], found[-1]) if found and traced.profile.head is not None else ()


def _head_actions(rows: int, profile: Profile) -> Iterator[TileHead]:
    assert profile.head is not None
    yield dataclasses.replace(profile.head, rows=rows)


def _head_value(actions: Sequence[TileHead], profile: Profile) -> int:
    return actions[-1].rows


def _head_ms(traced: Traced, pace: Pace, rows: int, compute_ms: Any) -> Any:
    num_tiles = -(-traced.sizes[TraceKey(head_rows=1)][-1] * 2 // rows)
    return pace.tiled_head_ms(compute_ms, num_tiles)


def _head_in_row(layer: Layer, profile: Profile) -> tuple[str, ...]:
    """Whether this row stands for the head: its own, or the nearest above it (BERT's is deep inside `cls`)."""
    head_fqn = None if profile.head is None else profile.head.module_fqn
    rows = [row.module_fqn for row in profile.layers]
    holders = [fqn for fqn in rows if head_fqn is not None and f"{head_fqn}.".startswith(f"{fqn}.")]
    return ("tile the head",) if max(holders, key=len, default=None) == layer.module_fqn else ()


def _head_reason(chosen: Chosen) -> Reason:
    return Reason("tile the head", {**chosen.part(head_rows=0), "rows": chosen.choice.run.head_rows})


def _rehearse_head(trials: Trials, eligible: Eligible) -> None:
    """The smallest tiles and the largest: what lies between, the peak model knows."""
    head = trials.tiles.head
    if head is None:
        return
    trials.learn(head=head)
    rest = trials.rest_actions()
    for rows in trials.tiles.head_rows:
        tiled = (dataclasses.replace(head, rows=rows),)
        trials.try_variants({TraceKey(head_rows=rows): tiled}, eligible)
        if rest:
            trials.try_variants({TraceKey(head_rows=rows, streams_rest=True): (*tiled, *rest)}, eligible)


HEAD = Technique(
    name="head tiling",
    family="tiling",
    switch="enable_tiling",
    actions=(TileHead,),
    scope="run",
    reorders_sums=True,
    option=RunOption(
        field="head_rows",
        values=_head_values,
        actions=_head_actions,
        value=_head_value,
        slowed_ms=_head_ms,
        in_row=_head_in_row,
    ),
    rehearse=_rehearse_head,
    attach=_attach_head,
    place=20,
    words=lambda action: f"tile the head: {action.rows} rows",
    outcome=lambda actions: _counted(actions, TileHead, "head"),
    outcome_rank=20,
    reason=_head_reason,
)


# ---- inside the blocks


def _attach_inside(actions: Sequence[Inside], to: Attachment) -> None:
    from memscale.techniques.tiling.attention import attach_attention
    from memscale.techniques.tiling.mlp import attach_mlp

    for action in actions:
        if isinstance(action, TileAttention):
            attach_attention(action, to.model, to.undo)
        else:
            attach_mlp(action, to.model, to.undo)


def cut_inside(coarsest: tuple[Inside, ...], num_tiles: int) -> tuple[Inside, ...]:
    """Attention and MLPs in so many tiles, from those in two."""
    return tuple(
        dataclasses.replace(action, num_tiles=num_tiles)
        if isinstance(action, TileMlp)
        else dataclasses.replace(action, rows=-(-2 * action.rows // num_tiles))
        for action in coarsest
    )


def _inside_values(traced: Traced, eligible: Eligible) -> tuple[int, ...]:
    """Numbers of tiles inside the blocks that can be chosen."""
    found = [size for key, sizes in traced.sizes.items() if _tiles_blocks_alone(key) for size in sizes]
    return doublings(min(found), max(found)) if found and traced.profile.inside else ()


def _tiles_blocks_alone(key: TraceKey) -> bool:
    return key == TraceKey(key.treatment, num_tiles=1)


def _inside_actions(num_tiles: int, profile: Profile) -> tuple[Inside, ...]:
    return cut_inside(profile.inside, num_tiles)


def _num_tiles(actions: Sequence[Inside], profile: Profile) -> int:
    """How many tiles these were cut into: an MLP says it, and attention says how many queries are in one of them.

    Of numbers that give tiles of the same size, the smallest. Attention that is not in the profile, or whose rows are
    those of no number that was considered, is taken for the coarsest.
    """
    mlps = [action.num_tiles for action in actions if isinstance(action, TileMlp)]
    if mlps:
        return max(mlps)
    rows = {action.module_fqn: action.rows for action in actions if isinstance(action, TileAttention)}
    known = tuple(action for action in profile.inside if action.module_fqn in rows)

    def is_cut(num_tiles: int) -> bool:
        cut = [action for action in cut_inside(known, num_tiles) if isinstance(action, TileAttention)]
        return {action.module_fqn: action.rows for action in cut} == rows

    return next((number for number in _tile_numbers(profile) if is_cut(number)), 2)


def _tile_numbers(profile: Profile) -> tuple[int, ...]:
    """Numbers of tiles inside the blocks that can be chosen: from the fewest that were rehearsed to the most."""
    rehearsed = {key.num_tiles for key in profile.variants} - {0}
    return doublings(min(rehearsed), max(rehearsed)) if rehearsed else ()


def doublings(low: int, high: int) -> tuple[int, ...]:
    """From low to high by doubling; high itself is always there."""
    sizes = [low]
    while sizes[-1] * 2 < high:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if high == low else (*sizes, high)


def _inside_ms(traced: Traced, pace: Pace, num_tiles: int, compute_ms: Any) -> Any:
    return compute_ms + pace.tiles_ms(num_tiles * len(traced.profile.inside))


def _inside_in_row(layer: Layer, profile: Profile) -> tuple[str, ...]:
    """What of a layer is tiled: its attention, its MLP."""
    parts = [a for a in profile.inside if f"{a.module_fqn}.".startswith(f"{layer.module_fqn}.")]
    names = ["tile attention" if isinstance(part, TileAttention) else "tile the MLP" for part in parts]
    return tuple(dict.fromkeys(names)) if layer.module_fqn else ()


def _inside_between(small: Inside, large: Inside, line: Callable[[int, int], int]) -> Inside:
    """Attention is tiled by queries, of which a longer sequence has more; an MLP is cut into a number of tiles."""
    if isinstance(small, TileAttention) and isinstance(large, TileAttention):
        return dataclasses.replace(large, rows=max(1, line(small.rows, large.rows)))
    return large


def _inside_reason(chosen: Chosen) -> Reason:
    part, num_tiles = chosen.part(num_tiles=0), chosen.choice.run.num_tiles
    return Reason("tile attention and MLPs inside the layers", {**part, "tiles": num_tiles})


def _rehearse_inside(trials: Trials, eligible: Eligible) -> None:
    """Rehearse tiles inside blocks, only in blocks that are recomputed in full, and where blocks make up the peak."""
    inside = trials.tiles.inside
    trials.skipped_inside = bool(inside) and not trials.blocks_hold_the_peak(eligible)
    if not inside or trials.skipped_inside:
        return
    trials.learn(inside=inside)
    smallest = {t: actions for t, actions in trials.treatments(eligible).items() if t.recompute == "full"}
    for num_tiles in trials.tiles.num_inside:
        cut = cut_inside(inside, num_tiles)
        named = {TraceKey(t, num_tiles=num_tiles): (*cut, *actions) for t, actions in smallest.items()}
        trials.try_variants(named, eligible)


def _inside_words(action: Inside) -> str:
    if isinstance(action, TileMlp):
        return f"tile inside layers: {action.num_tiles} tiles"
    return f"tile attention: {action.rows} queries"


def _said_once(actions: Sequence[Inside]) -> Sequence[Inside]:
    """An MLP in tiles says how many there are inside the layers; attention without one says it in queries, at most."""
    mlps = [action for action in actions if isinstance(action, TileMlp)]
    attention = [action for action in actions if isinstance(action, TileAttention)]
    return mlps or [max(attention, key=lambda action: action.rows)]


def _inside_outcome(actions: Sequence[Inside]) -> str:
    parts = (_counted(actions, TileAttention, "attention"), _counted(actions, TileMlp, "MLP"))
    return ", ".join(part for part in parts if part)


def _counted(actions: Sequence[Any], kind: type, name: str) -> str:
    count = collections.Counter(map(type, actions))[kind]
    return f"{count} {name}{'s' if count > 1 else ''}" if count else ""


INSIDE = Technique(
    name="tiling inside blocks",
    family="tiling",
    switch="enable_tiling",
    actions=(TileAttention, TileMlp),
    scope="inside",
    reorders_sums=True,
    option=RunOption(
        field="num_tiles",
        values=_inside_values,
        actions=_inside_actions,
        value=_num_tiles,
        slowed_ms=_inside_ms,
        in_row=_inside_in_row,
    ),
    between=_inside_between,
    rehearse=_rehearse_inside,
    is_dear=True,
    attach=_attach_inside,
    place=10,
    words=_inside_words,
    said_once=_said_once,
    outcome=_inside_outcome,
    outcome_rank=21,
    reason=_inside_reason,
)
