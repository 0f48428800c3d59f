"""Where one model's step is tried on fake tensors, whole and at a fraction of its depth; planners share it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable

import torch

from memscale._decide.budget import Held
from memscale._planning.job import Job
from memscale._planning.reserved.bucket_steps import KnownSteps
from memscale._planning.reserved.known_passes import KnownPasses
from memscale._planning.tile_sizes import Tiles, find_tiles
from memscale._profile import StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.profiler import open_rehearsal
from memscale._profile.shallow import ShallowRehearsal, open_shallow


class Stage:
    """One model's step with one batch, for one type of device."""

    def __init__(self, job: Job, inputs: Inputs) -> None:
        self._model, self._inputs = job.model, inputs
        self.device_type = job.hardware.device_type
        self.rehearsal, self.plain = open_rehearsal(
            job.model,
            inputs,
            torch.device(self.device_type),
            static=job.config.use_static_profiling,
            holds_gradients=job.holds_gradients,
            num_shards=job.ranks.num_shards,
            loop=job.loop,
        )
        """The rehearsal, with the trace of the plain step, which was the first to be tried."""
        self.tried: dict[Hashable, StepTrace | None] = {}
        """Traces of single techniques, by what was done and how tensors travelled, if any did."""
        self.rehearsed: dict[Hashable, StepTrace] = {}
        """The same of whole plans."""
        self.held: dict[Hashable, Held | None] = {}
        """What the allocator holds under them."""
        self.known_steps: KnownSteps = {}
        """Steps of the optimizer that are known, bucket by bucket."""
        self._last_passes: tuple[Hashable, KnownPasses] = (None, [])

    def for_another_card(self) -> Stage:
        """The same step on another card of this type of device: what the card has no part in is known already.

        Kernels take memory inside themselves by the card's multiprocessors, so recorded steps are its own.
        """
        other = copy.copy(self)
        other.rehearsed, other.held, other.known_steps, other._last_passes = {}, {}, {}, (None, [])
        return other

    def passes(self, key: Hashable) -> KnownPasses:
        """Forward and backward as they were recorded last, if that was under this key. They are large: one is kept."""
        if self._last_passes[0] != key:
            self._last_passes = key, []
        return self._last_passes[1]

    @functools.cached_property
    def shallow(self) -> ShallowRehearsal | None:
        if not self.rehearsal.is_fake or self.rehearsal.holds_gradients or self.rehearsal.sharding is not None:
            return None  # what is held is gathered or held belongs to all blocks
        blocks, loop = self.rehearsal.blocks, self.rehearsal.loop
        caches = self.rehearsal.caches
        return open_shallow(self._model, self._inputs, self.device_type, blocks, self.plain, loop, caches)

    @functools.cached_property
    def tiles(self) -> Tiles:
        return find_tiles(self.rehearsal, self.shallow)
