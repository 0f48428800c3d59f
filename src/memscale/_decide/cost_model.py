"""The cost model: what any plan would peak at and how long its step would take, from a profile alone. No torch.

The step is a sequence of stretches. Each block's are taken from the trace of the way it is treated, everything else
from the trace of the way the rest is run; live bytes run through them. The peak is the maximum over the end of
forward, every backward position with its recompute, and the optimizer step. How long a stretch takes: `step_time`;
what the optimizer keeps and takes: `optimizer_model`.

Sizes of tiles are traced at both ends of their range. What lies between is taken from the chord: a peak is a maximum
of straight lines in the size of a tile, so the chord is never below it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from memscale._decide.choice import Choice, Outcome, RunOptions
from memscale._decide.link_clock import Course, Sent, held_bytes, spaced_ms
from memscale._decide.optimizer_model import OptimizerModel, RunCosts
from memscale._decide.step_time import Moved, Pace, smaller
from memscale._decide.timeline import Extras, Spent, Stretch
from memscale._hardware import Hardware
from memscale._profile import (
    KEEP,
    OFFLOAD,
    Layer,
    OptimizerCost,
    Precision,
    Profile,
    Segment,
    StepTrace,
    TraceKey,
    Treatment,
)
from memscale.techniques import TREATMENTS
from memscale.techniques.technique import Traced


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """Forward and backward of a choice."""

    extras: Extras
    heights: tuple[int, ...]
    """The peak of each stretch."""
    times_ms: tuple[float, ...]
    live_bytes: int
    """What is live when backward is over."""
    peak_bytes: int
    total_ms: float


class CostModel:
    """Evaluates choices on one profile and one hardware."""

    def __init__(self, profile: Profile, hardware: Hardware, *, overlaps: bool = False, window_bytes: int = 0) -> None:
        """`window_bytes` is what may be on its way out, where a plan is timed by that; see NOTE [far apart]."""
        self.profile = profile
        self.window_bytes = window_bytes if overlaps and hardware.link_directions > 1 else 0
        self.hardware = hardware
        self.pace = Pace(hardware, overlaps=overlaps)
        self.optimizer = OptimizerModel(profile, self.pace)
        self.blocks: dict[str, Layer] = {layer.module_fqn: layer for layer in profile.layers if layer.is_block}
        self.owners = self._runs(profile.plain)[0]
        self._places: dict[str, list[int]] = {}
        for index, owner in enumerate(self.owners):
            self._places.setdefault(owner, []).append(index)
        self._whole: dict[TraceKey, StepTrace] = {}
        self._stretches: dict[TraceKey, list[Stretch]] = {}
        self._traces = {TraceKey(): profile.plain, **profile.variants}
        for key, trace in self._traces.items():
            if [owner for owner, _ in self._grouped(trace)] == self.owners:
                self._traces[key] = trace = self._with_late_releases(key, trace)
                self._stretches[key] = self._runs(trace, halves=bool(key.precision))[1]
            else:
                self._whole[key] = trace
        self._sizes = _sizes_of(self._stretches)
        self.traced = Traced(profile, self._sizes)
        self._without_gradients: dict[TraceKey, list[Stretch]] = {}
        self._by_owner: dict[Treatment, dict[str, list[Segment]]] = {}
        self._first_ms: dict[Precision, tuple[float, float]] = {}
        self._sent: dict[TraceKey, dict[str, Sent]] = {}
        self._extra: dict[Treatment, dict[str, Extras]] = {}
        self._rows: dict[tuple[RunOptions, Treatment | None], list[Stretch]] = {}
        """The step by run and treatment of its blocks; None: its rest. See `_row`."""
        self.is_compiled = False
        """Whether the compiler stands around blocks, where it would trace hooks on them."""
        self.candidates: dict[object, Any] = {}
        """What searches on this model have found, by what was eligible. See `find_candidates`."""
        self.searched: dict[object, Any] = {}
        """What was found among the blocks, by what was asked. See `search`; windows do not matter to it."""

    def with_window(self, window_bytes: int) -> CostModel:
        """The same with windows of another size."""
        other = CostModel(self.profile, self.hardware, overlaps=self.pace.overlaps, window_bytes=window_bytes)
        other.is_compiled, other.searched = self.is_compiled, self.searched
        return other

    def _runs(self, trace: StepTrace, *, halves: bool = False) -> tuple[list[str], list[Stretch]]:
        """The step as a sequence of blocks and what lies between them, whatever pieces that is made of."""
        runs = self.runs_of(trace)
        return [owner for owner, _, _ in runs], [self._merge(tuple(run), halves, more) for _, run, more in runs]

    def runs_of(
        self, trace: StepTrace, streamed: Collection[str] | None = None
    ) -> list[tuple[str, list[Segment], Moved]]:
        """The runs: a block, or "" for what lies between, its segments, and what crosses the link in it besides.

        `streamed` are the blocks whose weights travel; None: every block's, if any does.
        """
        runs, nothing = self._grouped(trace), Moved()
        sizes = {fqn: layer.param_bytes for fqn, layer in self.blocks.items() if streamed is None or fqn in streamed}
        spread = self.pace.spread(runs, sizes)
        return [(owner, run, spread.get(index, nothing)) for index, (owner, run) in enumerate(runs)]

    def streamed_bytes(self, choice: Choice) -> int:
        """Trainable bytes of the blocks that a choice streams."""
        return sum(self.blocks[fqn].trainable_bytes for fqn, treatment in choice.blocks if treatment.streams)

    def _grouped(self, trace: StepTrace) -> list[tuple[str, list[Segment]]]:
        return [(owner, list(group)) for owner, group in itertools.groupby(trace.segments, self._owner)]

    def _with_late_releases(self, key: TraceKey, trace: StepTrace) -> StepTrace:
        """What a treatment of blocks frees in the gaps behind them, counted with the blocks.

        NOTE [late release]: a block's input that waits elsewhere is freed when the caller lets go of it, which is after
        the block. Gaps are taken from another trace, in which nothing was sent away.
        """
        without = TraceKey(precision=key.precision)
        if key == without or key.head_rows or key.streams_rest or key.loss_by_rows or without not in self._traces:
            return trace
        runs, kept = self._grouped(trace), self._grouped(self._traces[without])
        if [owner for owner, _ in kept] != self.owners:
            return trace
        for ((owner, block), (_, gap)), (_, kept_gap) in zip(itertools.pairwise(runs), kept[1:], strict=True):
            late = _net_bytes(gap) - _net_bytes(kept_gap)
            if owner and late and not self._owner(gap[0]):
                block[-1] = dataclasses.replace(block[-1], net_bytes=block[-1].net_bytes + late)
                first = gap[0]
                gap[0] = dataclasses.replace(
                    first, net_bytes=first.net_bytes - late, peak_bytes=max(0, first.peak_bytes - late)
                )
        return StepTrace(tuple(itertools.chain(*(segments for _, segments in runs))))

    def _owner(self, segment: Segment) -> str:
        return segment.module_fqn if segment.module_fqn in self.blocks else ""

    def _merge(self, segments: tuple[Segment, ...], halves: bool, more: Moved) -> Stretch:
        """Weights that nothing hides are counted once for a choice, with whichever block it streams first."""
        trace = StepTrace(segments)
        more = dataclasses.replace(more, in_bytes=more.in_bytes + more.first_bytes, first_bytes=0)
        ms = self.pace.run_ms(segments, halves=halves, more=more)
        return Stretch(trace.peak_bytes, trace.end_bytes, ms)

    # ---- what can be done

    @property
    def treatments(self) -> tuple[Treatment, ...]:
        """Treatments that single blocks can be given."""
        return tuple(t for t in TREATMENTS if t != KEEP and TraceKey(t) in self._stretches)

    @property
    def whole_treatments(self) -> tuple[Treatment, ...]:
        """Treatments that only all blocks together can be given: their step runs in another order."""
        return tuple(t for t in TREATMENTS if TraceKey(t) in self._whole)

    def can_treat(self, run: RunOptions, treatment: Treatment) -> bool:
        """Whether blocks can be treated so in this run."""
        return run.block_key(treatment).of_any_size in self._sizes

    def can_run(self, run: RunOptions) -> bool:
        """Whether the rest of the model can be run so."""
        return run.rest_key.of_any_size in self._sizes

    def nested_order(self) -> tuple[str, ...] | None:
        """The blocks as forward calls them, if each is called once and backward goes the same way back; else None."""
        called = [owner for owner in self.owners if owner]
        order = tuple(dict.fromkeys(called))
        back = [fqn for fqn in reversed(order) if len(self._places[fqn]) == 2]
        return order if called == [*order, *back] else None

    def places(self, module_fqn: str) -> list[int]:
        """Which stretches of the step are this block's: none, where the step does not come to it."""
        return self._places.get(module_fqn, [])

    @functools.cached_property
    def first_backward(self) -> int:
        """The first stretch with a piece of backward in it."""
        runs = self._grouped(self.profile.plain)
        found = (i for i, (_, segments) in enumerate(runs) if any(s.phase == "backward" for s in segments))
        return next(found, len(runs))

    # ---- stretches

    def rest(self, run: RunOptions) -> list[Stretch]:
        """The step with the rest run so; its blocks are of no meaning."""
        return self._row(run, None)

    def treated(self, run: RunOptions, treatment: Treatment) -> list[Stretch]:
        """The step with every block treated so; its rest is of no meaning."""
        return self._row(run, treatment)

    def _row(self, run: RunOptions, treatment: Treatment | None) -> list[Stretch]:
        """Choices are many, and share these."""
        row = self._rows.get((run, treatment))
        if row is None:
            key = run.rest_key if treatment is None else run.block_key(treatment)
            row = self._rows[run, treatment] = self._released(run, key)
        return row

    def _released(self, run: RunOptions, key: TraceKey) -> list[Stretch]:
        """Where parameters are stepped in backward, a stretch leaves no gradients behind, and the optimizer's
        temporaries are beside those that it makes. A rehearsal of the plan shows where they are to the byte."""
        cost = self.optimizer.cost(run).in_backward
        if not run.steps_in_backward or cost is None:
            return self._stretches_of(key)
        if key not in self._without_gradients:
            self._without_gradients[key] = [
                stretch.without_gradients(num_bytes, cost.step_bytes)
                for stretch, num_bytes in zip(self._stretches_of(key), self._gradient_bytes, strict=True)
            ]
        return self._without_gradients[key]

    @functools.cached_property
    def _gradient_bytes(self) -> list[int]:
        """Gradients that are final in each stretch of the plain step. Those of a layer are when its backward ends;
        those that no layer's backward shows are counted with the last stretch."""
        sizes = {layer.module_fqn: layer.trainable_bytes for layer in self.profile.layers}
        found = [0] * len(self.owners)
        for index, (_, segments) in reversed(list(enumerate(self._grouped(self.profile.plain)))):
            for segment in segments:
                if segment.phase == "backward":
                    found[index] += sizes.pop(segment.module_fqn, 0)
        if found:
            found[-1] += self.profile.plain.end_bytes - sum(found)
        return found

    def _stretches_of(self, key: TraceKey) -> list[Stretch]:
        """The stretches as traced; for tiles of a size that was not traced, interpolated between sizes that were."""
        found = self._stretches.get(key)
        if found is None:
            traced, size = self._sizes[key.of_any_size], key.tile_size
            low, high = max([s for s in traced if s <= size], default=traced[0]), traced[-1]
            ends = [self._stretches[key.with_tile_size(end)] for end in (low, high)]
            position = _position(key, low, high)
            found = [start.towards(end, position) for start, end in zip(*ends, strict=True)]
            self._stretches[key] = found
        return found

    def block(self, run: RunOptions, module_fqn: str, treatment: Treatment) -> tuple[Stretch, Stretch]:
        """Forward and backward of a block that is called once."""
        stretches, places = self.treated(run, treatment), self._places[module_fqn]
        return stretches[places[0]], stretches[places[1]] if len(places) > 1 else Stretch()

    def middle(self, run: RunOptions, order: Sequence[str]) -> Stretch:
        """What lies between the last block's forward and the first backward of any."""
        if not order:
            return functools.reduce(Stretch.then, self.rest(run), Stretch())
        after = self._places[order[-1]][0] + 1
        return self.rest(run)[after] if after < len(self.owners) and not self.owners[after] else Stretch()

    # ---- evaluating

    def evaluate(self, choice: Choice) -> Outcome:
        """The peak, the time and the waiting bytes of a step under this choice."""
        return self.evaluate_runs(choice, [choice.run])[0]

    def evaluate_runs(self, choice: Choice, runs: Sequence[RunOptions]) -> list[Outcome]:
        """A choice's blocks with each of these runs, which differ from its own by what the optimizer does alone."""
        walk = self.walk(choice)
        resident_bytes = self.optimizer.costs_of(choice.run, walk.extras.streamed_bytes).resident_bytes
        live, peak, total_ms = self._beside(walk, choice)
        outcomes = []
        for other in runs:
            costs = self.optimizer.costs_of(other, walk.extras.streamed_bytes)
            in_step, more = live + costs.step_bytes, costs.resident_bytes - resident_bytes
            outcomes.append(self._outcome(other, walk.extras, max(peak, in_step) + more, total_ms))
        return outcomes

    def walk(self, choice: Choice) -> Walk:
        """Forward and backward of this choice, stretch by stretch, without state that comes early."""
        run, extras = choice.run, self._extras(choice)
        stretches = self._stretches_under(choice)
        live = peak = self._static_bytes(run, extras)
        times_ms, heights = [stretch.ms for stretch in stretches], list[int]()
        total_ms = extras.ms + sum(times_ms)
        known = self.sent_by_blocks(run) if self.window_bytes else {}
        sent = {fqn: known[fqn] for fqn, one in choice.blocks if one.offloads and one == OFFLOAD and fqn in known}
        held = held_bytes(self.owners, known, list(sent), self.window_bytes)
        if sent:
            streamed = {fqn: self.blocks[fqn].param_bytes for fqn, treatment in choice.blocks if treatment.streams}
            course = Course(self.owners, self.first_backward, times_ms)
            total_ms = min(total_ms, extras.ms + spaced_ms(course, sent, streamed, self.pace, self.window_bytes))
        for stretch, held_here in zip(stretches, held, strict=True):
            highest = live + stretch.peak_bytes + held_here
            heights.append(highest)
            peak = highest if highest > peak else peak  # choices are many, and so are stretches
            live += stretch.net_bytes
        total_ms += float(self.first_fetch_ms(run, self.rest_extras(run).static_bytes - extras.static_bytes))
        return Walk(extras, tuple(heights), tuple(times_ms), live, peak, total_ms)

    # ---- state that travels beside forward and backward: see the notes in early_state.py

    def with_state_beside(self, walk: Walk, choice: Choice, base: RunOptions) -> Outcome:
        """What a choice comes to that differs from this walk's, with its `base` run, by the state that comes early or
        leaves late. There are many of them, so that what the optimizer costs is not worked out anew for each."""
        live, peak, total_ms = self._beside(walk, choice)
        costs = self.optimizer.costs_beside(base, walk.extras.streamed_bytes, choice.run)
        return self._outcome_of(costs, choice.run, walk.extras, max(peak, live + costs.step_bytes), total_ms)

    def _beside(self, walk: Walk, choice: Choice) -> tuple[int, int, float]:
        """What is live in the step beside its buckets, the peak before it, and how long that takes, with the state that
        comes early and leaves late. What came first is gone before the last is late."""
        run = choice.run
        if not run.early_state and not run.late_state:
            return walk.live_bytes, walk.peak_bytes, walk.total_ms
        asked = itertools.accumulate(self.early_bytes_by_stretch(run))
        more = (early + late for early, late in zip(asked, self.late_bytes_by_stretch(run), strict=True))
        peak = max(walk.peak_bytes, *(height + here for height, here in zip(walk.heights, more, strict=True)))
        waits_ms = self._early_wait_ms(walk, choice) + self._late_wait_ms(walk, choice)
        return walk.live_bytes + max(run.early_bytes, run.late_bytes), peak, walk.total_ms + waits_ms

    def late_bytes_by_stretch(self, run: RunOptions) -> list[int]:
        """How much of the optimizer's state is still there in each stretch, from the step before."""
        gone, late_bytes = [0] * len(self.owners), run.late_bytes
        for fqn, num_bytes in run.late_state:
            gone[self._places[fqn][0] if fqn in self._places else 0] += num_bytes
        return [late_bytes - num_bytes for num_bytes in itertools.accumulate(gone)]

    def _late_wait_ms(self, walk: Walk, choice: Choice) -> float:
        """What forward takes longer: state that leaves late shares the link with what the blocks there send."""
        run = choice.run
        if not run.late_state:
            return 0.0
        hidden_bytes = self.time_for_late(walk, choice, {fqn for fqn, _ in run.late_state})
        return max(0.0, float(self.pace.link_ms(run.late_bytes - hidden_bytes)))

    def time_for_late(self, walk: Walk, choice: Choice, module_fqns: Collection[str]) -> int:
        """How much can leave while forward comes to the last of these blocks, beside what they send themselves."""
        end = max((self._places[fqn][0] for fqn in module_fqns if fqn in self._places), default=0)
        others = sum(self._movable_bytes(fqn, treatment) for fqn, treatment in choice.blocks if fqn in module_fqns)
        return self._in_time(sum(walk.times_ms[:end])) - others

    def early_bytes_by_stretch(self, run: RunOptions) -> list[int]:
        """How much of the optimizer's state is asked for when each stretch begins."""
        found = [0] * len(self.owners)
        for fqn, num_bytes in run.early_state:
            places = self._places.get(fqn, [])
            if len(places) == 2:
                found[places[1]] += num_bytes
        return found

    def _early_wait_ms(self, walk: Walk, choice: Choice) -> float:
        """What backward takes longer: state that comes early shares the link with what the blocks there wait for."""
        early = choice.run.early_state
        if not early:
            return 0.0
        hidden_bytes = self.time_for_early(walk, choice, {fqn for fqn, _ in early})
        return max(0.0, float(self.pace.link_ms(choice.run.early_bytes - hidden_bytes)))

    def time_for_early(self, walk: Walk, choice: Choice, module_fqns: Collection[str]) -> int:
        """How much can come from the backward of the first of these blocks on, beside what they wait for themselves;
        below 0 where that takes longer already."""
        places = [self._places.get(fqn, []) for fqn in module_fqns]
        begin = min((found[1] for found in places if len(found) == 2), default=0)
        others = sum(self._comes_back_bytes(fqn, treatment) for fqn, treatment in choice.blocks if fqn in module_fqns)
        return self._in_time(sum(walk.times_ms[begin:])) - others

    def _in_time(self, ms: float) -> int:
        return int(ms / 1e3 * self.hardware.link_bytes_per_s)

    def _comes_back_bytes(self, module_fqn: str, treatment: Treatment) -> int:
        """What comes to the device for the backward of a block."""
        weights = self.blocks[module_fqn].param_bytes if treatment.streams else 0
        return weights + self._movable_bytes(module_fqn, treatment)

    def _stretches_under(self, choice: Choice) -> list[Stretch]:
        """The step under this choice. Blocks are many, and share their treatments: each is looked up once."""
        run, last, row = choice.run, None, list[Stretch]()
        by_owner: dict[str, list[Stretch]] = {"": self.rest(run)}
        for fqn, treatment in choice.blocks:
            if treatment is not last:
                last, row = treatment, self.treated(run, treatment)
            by_owner[fqn] = row
        kept = [] if all(owner in by_owner for owner in self.owners) else self.treated(run, KEEP)
        return [by_owner.get(owner, kept)[index] for index, owner in enumerate(self.owners)]

    def sent_by_blocks(self, run: RunOptions) -> dict[str, Sent]:
        """What each block sends, in order, if its activations wait elsewhere; {} where that was not traced, and where
        a step does not go through the blocks and back."""
        key = run.block_key(OFFLOAD)
        if key not in self._sent:
            found: dict[str, Sent] = {}
            order = self.nested_order() if key in self._stretches else None
            runs = self._grouped(self._traces[key]) if order is not None else []
            for fqn in order or ():
                places = self._places[fqn]
                forward, backward = (runs[place][1] for place in places) if len(places) == 2 else ([], [])
                num_bytes = sum(segment.sent_bytes for segment in forward)
                passes = (self._unwaiting_ms(some, halves=bool(run.precision)) for some in (forward, backward))
                found |= {fqn: Sent(num_bytes, *passes)} if num_bytes else {}
            self._sent[key] = found
        return self._sent[key]

    def _unwaiting_ms(self, segments: Sequence[Segment], *, halves: bool) -> float:
        """The time of segments whose transfers are all hidden; the host starts them."""
        compute_ms = sum(self.pace.compute_ms(segment, halves=halves) for segment in segments)
        num_copies = sum(segment.num_sends + segment.num_fetches for segment in segments)
        launches = sum(segment.num_launches for segment in segments)
        return float(self.pace.slowest_ms(compute_ms, launches, Moved(num_copies)))

    def bytes_in_step(self, choice: Choice) -> int:
        """What is live at the peak of the optimizer's step; before it backward has freed all activations."""
        walk, run = self.walk(choice), choice.run
        step_bytes: int = round(self.optimizer.step_bytes(run, walk.extras.streamed_bytes))
        return walk.live_bytes + max(run.early_bytes, run.late_bytes) + step_bytes

    def evaluate_whole(self, choice: Choice) -> Outcome:
        """Every block treated alike, by a trace that cannot be mixed with others."""
        treatment = choice.blocks[0][1]
        trace, extras = self._whole[TraceKey(treatment)], self._extras(choice)
        total_ms = sum(self.pace.run_ms(segments) for _, segments in self._grouped(trace))
        return self._outcome(choice.run, extras, self.peak_of(trace, choice), total_ms)

    def peak_of(
        self,
        trace: StepTrace,
        choice: Choice,
        optimizer: OptimizerCost | None = None,
        streamed_bytes: int | None = None,
    ) -> int:
        """The peak of a step that was traced as a whole.

        The `optimizer` over what is not streamed, and the bytes of parameters that are, to the byte where known.
        """
        extras, run = self._extras(choice), choice.run
        if streamed_bytes is not None:
            extras = dataclasses.replace(extras, static_bytes=-streamed_bytes)
        state: int = round(self.optimizer.resident_bytes(run, extras.streamed_bytes))
        step: int = round(self.optimizer.step_bytes(run, extras.streamed_bytes))
        if optimizer is not None:
            state, step = self.optimizer.manner(run).exact_bytes(optimizer, run)
            step += round(self.optimizer.coming_gradient_bytes(run, extras.streamed_bytes))
        late = max(0, run.late_bytes - run.early_bytes)  # what comes early is in the trace
        return self.base_bytes() + extras.static_bytes + state + max(trace.peak_bytes, trace.end_bytes + late + step)

    def waiting_beside(self, choice: Choice, staying_bytes: int) -> tuple[int, int]:
        """What waits on the host, and there or on the disk, while so much of the optimizer's state stays on the device
        and the rest waits."""
        run, extras = dataclasses.replace(choice.run, offloads_optimizer=1.0), self._extras(choice)
        at_home_bytes, anywhere_bytes = self.optimizer.bytes_away(run, extras.streamed_bytes)
        return extras.host_bytes + at_home_bytes, extras.movable_bytes + round(anywhere_bytes) - staying_bytes

    def _outcome(self, run: RunOptions, extras: Extras, peak_bytes: int, compute_ms: float) -> Outcome:
        return self._outcome_of(
            self.optimizer.costs_of(run, extras.streamed_bytes), run, extras, peak_bytes, compute_ms
        )

    def _outcome_of(
        self, costs: RunCosts, run: RunOptions, extras: Extras, peak_bytes: int, compute_ms: float
    ) -> Outcome:
        step_ms = float(self._slowed_ms(run, compute_ms) + costs.ms)
        return Outcome(
            peak_bytes, step_ms, extras.host_bytes + costs.at_home_bytes, extras.movable_bytes + costs.anywhere_bytes
        )

    def _extras(self, choice: Choice) -> Extras:
        rest = self.rest_extras(choice.run)
        static, streamed, host = rest.static_bytes, rest.streamed_bytes, rest.host_bytes
        movable, ms = rest.movable_bytes, rest.ms
        last, known = KEEP, self._extra.setdefault(KEEP, {})
        for fqn, treatment in choice.blocks:
            if treatment is not last:  # neighbours are mostly treated alike
                last, known = treatment, self._extra.setdefault(treatment, {})
            extra = known.get(fqn) or self.extras(choice.run, fqn, treatment)
            static, streamed = static + extra.static_bytes, streamed + extra.streamed_bytes
            host, movable, ms = host + extra.host_bytes, movable + extra.movable_bytes, ms + extra.ms
        return Extras(static, streamed, host, movable, ms)

    def extras(self, run: RunOptions, module_fqn: str, treatment: Treatment) -> Extras:
        """What this treatment of a block changes besides its own stretches, in any run."""
        known = self._extra.setdefault(treatment, {})
        if module_fqn not in known:
            known[module_fqn] = self._find_extras(module_fqn, treatment)
        return known[module_fqn]

    def _find_extras(self, module_fqn: str, treatment: Treatment) -> Extras:
        ms = self.hooks_ms(module_fqn, treatment)
        movable = self._movable_bytes(module_fqn, treatment)
        if not treatment.streams:
            return Extras(movable_bytes=movable, ms=ms)
        layer = self.blocks[module_fqn]
        host = layer.param_bytes + layer.trainable_bytes
        return Extras(-layer.param_bytes, layer.trainable_bytes, host, movable, ms)

    def rest_extras(self, run: RunOptions) -> Extras:
        """What streaming the rest changes; its optimizer state is counted in `state_bytes`."""
        if not run.streams_rest:
            return Extras()
        params, trainable = self.profile.rest_param_bytes, self.profile.rest_trainable_bytes
        return Extras(-params, 0, params + trainable)

    def _movable_bytes(self, module_fqn: str, treatment: Treatment) -> int:
        """The bytes of activations that wait elsewhere: all that are sent. The device may hold them for a while yet, in
        the window of what is on its way, so that less is missing there than waits."""
        if not treatment.offloads:
            return 0
        sent_bytes = sum(segment.sent_bytes for segment in self._segments(module_fqn, treatment, "forward"))
        on_device = self.saved_bytes(module_fqn, treatment.without_offload)
        return max(sent_bytes, self.saved_bytes(module_fqn, treatment) - on_device)

    # ---- what is there all the time

    def most_waiting_bytes(self) -> int:
        """What would wait elsewhere if everything did that can."""
        can_offload = TraceKey(OFFLOAD) in self._stretches
        offloaded = sum(max(0, self.saved_bytes(fqn, OFFLOAD)) for fqn in self.blocks if can_offload)
        homes = sum(layer.param_bytes + layer.trainable_bytes for layer in self.profile.layers)
        return offloaded + homes + self.profile.optimizer.state_bytes

    def base_bytes(self) -> int:
        """What is live before a step but for optimizer state, when nothing is streamed."""
        return self.profile.base_bytes

    def resident_bytes(self, choice: Choice) -> int:
        """What is live before a step under this choice."""
        return self._static_bytes(choice.run, self._extras(choice))

    def resident_model_bytes(self, choice: Choice) -> int:
        """The part of it that is parameters and buffers."""
        return self.profile.parameter_bytes + self.profile.buffer_bytes + round(self._extras(choice).static_bytes)

    def _static_bytes(self, run: RunOptions, extras: Extras) -> int:
        state: int = round(self.optimizer.resident_bytes(run, extras.streamed_bytes))
        return self.base_bytes() + extras.static_bytes + state

    # ---- time

    def step_ms(self, run: RunOptions, compute_ms: Any, streamed_bytes: Any) -> Any:
        """Forward and backward, with what tiles and the optimizer's step add. Numbers or arrays of them."""
        return self._slowed_ms(run, compute_ms) + self.optimizer.step_ms(run, streamed_bytes)

    def _slowed_ms(self, run: RunOptions, compute_ms: Any) -> Any:
        for technique in run.techniques:
            option = technique.option
            if option is not None and option.slowed_ms is not None:
                compute_ms = option.slowed_ms(self.traced, self.pace, getattr(run, option.field), compute_ms)
        return compute_ms

    def first_fetch_ms(self, run: RunOptions, param_bytes: Any) -> Any:
        """What waits for the first weights, where weights of so many bytes are streamed. A number, or an array of them.

        NOTE [the first weights]: weights are fetched while the streamed block before computes, so a block takes the
        longer of the two; those of the first block that is streamed, wherever it stands, are waited for before it
        computes. So the shorter of its two comes on top, once. Where all blocks are streamed the first is known;
        where some are, it is taken to be an average one.
        """
        first_ms, average_ms = self._first_fetches(run.precision)
        whole = max(1, sum(layer.param_bytes for layer in self.blocks.values()))
        some_ms = average_ms * smaller(1.0, param_bytes * len(self.blocks) / whole)
        return some_ms + (first_ms - some_ms) * (param_bytes >= whole)

    def _first_fetches(self, precision: Precision) -> tuple[float, float]:
        """The shorter of a block's forward and of the way of its weights: of the first block, and of an average one."""
        if precision not in self._first_ms:
            runs = self._grouped(self._traces[TraceKey(precision=precision)])
            halves, found = bool(precision), []
            for fqn, layer in self.blocks.items() if self.pace.overlaps else ():
                if fqn in self._places:
                    forward_ms = self.pace.busy_ms(runs[self._places[fqn][0]][1], halves=halves)
                    found.append(min(forward_ms, float(self.pace.link_ms(layer.param_bytes))))
            self._first_ms[precision] = (found[0], sum(found) / len(found)) if found else (0.0, 0.0)
        return self._first_ms[precision]

    @functools.cached_property
    def least_compute_ms(self) -> float:
        """Forward and backward with every stretch in the cheapest exact way that was traced, and no transfers."""
        busy = {
            key: [self.pace.busy_ms(segments) for _, segments in self._grouped(trace)]
            for key, trace in self._traces.items()
            if not key.precision and not key.waits
        }
        mixed = [found for key, found in busy.items() if key not in self._whole]
        whole = [sum(found) for key, found in busy.items() if key in self._whole]
        cheapest: float = sum(map(min, zip(*mixed, strict=True)))
        return min([cheapest, *whole])

    @functools.cached_property
    def exact_ways(self) -> list[list[Spent]]:
        """What each exact way in which the step was traced keeps, computes and moves, stretch by stretch. The plain
        step comes first. What is streamed is counted with its parameters, not here."""
        found = []
        for key, trace in self._traces.items():
            if key not in self._whole and not key.precision and not key.waits:
                spent = self._spent(trace)
                streams = key.treatment.streams
                found.append([dataclasses.replace(one, out_bytes=0, in_bytes=0) if streams else one for one in spent])
        return found

    def _spent(self, trace: StepTrace) -> list[Spent]:
        runs, nothing = self._grouped(trace), Moved()
        spread = self.pace.spread(runs, {fqn: layer.param_bytes for fqn, layer in self.blocks.items()})
        found = []
        for index, (_, segments) in enumerate(runs):
            more = spread.get(index, nothing)
            out_bytes = sum(segment.sent_bytes for segment in segments) + more.out_bytes
            in_bytes = sum(segment.fetched_bytes for segment in segments) + more.in_bytes + more.first_bytes
            found.append(Spent(_net_bytes(segments), self.pace.busy_ms(segments), out_bytes, in_bytes))
        return found

    def hooks_ms(self, module_fqn: str, treatment: Treatment) -> float:
        """What the machinery of a treatment takes, beside what is computed again."""
        num_operators = sum(segment.num_launches for segment in self._segments(module_fqn, KEEP, "forward"))
        return self.pace.hooks_ms(treatment, self.blocks[module_fqn].num_calls, num_operators)

    # ---- one block

    def saved_bytes(self, module_fqn: str, treatment: Treatment) -> int:
        """How much less a block's forward leaves behind under this treatment."""
        return self.activation_bytes(module_fqn) - self._forward_net(module_fqn, treatment)

    def extra_ms(self, module_fqn: str, treatment: Treatment) -> float:
        """The time that the treatment adds to a step."""
        slower = self.block_ms(module_fqn, treatment) - self.block_ms(module_fqn, KEEP)
        return slower + self.hooks_ms(module_fqn, treatment)

    def activation_bytes(self, module_fqn: str) -> int:
        """What the layer's forward leaves behind when nothing is done."""
        return self._forward_net(module_fqn, KEEP)

    def forward_ms(self, module_fqn: str) -> float:
        return self.pace.run_ms(self._segments(module_fqn, KEEP, "forward"))

    def block_ms(self, module_fqn: str, treatment: Treatment) -> float:
        segments = self._segments(module_fqn, treatment, None)
        return sum((self.pace.run_ms([segment]) for segment in segments), 0.0)

    def _forward_net(self, module_fqn: str, treatment: Treatment) -> int:
        return sum(segment.net_bytes for segment in self._segments(module_fqn, treatment, "forward"))

    def _segments(self, module_fqn: str, treatment: Treatment, phase: str | None) -> list[Segment]:
        by_owner = self._by_owner.get(treatment)
        if by_owner is None:
            by_owner = self._by_owner[treatment] = {}
            for segment in self._traces[TraceKey(treatment)].segments:
                by_owner.setdefault(segment.module_fqn, []).append(segment)
        return [s for s in by_owner.get(module_fqn, ()) if phase in (None, s.phase)]


def _net_bytes(segments: Iterable[Segment]) -> int:
    return sum(segment.net_bytes for segment in segments)


def _sizes_of(keys: Iterable[TraceKey]) -> dict[TraceKey, list[int]]:
    """The sizes that were traced, in order, by key with tiles of any size; 0 where nothing is tiled."""
    sizes: dict[TraceKey, list[int]] = {}
    for key in keys:
        sizes.setdefault(key.of_any_size, []).append(key.tile_size)
    return {key: sorted(found) for key, found in sizes.items()}


def _position(key: TraceKey, low: int, high: int) -> float:
    """How far a size is from one end of the chord to the other. Bytes go with rows, or with one over the number."""
    if low == high:
        return 0.0
    if key.num_tiles:
        return (1 / low - 1 / key.num_tiles) / (1 / low - 1 / high)
    return (key.head_rows - low) / (high - low)
