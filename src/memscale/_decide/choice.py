"""A plan as the models of peak and time see it: what is done to each block, and how the run around them is done.

choice_of(actions, profile)         # the choice behind the actions of a plan
actions_of(choice, profile)         # and back: the actions, without their reasons
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memscale._errors import assert_never
from memscale._plan import (
    OPTIMIZER_BUCKET_BYTES,
    STEP_BUCKET_BYTES,
    Action,
    Checkpoint,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    QuantizeOptimizer,
    StepInBuckets,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._profile import KEEP, Precision, Profile, TraceKey, Treatment


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """How everything but the single blocks is run."""

    head_rows: int = 0
    """Rows of logits at once; 0: the head is not tiled."""
    num_tiles: int = 0
    """Into how many tiles attention and MLPs are cut inside the blocks; 0: they are not."""
    offloads_optimizer: bool = False
    streams_rest: bool = False
    """Embeddings, norms and heads are streamed, too."""
    precision: Precision = ""
    quantizes_optimizer: bool = False
    steps_in_buckets: bool = False
    """The optimizer is stepped a few parameters at a time, its state where it is."""
    resident_share: float = 0.0
    """With `offloads_optimizer`: the share of the state that stays on the device."""

    @property
    def is_exact(self) -> bool:
        return not self.precision and not self.quantizes_optimizer

    @property
    def num_actions(self) -> int:
        of_another = {"resident_share"}
        return sum(bool(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in of_another)

    @property
    def rest_key(self) -> TraceKey:
        """The trace that shows everything but the blocks."""
        return TraceKey(head_rows=self.head_rows, streams_rest=self.streams_rest, precision=self.precision)

    def block_key(self, treatment: Treatment) -> TraceKey:
        """The trace that shows the blocks under this treatment."""
        return TraceKey(treatment, num_tiles=self.num_tiles, precision=self.precision)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A plan as the model sees it."""

    blocks: tuple[tuple[str, Treatment], ...] = ()
    """Blocks that are not simply kept."""
    run: RunOptions = RunOptions()

    @property
    def num_actions(self) -> int:
        return len(self.blocks) + self.run.num_actions


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to."""

    peak_bytes: int
    step_ms: float
    host_bytes: int = 0
    """Parameters, gradients and optimizer state that must wait in host memory."""
    movable_bytes: int = 0
    """Activations and offloaded optimizer state, which wait on the host or below it."""


# ---- from a choice to actions


def actions_of(choice: Choice, profile: Profile) -> Iterator[Action]:
    """What a plan with this choice does, in the model's order: a plan is read by people."""
    treated, run = dict(choice.blocks), choice.run
    for layer in profile.layers:
        yield from block_actions(layer.module_fqn, treated.get(layer.module_fqn, KEEP))
    if run.streams_rest:
        yield from (StreamParameters(module_fqn) for module_fqn in profile.rest)
    if run.num_tiles:
        yield from cut_inside(profile.inside, run.num_tiles)
    if run.head_rows:
        assert profile.head is not None
        yield dataclasses.replace(profile.head, rows=run.head_rows)
    if run.steps_in_buckets:
        yield StepInBuckets(STEP_BUCKET_BYTES)
    if run.offloads_optimizer:
        yield OffloadOptimizer(OPTIMIZER_BUCKET_BYTES, run.resident_share)
    if run.precision:
        yield MixedPrecision(run.precision)
    if run.quantizes_optimizer:
        yield QuantizeOptimizer(OPTIMIZER_BUCKET_BYTES)


def block_actions(module_fqn: str, treatment: Treatment) -> Iterator[Action]:
    """What gives a block this treatment."""
    match treatment.recompute:
        case "full" if treatment.streams:
            yield StreamParameters(module_fqn)
        case "full":
            yield Checkpoint(module_fqn)
        case "selective":
            yield Checkpoint(module_fqn, keep=("matmul", "attention"))
        case "none":
            pass
        case _:
            assert_never(treatment.recompute)
    if treatment.offloads:
        yield OffloadActivations(module_fqn)


def cut_inside(coarsest: tuple[TileAttention | TileMlp, ...], num_tiles: int) -> tuple[TileAttention | TileMlp, ...]:
    """Attention and MLPs in so many tiles, from those in two."""
    return tuple(
        dataclasses.replace(action, num_tiles=num_tiles)
        if isinstance(action, TileMlp)
        else dataclasses.replace(action, rows=-(-2 * action.rows // num_tiles))
        for action in coarsest
    )


# ---- and back


def choice_of(actions: Iterable[Action], profile: Profile) -> Choice:
    """The choice behind a plan's actions. What is streamed and is no block of the profile is the rest."""
    blocks = {layer.module_fqn for layer in profile.layers if layer.is_block}
    treated: dict[str, Treatment] = {}
    run: dict[str, Any] = {}
    tiled: list[TileAttention | TileMlp] = []

    def treat(module_fqn: str, **changes: Any) -> None:
        treated[module_fqn] = dataclasses.replace(treated.get(module_fqn, KEEP), **changes)

    for action in actions:
        match action:
            case Checkpoint():
                treat(action.module_fqn, recompute="selective" if action.keep else "full")
            case OffloadActivations():
                treat(action.module_fqn, offloads=True)
            case StreamParameters() if action.module_fqn in blocks:
                treat(action.module_fqn, recompute="full", streams=True)
            case StreamParameters():
                run["streams_rest"] = True
            case TileHead():
                run["head_rows"] = action.rows
            case TileMlp() | TileAttention():
                tiled.append(action)
            case StepInBuckets():
                run["steps_in_buckets"] = True
            case OffloadOptimizer():
                run["offloads_optimizer"], run["resident_share"] = True, action.resident_share
            case MixedPrecision():
                run["precision"] = action.dtype
            case QuantizeOptimizer():
                run["quantizes_optimizer"] = True
            case _:
                assert_never(action)
    return Choice(tuple(treated.items()), RunOptions(num_tiles=_num_tiles(tiled, profile), **run))


def _num_tiles(tiled: Sequence[TileAttention | TileMlp], profile: Profile) -> int:
    """Into how many tiles these were cut: an MLP says it, and attention says how many queries are in one of them.

    Of numbers that give tiles of the same size, the smallest. Attention that is not in the profile, or whose rows are
    those of no number that was considered, is taken for the coarsest.
    """
    mlps = [action.num_tiles for action in tiled if isinstance(action, TileMlp)]
    if mlps or not tiled:
        return max(mlps, default=0)
    rows = {action.module_fqn: action.rows for action in tiled if isinstance(action, TileAttention)}
    known = tuple(action for action in profile.inside if action.module_fqn in rows)

    def is_cut(num_tiles: int) -> bool:
        cut = [action for action in cut_inside(known, num_tiles) if isinstance(action, TileAttention)]
        return {action.module_fqn: action.rows for action in cut} == rows

    return next((number for number in tile_numbers(profile) if is_cut(number)), 2)


def tile_numbers(profile: Profile) -> tuple[int, ...]:
    """Numbers of tiles inside the blocks that can be chosen: from the fewest that were rehearsed to the most."""
    rehearsed = {key.num_tiles for key in profile.variants} - {0}
    return doublings(min(rehearsed), max(rehearsed)) if rehearsed else ()


def doublings(low: int, high: int) -> tuple[int, ...]:
    """From low to high by doubling; high itself is always there."""
    sizes = [low]
    while sizes[-1] * 2 < high:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if high == low else (*sizes, high)
