"""Deep models of equal blocks are tried at a fraction of their depth.

In a run of equal blocks all but the first and last few are left out, on a fake copy of the model, and the trace of
such a step is stretched again: the last block before the gap stands for those that are missing. Whether that is right
is not assumed: the plain step, stretched, must be the plain step of the whole model, segment by segment. Where that
holds, whole plans are rehearsed so, too: what is left out are blocks among others that are treated alike.

NOTE [ends of steps that overlap]: where blocks are streamed beside compute, the end of a stretched step may show one
block more than the whole model's does, never less. Plans that stream so are rehearsed on the whole model, so that what
they promise is right; among candidates they may look a little higher than they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

from torch import nn

from memscale._plan import Action, Reason
from memscale._profile import NOTHING_HELD, LoopHolds, Phase, Segment, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.layers import fingerprint
from memscale._profile.leftovers import Caches
from memscale._profile.rehearsal import Attach, FakeRehearsal, Rehearsal

logger = logging.getLogger("memscale")

KEPT = 3
"""Blocks at either end of a run that are tried."""
_MIN_LEFT_OUT = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A run of equal blocks in one container, by position."""

    container_fqn: str
    num_children: int
    start: int
    end: int
    num_kept: int = KEPT
    """How many blocks are kept at either end."""

    @property
    def left_out(self) -> range:
        return range(self.start + self.num_kept, self.end - self.num_kept)

    @property
    def kept(self) -> list[int]:
        return [position for position in range(self.num_children) if position not in self.left_out]

    def name(self, position: int) -> str:
        return f"{self.container_fqn}.{position}" if self.container_fqn else str(position)

    @property
    def stand_in(self) -> int:
        """The block that stands for those that are left out."""
        return self.start + self.num_kept - 1

    @property
    def stands_in(self) -> str:
        """The name of the block that stands in for those that are left out."""
        return self.name(self.stand_in)


def find_runs(
    model: nn.Module,
    blocks: Iterable[str],
    treatment_of: Callable[[str], Hashable] = lambda module_fqn: None,
    num_kept_of: Callable[[str], int] = lambda module_fqn: KEPT,
) -> list[Cut]:
    """Runs of equal blocks, treated alike, that are long enough to be worth it.

    `num_kept_of` says of a run's first block how many are kept at either end.
    """
    by_container: dict[str, list[tuple[int, Hashable]]] = {}
    for module_fqn in blocks:
        container_fqn, _, name = module_fqn.rpartition(".")
        if name.isdigit():
            alike = (fingerprint(model.get_submodule(module_fqn)), treatment_of(module_fqn))
            by_container.setdefault(container_fqn, []).append((int(name), alike))
    cuts = []
    for container_fqn, found in by_container.items():
        num_children = len(model.get_submodule(container_fqn)._modules)
        if [position for position, _ in found] != list(range(num_children)):
            continue
        for _, group in itertools.groupby(found, lambda entry: entry[1]):
            positions = [position for position, _ in group]
            run = Cut(container_fqn, num_children, positions[0], positions[-1] + 1)
            num_kept = num_kept_of(run.name(run.start))
            if len(positions) >= 2 * num_kept + _MIN_LEFT_OUT:
                cuts.append(dataclasses.replace(run, num_kept=num_kept))
    return cuts


def find_cuts(model: nn.Module, blocks: Iterable[str]) -> list[Cut]:
    """The first run of each container."""
    return list({cut.container_fqn: cut for cut in reversed(find_runs(model, blocks))}.values())[::-1]


def find_runs_under(
    rehearsal: Rehearsal, actions: Iterable[Action], num_kept_of: Callable[[str], int] = lambda module_fqn: KEPT
) -> list[Cut]:
    """Runs of equal blocks that these actions treat alike; see `find_runs`."""
    blocks = rehearsal.blocks
    treatments: dict[str, list[str]] = {}
    for action in actions:
        block = _block_of(action, blocks)
        if block is not None:
            nameless = dataclasses.replace(_renamed_action(action, {block: ""}), reason=Reason(""))
            treatments.setdefault(block, []).append(str(nameless))
    return find_runs(rehearsal.model, blocks, lambda module_fqn: tuple(treatments.get(module_fqn, ())), num_kept_of)


def short_actions(actions: Iterable[Action], blocks: Collection[str], cuts: list[Cut]) -> tuple[Action, ...]:
    """What is done to the model without what the cuts leave out, by the names that its blocks have then."""
    left_out = {cut.name(position) for cut in cuts for position in cut.left_out}
    names = {name: new for name, new in _short_names(cuts).items() if name in blocks}
    # Blocks of other containers, which no cut touches, are treated as the plan says.
    return tuple(_renamed_action(a, names) for a in actions if _block_of(a, blocks) not in left_out)


@contextlib.contextmanager
def shortened(model: nn.Module, cuts: list[Cut]) -> Iterator[None]:
    """The model itself without what the cuts leave out."""
    whole = {cut.container_fqn: model.get_submodule(cut.container_fqn)._modules for cut in cuts}
    names = _short_names(cuts)
    try:
        for container_fqn, children in whole.items():
            prefix = f"{container_fqn}." if container_fqn else ""
            kept = [old for old in children if f"{prefix}{old}" in names]
            container = model.get_submodule(container_fqn)
            container._modules = {str(new): children[old] for new, old in enumerate(kept)}
        yield
    finally:
        for container_fqn, children in whole.items():
            model.get_submodule(container_fqn)._modules = children


def _short_names(cuts: list[Cut]) -> dict[str, str]:
    """The names of blocks that are kept in the shorter model, by those in the whole one."""
    names = {}
    for container_fqn in {cut.container_fqn for cut in cuts}:
        here = [cut for cut in cuts if cut.container_fqn == container_fqn]
        left_out = {position for cut in here for position in cut.left_out}
        kept = [position for position in range(here[0].num_children) if position not in left_out]
        names.update({here[0].name(old): here[0].name(new) for new, old in enumerate(kept)})
    return names


def rehearse_short(
    rehearsal: Rehearsal, actions: tuple[Action, ...], cuts: list[Cut], attach: Callable[[tuple[Action, ...]], Attach]
) -> StepTrace | None:
    """The step under a plan without what the cuts leave out, stretched.

    None where there are no cuts, or the shorter model does not run.
    """
    if not cuts:
        return None
    with shortened(rehearsal.model, cuts):
        try:
            segments = rehearsal.run(attach(short_actions(actions, rehearsal.blocks, cuts))).segments
        except Exception as error:
            logger.debug("the plan does not run at a fraction of the depth: %s: %s", type(error).__name__, str(error))
            return None
    for cut in cuts:
        segments = _stretch(cut, segments)
    return StepTrace(segments)


def _block_of(action: Action, blocks: Iterable[str]) -> str | None:
    module_fqn = getattr(action, "module_fqn", "")
    found = [block for block in blocks if f"{module_fqn}.".startswith(f"{block}.")]
    return max(found, key=len, default=None)


def _renamed_action(action: Action, names: dict[str, str]) -> Action:
    block = _block_of(action, names)
    if block is None:
        return action
    named: Any = action
    renamed: Action = dataclasses.replace(named, module_fqn=names[block] + named.module_fqn[len(block) :])
    return renamed


class ShallowRehearsal:
    """A stage with a shorter copy of the model; what is tried there is stretched to the depth of the whole."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        device_type: str,
        blocks: Collection[str],
        cuts: list[Cut],
        caches: Caches | None = None,
    ) -> None:
        self.cuts = cuts
        self.stage = FakeRehearsal(model, inputs, device_type, blocks, caches)
        for cut in cuts:
            container = self.stage.model.get_submodule(cut.container_fqn)
            children = list(container._modules.values())
            container._modules = {str(new): children[old] for new, old in enumerate(cut.kept)}

    def stretch(self, trace: StepTrace) -> StepTrace:
        """The step of the whole model."""
        segments = trace.segments
        for cut in self.cuts:
            segments = _stretch(cut, segments)
        return StepTrace(segments)

    def whole_names(self, module_fqns: Iterable[str]) -> list[str]:
        """Modules of the whole model, by those that were found on the stage."""
        found = list(module_fqns)
        for cut in self.cuts:
            found = [name for module_fqn in found for name in _whole_names(cut, module_fqn)]
        return found


def open_shallow(
    model: nn.Module,
    inputs: Inputs,
    device_type: str,
    blocks: Collection[str],
    plain: StepTrace,
    loop: LoopHolds = NOTHING_HELD,
    caches: Caches | None = None,
) -> ShallowRehearsal | None:
    """None where the model has no long runs of equal blocks, or a shorter model does not behave like the whole.

    `caches`: those of the model's code, where they are known from the whole model's stage.
    """
    cuts = find_cuts(model, blocks)
    if not cuts:
        return None
    try:
        shallow = ShallowRehearsal(model, inputs, device_type, blocks, cuts, caches)
        shallow.stage.loop = loop
        stretched = shallow.stretch(shallow.stage.run())
    except Exception as error:  # a forward that counts its blocks, for one
        logger.debug("the model does not run at a fraction of its depth: %s: %s", type(error).__name__, str(error))
        return None
    return shallow if stretched.segments == plain.segments else None


def _renamed(segments: tuple[Segment, ...], names: dict[str, str]) -> tuple[Segment, ...]:
    return tuple(dataclasses.replace(s, module_fqn=names.get(s.module_fqn, s.module_fqn)) for s in segments)


def _stretch(cut: Cut, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Put the blocks that are left out back between those around them, on the way there and on the way back."""
    stand_in, behind, before = cut.stands_in, cut.name(cut.left_out.stop), cut.name(cut.stand_in - 1)
    left_out = [cut.name(position) for position in cut.left_out]
    start, end = _first(segments, "forward", stand_in), _first(segments, "forward", behind)
    copies = [_renamed(segments[start:end], {stand_in: name}) for name in left_out]
    segments = (*segments[:end], *itertools.chain(*copies), *segments[end:])
    start, end = _first(segments, "backward", stand_in), _first(segments, "backward", before)
    copies = [_renamed(segments[start:end], {stand_in: name}) for name in reversed(left_out)]
    return (*segments[:start], *itertools.chain(*copies), *segments[start:])


def _first(segments: tuple[Segment, ...], phase: Phase, module_fqn: str) -> int:
    return next(i for i, s in enumerate(segments) if (s.phase, s.module_fqn) == (phase, module_fqn))


def _whole_names(cut: Cut, module_fqn: str) -> list[str]:
    """This module's name in the whole model; and for one in the stand-in, also those of all it stands for."""
    for new, old in enumerate(cut.kept):
        prefix = f"{cut.name(new)}."
        if f"{module_fqn}.".startswith(prefix):
            rest = f"{module_fqn}."[len(prefix) :].rstrip(".")
            positions = [old, *(cut.left_out if cut.name(old) == cut.stands_in else ())]
            return [f"{cut.name(position)}.{rest}".rstrip(".") for position in positions]
    return [module_fqn]
