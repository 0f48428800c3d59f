"""What the optimizer costs under a plan: as it is, its state on another tier or in 8 bits, over what is not streamed.

The optimizer itself is tried on fake parameters (`_profile/optimizer_twin/`); how its state waits is said here, by
the rules of the techniques that do it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

from torch import nn
from torch.optim import Optimizer

from memscale._decide.travel import Travel
from memscale._plan import STEP_BUCKET_BYTES, QuantizeOptimizer
from memscale._planning.bucket_rules import InBuckets
from memscale._planning.job import Job
from memscale._planning.reserved.bucket_steps import BucketRules
from memscale._profile import GuestCost, OptimizerCost
from memscale._profile.optimizer_twin import (
    Prepare,
    SteppedModel,
    Trials,
    Ways,
    guest_cost,
    optimizer_cost,
    optimizer_over,
)
from memscale._profile.ranks import Ranks
from memscale._progress import stage
from memscale.techniques.offload.optimizer.backward_steps import refuse_inseparable
from memscale.techniques.offload.optimizer.buckets import values_here
from memscale.techniques.offload.optimizer.in_backward import bucket_bytes_of
from memscale.techniques.offload.optimizer.separable import NotSeparable, check_separable
from memscale.techniques.offload.store.stores import PART_BYTES
from memscale.techniques.optimizer8bit.eight_bit import (
    eligible_parameters,
    embeddings_of,
    is_8bit,
    moments_of,
)
from memscale.techniques.optimizer8bit.twins import is_of_bitsandbytes, prepare_twin
from memscale.techniques.technique import PlannedStep

RESIDENT_SHARES = tuple(number / 32 for number in range(1, 32))
"""Shares of the state that plans may leave on the device."""


class OptimizerCosts:
    """What one optimizer over one model costs in every way, each found once.

    `replacement` is bitsandbytes' own that steps in the optimizer's place in 8 bits; None: the optimizer itself does,
    and its waiting state is packed.
    """

    def __init__(self, job: Job, travel: Travel | None = None) -> None:
        """`travel`: None: that which is tried first."""
        self._job = job
        self.travel = travel or job.eligible.travel
        """How state travels to the next tier and back."""
        self._model = job.model
        self._optimizer = job.optimizer
        self._replacement = job.replacement
        self._device_type = job.hardware.device_type
        self._has_next_tier = job.eligible.has_next_tier
        self._steps_in_backward = job.config.step_in_backward
        if self._steps_in_backward and isinstance(job.optimizer, Optimizer):
            refuse_inseparable(job.optimizer)
        self._can_pack = _is_separable(job.optimizer) and _has_moments(job.optimizer)
        self._idle: frozenset[int] = frozenset()
        self._found: dict[tuple[bool, frozenset[int], bool, float | None], OptimizerCost] = {}
        self._beside: dict[Travel, OptimizerCosts] = {}
        self._trials: dict[bool, Trials] = {False: {}, True: {}}
        """Steps that were tried, of the optimizer and of what replaces it in 8 bits, however state travels."""

    @property
    def ranks(self) -> Ranks:
        return self._job.ranks

    def by(self, travel: Travel) -> OptimizerCosts:
        """The same, with state that travels so."""
        if travel == self.travel:
            return self
        if travel not in self._beside:
            other = OptimizerCosts(self._job.under(travel.said_in(self._job.config)), travel)
            other._trials = self._trials
            self._beside[travel] = other
        return self._beside[travel]

    def leave_idle(self, idle: frozenset[int]) -> None:
        """The parameters with these ids never get a gradient, for which optimizers make no state.

        What has state already keeps it; Adagrad makes it for all parameters at once. State that waits elsewhere is not
        brought here for this question.
        """
        if self._optimizer == "adagrad":
            idle = frozenset()
        if isinstance(self._optimizer, Optimizer):
            idle -= {id(parameter) for parameter, state in self._optimizer.state.items() if values_here(state)}
        if idle != self._idle:
            self._idle = idle
            self._found.clear()

    def cost(
        self,
        *,
        eight_bit: bool = False,
        without: frozenset[int] = frozenset(),
        guests: bool = False,
        resident_share: float | None = None,
    ) -> OptimizerCost:
        """The cost without the parameters with these ids, which are streamed; with `guests` they visit it to be
        stepped. `resident_share`: only what it takes while all but this share of the state waits elsewhere."""
        # Else the state stays as it is, and the executor says why.
        eight_bit = eight_bit and (self._can_pack or self._replacement is not None)
        every, key = (eight_bit, without, guests, None), (eight_bit, without, guests, resident_share)
        if every in self._found:
            return self._found[every]
        if key not in self._found:
            with stage("costing the optimizer's step"):
                self._found[key] = self._find(eight_bit, without, guests=guests, resident_share=resident_share)
        return self._found[key]

    def guests(self, streamed: frozenset[int]) -> GuestCost | None:
        """What it takes to step the parameters with these ids on the device; None where that cannot be."""
        if not streamed or not self._has_next_tier or not _is_separable(self._optimizer):
            return None
        return guest_cost(self._stepped(self._optimizer, streamed), self._of_guests(eight_bit=False))

    def _stepped(self, optimizer: str | Optimizer, without: frozenset[int]) -> SteppedModel:
        return SteppedModel(
            self._model,
            optimizer,
            self._device_type,
            left_out=without,
            idle=self._idle,
            prepare=self._preparation(optimizer),
            num_shards=self.ranks.num_shards,
            trials=self._trials[optimizer is not self._optimizer],
        )

    def _find(
        self, eight_bit: bool, without: frozenset[int], *, guests: bool, resident_share: float | None
    ) -> OptimizerCost:
        optimizer = self._replacement if eight_bit and self._replacement is not None else self._optimizer
        packs = eight_bit and optimizer is self._optimizer
        is_separable = _is_separable(optimizer)
        can_move = self._has_next_tier and is_separable
        ways = Ways(
            resident=self._stepping(moves=False) if packs else None,
            offloaded=self._stepping(moves=True, eight_bit=packs) if can_move else None,
            is_separable=is_separable,
            guests=self._of_guests(eight_bit=packs) if guests and can_move else None,
            in_buckets=self._in_step_buckets() if is_separable and not packs else None,
            in_backward=self._in_backward() if is_separable and not packs and self._steps_in_backward else None,
        )
        if resident_share is not None and ways.offloaded is not None:
            offloaded = self._stepping(moves=True, eight_bit=packs).with_share(resident_share)
            ways = Ways(offloaded=offloaded, guests=ways.guests, on_device=False)
        return optimizer_cost(self._stepped(optimizer, without), ways)

    def rules(self, step: PlannedStep, *, window_bytes: int) -> BucketRules | None:
        """How the optimizer itself steps where a plan asks for this; None: as a whole.

        `NotImplementedError` where another steps in its place, or one that fake tensors are not enough for.
        """
        if step.bucket_bytes not in (None, self.travel.bucket_bytes):
            return self.by(self.travel.in_buckets_of(step.bucket_bytes)).rules(step, window_bytes=window_bytes)
        packs = step.packs and self._can_pack
        if (step.packs and self._replacement is not None) or self._preparation(self._optimizer) is not None:
            raise NotImplementedError("the steps of bitsandbytes' own optimizers are not recorded")
        if not _is_separable(self._optimizer) or not (step.moves or packs or step.streams or step.in_buckets):
            return None
        stepping = self._stepping(moves=step.moves and self._has_next_tier, eight_bit=packs)
        if step.in_buckets and not stepping.moves and not packs:
            stepping = self._in_step_buckets()
        visiting = self._of_guests(eight_bit=packs) if step.guests and self._has_next_tier else None
        beside = (step.early_bytes, step.late_bytes) if stepping.prefetches else (0, 0)
        return BucketRules(stepping, window_bytes, stepping.block_size, step.resident_share, visiting, *beside)

    def _preparation(self, optimizer: str | Optimizer) -> Prepare | None:
        if isinstance(optimizer, str) or not is_of_bitsandbytes(optimizer):
            return None
        wide = embeddings_of(self._model) if optimizer is self._replacement else frozenset()
        return functools.partial(prepare_twin, optimizer, wide)

    def eight_bit(self) -> OptimizerCost | None:
        """What the optimizer costs in 8 bits; None where there is no state."""
        return self.cost(eight_bit=True) if self.cost().state_bytes else None

    def _in_step_buckets(self) -> InBuckets:
        """The rules for a step in buckets whose state stays where it is."""
        in_parts = self._stepping(moves=False, eight_bit=False)
        return dataclasses.replace(in_parts, bucket_bytes=STEP_BUCKET_BYTES)

    def _in_backward(self) -> InBuckets:
        in_parts = self._stepping(moves=False, eight_bit=False)
        num_bytes = sum(parameter.nbytes for parameter in self._model.parameters() if parameter.requires_grad)
        return dataclasses.replace(in_parts, bucket_bytes=bucket_bytes_of(num_bytes))

    def on_stage(self, stage: nn.Module) -> Optimizer:
        """The optimizer over the fake parameters of the model, or of a part of it, without state."""
        by_name = dict(stage.named_parameters(remove_duplicate=False))
        named = self._model.named_parameters(remove_duplicate=False)
        stand_ins = {id(parameter): by_name[name] for name, parameter in named if name in by_name}
        return optimizer_over(stand_ins, self._model, self._optimizer, self._device_type)

    def _of_guests(self, *, eight_bit: bool) -> InBuckets:
        """What is at home on the host visits the device."""
        how = self._stepping(moves=True, eight_bit=eight_bit)
        return dataclasses.replace(how, are_guests=True)

    def _stepping(self, *, moves: bool, eight_bit: bool = True) -> InBuckets:
        action = QuantizeOptimizer(self.travel.bucket_bytes)
        return InBuckets(
            moves=moves,
            prefetches=self.travel.overlaps,
            padding_bytes=PART_BYTES if self._device_type == "cpu" else 0,
            eligible=eligible_parameters(self._model, action.min_elements) if eight_bit else frozenset(),
            block_size=action.block_size,
            device_type=self._device_type,
            bucket_bytes=self.travel.bucket_bytes if moves or eight_bit else sys.maxsize,
            window_bytes=self.travel.transfers.window_bytes,
            resident_shares=RESIDENT_SHARES if moves and not eight_bit else (),
            cuts=moves and self._device_type != "cpu",
        )


def _is_separable(optimizer: str | Optimizer) -> bool:
    if isinstance(optimizer, Optimizer):
        try:
            check_separable(optimizer)
        except NotSeparable:
            return False
    return True


def _has_moments(optimizer: str | Optimizer) -> bool:
    return isinstance(optimizer, str) or (not is_8bit(optimizer) and moments_of(optimizer) is not None)
