"""A plan as the models of peak and time see it: what is done to each block, and how the run around them is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import Any, Literal, get_args

from memscale._plan import (
    Action,
    Checkpoint,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    QuantizeOptimizer,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)

Treatment = Literal["keep", "selective", "offload", "checkpoint", "checkpoint+offload", "stream", "stream+offload"]
"""What is done to a block: its activations are kept, partly recomputed, sent away or recomputed; or its parameters
visit the device only while it computes (and its activations are recomputed). With "+offload" the input from which it
is recomputed waits elsewhere, too."""
TREATMENTS: tuple[Treatment, ...] = get_args(Treatment)

TILE_HEAD, INSIDE = "tile_head", "inside"
"""Kinds of traces with tiles: of the head; of attention and MLPs inside the blocks. See `tile_name`."""
REST = "rest/"
"""Before the name of a trace in which the rest of the model is streamed. In 16 bits: the type and a slash in front."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How everything but the single blocks is run."""

    head_rows: int = 0
    """Rows of logits at once; 0: the head is not tiled."""
    num_tiles: int = 0
    """Into how many tiles attention and MLPs are cut inside the blocks; 0: they are not."""
    offloads_optimizer: bool = False
    streams_rest: bool = False
    """Embeddings, norms and heads are streamed, too."""
    precision: str = ""
    """The 16-bit type that is computed in; "": as the model says."""
    quantizes_optimizer: bool = False

    @property
    def is_exact(self) -> bool:
        return not self.precision and not self.quantizes_optimizer

    @property
    def num_actions(self) -> int:
        return sum(bool(getattr(self, field.name)) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A plan as the model sees it."""

    blocks: tuple[tuple[str, Treatment], ...] = ()
    """Blocks that are not simply kept."""
    run: Run = Run()

    @property
    def num_actions(self) -> int:
        return len(self.blocks) + self.run.num_actions


def choice_of(actions: Iterable[Action], blocks: Container[str] | None = None) -> Choice:
    """The choice behind a plan's actions; what is streamed outside of these `blocks` is the rest."""
    treated: dict[str, set[str]] = {}
    run: dict[str, Any] = {}
    for action in actions:
        match action:
            case Checkpoint():
                treated.setdefault(action.module_fqn, set()).add("selective" if action.keep else "checkpoint")
            case OffloadActivations():
                treated.setdefault(action.module_fqn, set()).add("offload")
            case StreamParameters() if blocks is None or action.module_fqn in blocks:
                treated.setdefault(action.module_fqn, set()).add("stream")
            case StreamParameters():
                run["streams_rest"] = True
            case TileHead():
                run["head_rows"] = action.rows
            case TileMlp():
                run["num_tiles"] = action.num_tiles
            case TileAttention():
                run.setdefault("num_tiles", 2)
            case OffloadOptimizer():
                run["offloads_optimizer"] = True
            case MixedPrecision():
                run["precision"] = action.dtype
            case QuantizeOptimizer():
                run["quantizes_optimizer"] = True
    named: Any = [(fqn, "+".join(sorted(how, key=lambda name: name == "offload"))) for fqn, how in treated.items()]
    return Choice(tuple(named), Run(**run))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to."""

    peak_bytes: int
    step_ms: float
    host_bytes: int = 0
    """Parameters, gradients and optimizer state that must wait in host memory."""
    movable_bytes: int = 0
    """Activations and offloaded optimizer state, which wait on the host or below it."""


def tile_name(kind: str, size: int, treatment: str = "") -> str:
    """The name of a trace in which tiles have this size."""
    return f"{kind}:{size}:{treatment}"


def doublings(low: int, high: int) -> tuple[int, ...]:
    """From low to high by doubling; high itself is always there."""
    sizes = [low]
    while sizes[-1] * 2 < high:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if high == low else (*sizes, high)
