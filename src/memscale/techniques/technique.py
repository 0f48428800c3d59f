"""`Technique`: what the stages know about one thing that a plan can do. Data and functions of data; no torch.

A stage does not ask which technique it has before it, it asks the record:

    planning     `hindrance`, `treatments`, `rehearse`    may it be used here, and what is rehearsed for it?
    observing    `careful`                                what is done until a step of the model has been seen?
    deciding     `treatments`, `option`, `state`          what can be chosen, and what does that do to bytes and time?
    confirming   `step`, `settling_steps`                 how does the optimizer step, and when is a step settled?
    executing    `attach`, `place`                        how is it attached, and after what?
    reporting    `words`, `outcome`, `reason`             how is it said, and why was it chosen?

A technique is about single blocks (`treatments`), about the run around them (`option`), or both, as streaming is.
Records are read where no torch is loaded, so what attaches a technique is imported when it is called.
docs/design/add_a_technique.md walks through one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from memscale._config import Config, OptimizationMode, modes_of
from memscale._hardware import Hardware
from memscale._plan import Action, LayerAction, Reason
from memscale._profile import Layer, OptimizerCost, Profile, TraceKey, Treatment

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._decide.optimizer_shares import OptimizerShares
    from memscale._decide.step_time import Pace, StepWork
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials


@dataclasses.dataclass(frozen=True, slots=True)
class Treated:
    """A treatment that blocks can be given, and the actions that give it; they name no module yet."""

    treatment: Treatment
    actions: tuple[LayerAction, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """What was rehearsed of a step, as far as choices can be made of it."""

    profile: Profile
    sizes: Mapping[TraceKey, Sequence[int]]
    """The sizes of tiles that were traced, in order, by key with tiles of any size; 0 where nothing is tiled."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOption:
    """A field of `RunOptions`: something about the run around the blocks that can be chosen."""

    field: str
    values: Callable[[Traced, Eligible], tuple[Any, ...]]
    """What can be chosen beside the field's default, which stands for doing nothing."""
    actions: Callable[[Any, Profile], Iterable[Action]]
    """What a plan with this value does."""
    value: Callable[[Sequence[Any], Profile], Any]
    """And back: the value behind these actions."""
    slowed_ms: Callable[[Traced, Pace, Any, Any], Any] | None = None
    """Forward and backward with this value, from their time without. None: as their traces say."""
    in_row: Callable[[Layer, Profile], tuple[str, ...]] | None = None
    """What is said in the row of a layer that it is about; None: it is about no layer."""
    asked_for: Callable[[Profile, Eligible], Iterable[Action]] | None = None
    """What is done where nothing is needed but the user has asked for it by name; None: nothing."""


class StepManner(Protocol):
    """How an optimizer steps, and where its state waits meanwhile. `streamed_bytes`: a number or an array of them."""

    def can_step(self, cost: OptimizerCost) -> bool: ...

    def resident_bytes(self, shares: OptimizerShares, run: Any, streamed_bytes: Any) -> Any: ...

    def bytes_away(self, shares: OptimizerShares, run: Any, streamed_bytes: Any) -> tuple[Any, Any]: ...

    def step_bytes(self, shares: OptimizerShares, run: Any, streamed_bytes: Any) -> Any: ...

    def step_ms(self, shares: OptimizerShares, run: Any, streamed_bytes: Any) -> Any:
        """How long the step takes by itself, where it is not in buckets that take turns with others."""
        ...

    def work(self, shares: OptimizerShares, run: Any, streamed_bytes: Any) -> StepWork | None:
        """What the step takes where it is in buckets, which take turns with those of streamed parameters; else None."""
        ...

    def exact_bytes(self, cost: OptimizerCost, run: Any) -> tuple[int, int]:
        """State on the device and what the step needs on top, of an optimizer whose cost is known to the byte."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """What a technique does to the optimizer's bytes and time."""

    cost: Callable[[Profile], OptimizerCost | None] | None = None
    """What the optimizer costs instead; None: what it does by itself."""
    manner: StepManner | None = None
    """How it steps; None: as it does by itself, all at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """How the optimizer steps under a plan, as far as that differs from how it steps by itself."""

    moves: bool = False
    """Whether optimizer state waits on the next tier."""
    resident_share: float = 0.0
    """The share of what could wait there that stays on the device."""
    packs: bool = False
    """Whether optimizer state waits in 8 bits."""
    in_buckets: bool = False
    """A few parameters are stepped at a time."""
    bucket_bytes: int | None = None
    """The size of the buckets in which state travels; None: none does."""
    streams: bool = False
    """Some of its parameters are not on the device."""
    guests: bool = False
    """Whether streamed parameters visit the device to be stepped."""
    early: tuple[tuple[str, int], ...] = ()
    """Layers before whose backward some of the state that waits elsewhere is asked for, and how many bytes of it."""

    late: tuple[tuple[str, int], ...] = ()
    """Layers before whose forward some of the state that still leaves when a step is over goes, and how many bytes."""

    @property
    def early_bytes(self) -> int:
        """How much of it is on the device, or on its way, when the step begins; at most."""
        return sum(num_bytes for _, num_bytes in self.early)

    @property
    def late_bytes(self) -> int:
        """How much of it is still on the device when the step is over; at most."""
        return sum(num_bytes for _, num_bytes in self.late)


@dataclasses.dataclass(frozen=True, slots=True)
class Unrehearsed:
    """What is known of a model that cannot be rehearsed, when its careful plan is made."""

    eligible: Eligible
    can_move_state: bool
    """Optimizer state may wait on the next tier."""
    state_is_large: bool
    """Parameters, gradients and optimizer state leave little of the budget."""
    streams: bool
    """The parameters of its blocks are streamed."""


def nothing_hinders(config: Config, hardware: Hardware) -> str:
    return ""


def nothing_refused(actions: Sequence[Any], config: Config, hardware: Hardware) -> str:
    return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Technique:
    """One thing that a plan can do to a model. There is one record of each: a record equals itself alone."""

    name: str
    family: str
    """Techniques of one switch are one family, under which it is said what was done."""
    switch: str
    """The field of `Config`."""
    actions: tuple[type[Action], ...]
    scope: Literal["block", "inside", "run"]
    """It is about whole blocks, about parts of them, or about the run."""
    is_exact: bool = True
    """Up to the order of summation; False where numbers are rounded that would not be."""
    reorders_sums: bool = False
    """It is exact up to the order of summation: sums are taken in pieces, so last bits may differ."""
    travels: bool = False
    """Because of it tensors go to the next tier and come back."""
    changes_loop: bool = False
    """The training loop notices it: it is used wherever the user asks for it, and nowhere else."""

    hindrance: Callable[[Config, Hardware], str] = nothing_hinders
    """Why it cannot be used there though its switch is on; "" where it can."""
    refusal: Callable[[Sequence[Any], Config, Hardware], str] = nothing_refused
    """Why a saved plan with these actions cannot be carried out there; "" where it can."""

    treatments: tuple[Treated, ...] = ()
    """What blocks can be treated with because of it."""
    traits: Callable[[Any], Mapping[str, Any]] | None = None
    """The fields of `Treatment` that its action on a block sets."""
    recomputes: bool = False
    """Whether its blocks are computed again in backward."""
    option: RunOption | None = None
    state: StateRule | None = None
    step: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None
    """The fields of `PlannedStep` that its actions set; None: they do not concern the optimizer's step."""
    only_steps: bool = False
    """Whether forward and backward compute and free what they do without it: it is about the optimizer's step alone."""
    buckets_only_step: bool = False
    """Whether forward and backward are the same whatever the size of its buckets (`bucket_bytes` of its actions)."""

    careful: Callable[[Unrehearsed], Iterable[Action]] | None = None
    """What it does in a careful plan beside its treatment of blocks; None: nothing."""
    between: Callable[[Any, Any, Callable[[int, int], int]], Any] | None = None
    """An action for a batch between two sizes, from those for both and the line through two numbers; None: the action
    does not depend on the size."""

    rehearse: Callable[[Trials, Eligible], None] | None = None
    """What is tried for it beside its treatments of blocks, which are always tried; None: nothing."""
    is_dear: bool = False
    """Trying it takes long: that is done only when nothing else suffices."""
    settling_steps: int = 1
    """Steps until one is as all later ones, where transfers overlap with compute."""

    attach: Callable[[Sequence[Any], Attachment], None]
    place: int
    """The order of attaching: what is inside a block comes before what recomputes or moves the block as a whole."""
    places_model: bool = False
    """Whether it puts the model where it computes."""

    words: Callable[[Any], str]
    """What one action does: "checkpoint"."""
    beside: str = ""
    """What it adds to the words of another technique of the same block; "": its words take the place of theirs."""
    begins: tuple[str, ...] = ()
    """How its words about blocks begin, the mildest first."""
    said_once: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    """The part of its actions on a run that is put into words; None: all of them."""
    outcome: Callable[[Sequence[Any]], str]
    """What was done to a model, in words: "20 blocks recomputed in backward"."""
    outcome_rank: int
    """Where that stands among what others did."""
    reason: Callable[[Chosen], Reason] | None = None
    """Why its option was chosen. Treatments of blocks have one rule for all techniques."""
    note: Callable[[str, frozenset[str]], str] | None = None
    """What a plan for this type of device, with techniques of these names, says about its bits."""

    @property
    def modes(self) -> frozenset[OptimizationMode]:
        """The modes that turn it on."""
        return modes_of(self.switch)
