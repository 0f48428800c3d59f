"""A plan as the models of peak and time see it: what is done to each block, and how the run around them is done.

choice_of(actions, profile)         # the choice behind the actions of a plan
actions_of(choice, profile)         # and back: the actions, without their reasons
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memscale._plan import Action, LayerAction
from memscale._profile import KEEP, Precision, Profile, TraceKey, Treatment
from memscale.techniques import TECHNIQUES, TREATED, technique_of
from memscale.techniques.technique import Technique


class _Found:
    """What is found of run options once: candidates are many, share these, and are asked for it again and again."""

    __slots__ = ("_hash", "_is_exact", "_techniques")
    _hash: int
    _is_exact: bool
    _techniques: tuple[Technique, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions(_Found):
    """How everything but the single blocks is run: a field for each `RunOption` of the technique table.

    A field's default stands for doing nothing about it.
    """

    head_rows: int = 0
    """Rows of logits at once; 0: the head is not tiled."""
    num_tiles: int = 0
    """The number of tiles that attention and MLPs are cut into inside the blocks; 0: they are not."""
    offloads_optimizer: float = 0.0
    """The share of the optimizer's state that waits elsewhere."""
    streams_rest: bool = False
    """Embeddings, norms and heads are streamed, too."""
    precision: Precision = ""
    quantizes_optimizer: bool = False
    steps_in_buckets: bool = False
    """The optimizer is stepped a few parameters at a time, its state where it is."""
    steps_in_backward: bool = False
    """Parameters are stepped as soon as their gradients are final."""
    steps_on_device: bool = False
    """Streamed parameters are stepped on the device, not on the host."""
    loss_by_rows: bool = False
    """The gradients of the loss are made some rows at a time."""
    early_state: tuple[tuple[str, int], ...] = ()
    """Blocks before whose backward some of the optimizer's state is asked for, and how many bytes of it."""
    waiting_gradients: float = 0.0
    """The share of each block's gradients that waits elsewhere until the optimizer steps."""

    late_state: tuple[tuple[str, int], ...] = ()
    """Blocks before whose forward state that still leaves when a step is over goes, and how many bytes of it."""

    @property
    def early_bytes(self) -> int:
        """How much of the optimizer's state is asked for early, in all."""
        return sum(num_bytes for _, num_bytes in self.early_state)

    @property
    def late_bytes(self) -> int:
        """How much of the optimizer's state may still leave when the step is over, in all."""
        return sum(num_bytes for _, num_bytes in self.late_state)

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques whose option is chosen, in the order of the fields."""
        try:
            return self._techniques
        except AttributeError:
            object.__setattr__(self, "_techniques", _techniques_of(self))
            return self._techniques

    @property
    def is_exact(self) -> bool:
        try:
            return self._is_exact
        except AttributeError:
            object.__setattr__(self, "_is_exact", all(technique.is_exact for technique in self.techniques))
            return self._is_exact

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(_values_of(self)))
            return self._hash

    @property
    def num_actions(self) -> int:
        return len(self.techniques)

    @property
    def rest_key(self) -> TraceKey:
        """The trace that shows everything but the blocks."""
        return TraceKey(
            head_rows=self.head_rows,
            streams_rest=self.streams_rest,
            precision=self.precision,
            loss_by_rows=self.loss_by_rows,
        )

    def block_key(self, treatment: Treatment) -> TraceKey:
        """The trace that shows the blocks under this treatment."""
        return TraceKey(treatment, num_tiles=self.num_tiles, precision=self.precision, waits=self.waiting_gradients)


_values_of = operator.attrgetter(*(field.name for field in dataclasses.fields(RunOptions)))
OPTIONS: dict[str, Technique] = {t.option.field: t for t in TECHNIQUES if t.option is not None}
"""The technique that each field of `RunOptions` belongs to."""


@functools.lru_cache(maxsize=4096)
def _techniques_of(run: RunOptions) -> tuple[Technique, ...]:
    fields = (field for field in dataclasses.fields(run) if getattr(run, field.name) != field.default)
    return tuple(OPTIONS[field.name] for field in fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A plan as the model sees it."""

    blocks: tuple[tuple[str, Treatment], ...] = ()
    """Blocks that are not simply kept."""
    run: RunOptions = RunOptions()

    @property
    def num_actions(self) -> int:
        return len(self.blocks) + self.run.num_actions

    def with_run(self, **options: Any) -> Choice:
        """The same with these run options."""
        return Choice(self.blocks, dataclasses.replace(self.run, **options))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to."""

    peak_bytes: int
    step_ms: float
    host_bytes: int = 0
    """Parameters, gradients and optimizer state that must wait in host memory."""
    movable_bytes: int = 0
    """Activations and offloaded optimizer state, which wait on the host or below it."""

    @property
    def waiting_bytes(self) -> int:
        """All that is not on the device."""
        return self.host_bytes + self.movable_bytes


# ---- from a choice to actions


def actions_of(choice: Choice, profile: Profile) -> Iterator[Action]:
    """What a plan with this choice does, in the model's order: a plan is read by people."""
    treated, chosen = dict(choice.blocks), choice.run.techniques
    for layer in profile.layers:
        yield from block_actions(layer.module_fqn, treated.get(layer.module_fqn, KEEP))
    for technique in TECHNIQUES:
        if technique in chosen and technique.option is not None:
            yield from technique.option.actions(getattr(choice.run, technique.option.field), profile)


def block_actions(module_fqn: str, treatment: Treatment) -> Iterator[LayerAction]:
    """The actions that give a block this treatment."""
    return (dataclasses.replace(action, module_fqn=module_fqn) for action in TREATED[treatment].actions)


# ---- and back


def choice_of(actions: Iterable[Action], profile: Profile) -> Choice:
    """The choice behind a plan's actions. What is streamed and is no block of the profile is the rest."""
    blocks = {layer.module_fqn for layer in profile.layers if layer.is_block}
    traits: dict[str, dict[str, Any]] = {}
    of_the_run: dict[str, list[Action]] = {}
    for action in actions:
        technique = technique_of(action)
        fqn = action.module_fqn if isinstance(action, LayerAction) else ""
        if technique.traits is not None and (technique.option is None or fqn in blocks):
            traits.setdefault(fqn, {}).update(technique.traits(action))
        elif technique.option is not None:
            of_the_run.setdefault(technique.option.field, []).append(action)
    run = {field: _value(OPTIONS[field], found, profile) for field, found in of_the_run.items()}
    return Choice(tuple((fqn, Treatment(**found)) for fqn, found in traits.items()), RunOptions(**run))


def _value(technique: Technique, actions: Sequence[Action], profile: Profile) -> Any:
    assert technique.option is not None
    return technique.option.value(actions, profile)
