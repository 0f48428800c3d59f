"""What the buckets of a step cost: those of parameters on the device, and those of guests, which visit it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._profile.optimizer_twin.bucket_cost import BucketCost, peak_of_step
from memscale._profile.optimizer_twin.same_optimizer import over_parameters, same_class
from memscale._profile.optimizer_twin.stepping import Stepping
from memscale._profile.optimizer_twin.twin import Trial, Twin, each_once, kind_of
from memscale._units import round_up


class BucketTrials:
    """Steps of a twin, bucket by bucket; `guests` says how parameters that are streamed visit the device for them."""

    def __init__(self, twin: Twin, guests: Stepping | None) -> None:
        self._twin = twin
        self.how_guests = guests
        self._known: dict[Hashable, BucketCost] = {}
        """What buckets cost, by what decides it: a model has many that are alike."""
        self._group_of = {id(p): index for index, group in enumerate(twin.members) for p in group}

    def in_turn(self, how: Stepping, buckets: list[BucketCost]) -> tuple[int, int]:
        """What is on the device between steps, and the most that there is above it in any step, the first included.

        The buckets are stepped in the executor's order. See NOTE [what a bucket costs] and NOTE [the order of a step]
        in techniques/offload/optimizer/buckets.py.
        """
        order = how.order([bucket.parameter_bytes for bucket in buckets], [bucket.travels(how) for bucket in buckets])
        buckets = [buckets[index] for index in order]
        tables_bytes = how.tables_bytes(self._twin.optimizer, self._twin.device_type) if buckets else 0
        stays_bytes = tables_bytes + sum(bucket.stays_bytes(how) for bucket in buckets)
        first = peak_of_step(how, buckets, tables_bytes, is_first=True)
        later = peak_of_step(how, buckets, stays_bytes, is_first=False)
        return stays_bytes, max(first, later) - stays_bytes

    def try_all(self, how: Stepping) -> list[BucketCost]:
        return [self._try_bucket(how, bucket) for bucket in self.filled(how)]

    def filled(self, how: Stepping) -> Iterator[dict[int, nn.Parameter]]:
        """The buckets with parameters that are trained. The others take their room in a bucket, too."""
        yield from (bucket for _, bucket in self.every(how) if bucket)

    def every(self, how: Stepping) -> Iterator[tuple[int, dict[int, nn.Parameter]]]:
        """Each bucket: the bytes of its parameters, and those of them that are trained."""
        for indices in how.split([parameter.nbytes for parameter in self._twin.resident]):
            members = [self._twin.resident[index] for index in indices]
            trained = {id(p): self._twin.fakes[id(p)] for p in members if id(p) in self._twin.fakes}
            yield sum(parameter.nbytes for parameter in members), trained

    def _try_bucket(self, how: Stepping, bucket: dict[int, nn.Parameter]) -> BucketCost:
        kinds = tuple((self._group_of[number], kind_of(fake), how.packs(number)) for number, fake in bucket.items())
        if (how, kinds) not in self._known:
            optimizer = over_parameters(self._twin.optimizer, {id(fake): fake for fake in bucket.values()})
            self._known[how, kinds] = self._try_over(how, optimizer, bucket)
        return self._known[how, kinds]

    def try_pieces(self, how: Stepping, bucket: dict[int, nn.Parameter]) -> list[BucketCost]:
        """The turns in which a bucket is stepped whose state travels: one, or one for each stretch of a parameter."""
        numbers = {id(fake): number for number, fake in bucket.items()}
        parts = how.stretches(self._twin.optimizer, bucket)
        if len(parts) == 1:
            return [self._try_bucket(how, bucket)]
        return [self._try_part(how, {numbers[id(fake)]: fake for fake in part}, part) for part in parts]

    def _try_part(
        self,
        how: Stepping,
        members: Mapping[int, torch.Tensor],
        sizes: Mapping[torch.Tensor, torch.Size | None],
        groups: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> BucketCost:
        """Some parameters, by number, or a stretch of one; `groups` holds them as the optimizer's groups do."""
        kinds = tuple(
            (self._group_of[number], kind_of(parameter), how.packs(number), sizes[parameter])
            for number, parameter in members.items()
        )
        if (how, kinds) not in self._known:
            self._known[how, kinds] = self._try_new_part(how, members, sizes, groups)
        return self._known[how, kinds]

    def _try_new_part(
        self,
        how: Stepping,
        members: Mapping[int, torch.Tensor],
        sizes: Mapping[torch.Tensor, torch.Size | None],
        groups: Sequence[Sequence[torch.Tensor]] | None,
    ) -> BucketCost:
        fakes: dict[int, nn.Parameter] = {}
        by_member: dict[int, nn.Parameter] = {}
        with self._twin.mode:
            for number, parameter in members.items():
                size = sizes[parameter]
                shape, stride = (parameter.shape, parameter.stride()) if size is None else (size, (1,))
                empty = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=self._twin.device)
                fakes[number] = by_member[id(parameter)] = nn.Parameter(empty)
        own_groups = [group["params"] for group in self._twin.optimizer.param_groups] if groups is None else groups
        pairs = zip(self._twin.optimizer.param_groups, own_groups, strict=True)
        chosen = [{**group, "params": [by_member[id(p)] for p in own if id(p) in by_member]} for group, own in pairs]
        return self._try_over(how, same_class(self._twin.optimizer, chosen), fakes)

    def _try_over(self, how: Stepping, optimizer: Optimizer, bucket: dict[int, nn.Parameter]) -> BucketCost:
        trial = self._twin.tried(optimizer, bucket, tuple(map(how.packs, bucket)))
        counters = self._twin.counter_bytes(trial.optimizer)
        state_bytes = trial.state_bytes - counters
        cost = self._share(how, trial, list(bucket), state_bytes)
        together = cost.waiting_bytes + state_bytes + cost.scratch_bytes
        return dataclasses.replace(
            cost,
            making_bytes=max(trial.making_bytes - counters, together),
            num_launches=trial.num_launches,
            launched_bytes=trial.launched_bytes,
            state_bytes=state_bytes,
            made_bytes=trial.making_bytes - counters,
            parameter_bytes=sum(fake.nbytes for fake in bucket.values()),
        )

    def _share(self, how: Stepping, trial: Trial, numbers: list[int], state_bytes: int) -> BucketCost:
        """What of a bucket's state waits, and what does not."""
        waiting_bytes = unpacked_bytes = scratch_bytes = moved_bytes = 0
        for number, state in zip(numbers, trial.states, strict=True):
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                slot_bytes = how.waiting_bytes(trial.optimizer, number, name, value)
                if slot_bytes is None:
                    continue
                waiting_bytes += slot_bytes
                moved_bytes += round_up(value.nbytes, self._twin.rounding_bytes)
                if slot_bytes < value.nbytes:
                    unpacked_bytes += round_up(value.nbytes, self._twin.rounding_bytes)
                    scratch_bytes = max(scratch_bytes, how.scratch_bytes(value))
        waiting_bytes += how.padding_bytes if waiting_bytes else 0
        kept_bytes = state_bytes - moved_bytes
        return BucketCost(waiting_bytes, kept_bytes, unpacked_bytes, trial.step_bytes, scratch_bytes)

    @functools.cached_property
    def guests(self) -> list[BucketCost]:
        """The buckets of parameters that are streamed and visit the device to be stepped. They come after those that
        are there."""
        how = self.how_guests
        if how is None:
            return []
        streamed = [p for p in each_once(self._twin.members) if id(p) in self._twin.left_out]
        found = []
        for indices in how.split([parameter.nbytes for parameter in streamed]):
            trained = {id(p): p for p in map(streamed.__getitem__, indices) if self._twin.is_trained(p)}
            found += [self._try_guests(how, part) for part in how.stretches(self._twin.optimizer, trained) if part]
        return found

    def _try_guests(self, how: Stepping, sizes: Mapping[torch.Tensor, torch.Size | None]) -> BucketCost:
        """Some parameters, or a stretch of one."""
        cost = self._try_part(how, {id(parameter): parameter for parameter in sizes}, sizes, self._twin.members)
        lengths = [p.nbytes if size is None else size.numel() * p.itemsize for p, size in sizes.items()]
        num_bytes = sum(round_up(length, self._twin.rounding_bytes) for length in lengths)
        sent_bytes = num_bytes if how.prefetches else 0  # else it is there by then
        made_bytes = max(2 * num_bytes + cost.made_bytes, sent_bytes + cost.waiting_bytes + cost.state_bytes)
        return dataclasses.replace(cost, guest_bytes=num_bytes, making_bytes=made_bytes, num_guests=len(sizes))
