"""What of a model could be tiled, and how finely: found by a recorded forward on the stage of a rehearsal."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

from memscale._plan import TileAttention, TileHead, TileMlp
from memscale._profile.rehearsal import Rehearsal
from memscale._profile.shallow import ShallowRehearsal
from memscale.techniques.tiling import find

logger = logging.getLogger("memscale")

MIN_TILE_ROWS = 128
"""Fewer rows at once make the head's products slow."""
MAX_INNER_TILES, MIN_INNER_ROWS = 16, 16
"""Attention and MLPs are cut into two to so many tiles, of at least so many positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """What could be tiled, and how finely."""

    head: TileHead | None
    head_rows: tuple[int, ...]
    """The smallest and the largest tile worth having."""
    inside: tuple[TileAttention | TileMlp, ...]
    """Actions that each cut something inside the blocks into two tiles."""
    num_inside: tuple[int, ...]


def find_tiles(whole: Rehearsal, shallow: ShallowRehearsal | None) -> Tiles:
    """On the stage of the shorter model where there is one; the actions are for the whole."""
    head, attentions, mlps = _find(whole if shallow is None else shallow.stage)
    action: TileHead | None = None
    head_rows: tuple[int, ...] = ()
    if head:
        head_rows = _head_rows(head.numbers["num_rows"], head.numbers["rows"])
        action = TileHead(head.module_fqns[0], rows=head_rows[0], weight_fqn=head.weight_fqn)
    order = {name: index for index, (name, _) in enumerate(whole.model.named_modules())}
    inside = sorted(_in_two(attentions, mlps, shallow), key=lambda action: order[action.module_fqn])
    longest = max([*attentions.numbers.values(), *mlps.numbers.values()], default=0)
    num_inside = sorted({2, min(MAX_INNER_TILES, _power_of_two_below(longest // MIN_INNER_ROWS + 1))} - {0, 1})
    return Tiles(action, head_rows, tuple(inside), tuple(num_inside))


def _find(rehearsal: Rehearsal) -> tuple[find.Found, find.Found, find.Found]:
    """Head, attentions and MLPs, by a recorded forward."""
    with rehearsal.stage():
        recording = find.record(rehearsal.model, rehearsal.inputs.args, rehearsal.inputs.kwargs)
        head = find.find_head(recording)
        attentions = find.find_attentions(recording)
        mlps = find.find_mlps(recording)
    for found in (head, attentions, mlps):
        logger.debug("tiling: %s: %s", ", ".join(found.module_fqns) or "nothing", found.reason)
    if not (head or attentions or mlps):
        reasons = (f"head: {head.reason}", f"attention: {attentions.reason}", f"MLPs: {mlps.reason}")
        logger.info("nothing to tile in %s (%s)", type(rehearsal.model).__name__, "; ".join(reasons))
    return head, attentions, mlps


def _in_two(
    attentions: find.Found, mlps: find.Found, shallow: ShallowRehearsal | None
) -> Iterator[TileAttention | TileMlp]:
    for fqn in attentions.module_fqns:
        rows = -(-attentions.numbers[fqn] // 2)
        yield from (TileAttention(name, rows=rows) for name in _whole_names(shallow, fqn))
    for fqn in mlps.module_fqns:
        yield from (TileMlp(name, num_tiles=2) for name in _whole_names(shallow, fqn))


def _whole_names(shallow: ShallowRehearsal | None, module_fqn: str) -> list[str]:
    return [module_fqn] if shallow is None else shallow.whole_names([module_fqn])


def _head_rows(num_rows: int, suggested: int) -> tuple[int, ...]:
    """Sizes of tiles, from small ones that are still fast to the largest that are smaller than the batch."""
    largest = _power_of_two_below(num_rows)
    smallest = min(largest, max(suggested, min(MIN_TILE_ROWS, num_rows // 4), 1))
    return tuple(sorted({smallest, largest}))


def _power_of_two_below(number: int) -> int:
    """The largest power of two that is smaller; 0 if there is none."""
    return 1 << ((number - 1).bit_length() - 1) if number > 1 else 0
