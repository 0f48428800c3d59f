"""What the state of a few parameters takes on the device, and the peak of a step over such buckets."""

from __future__ import annotations

import collections
import dataclasses

from memscale._profile.optimizer_twin.stepping import Stepping


@dataclasses.dataclass(frozen=True, slots=True)
class BucketCost:
    """What the state of a few parameters takes on the device."""

    waiting_bytes: int
    """The bytes of the memory in which its state waits."""
    kept_bytes: int
    """The bytes of state tensors that never wait."""
    unpacked_bytes: int
    """The bytes of state tensors that wait packed, once they are unpacked for a step into memory of their own."""
    step_bytes: int
    """The step's temporaries."""
    scratch_bytes: int
    num_launches: int = 0
    """Operators of the step."""
    launched_bytes: int = 0
    making_bytes: int = 0
    """The most bytes that exist while the state is made and laid out."""
    state_bytes: int = 0
    """The bytes of the state as the optimizer makes it."""
    made_bytes: int = 0
    """The most bytes that exist while the state is made."""
    moves: bool = True
    """Whether its state waits elsewhere, where buckets do."""
    guest_bytes: int = 0
    """The bytes of its parameters, where these live elsewhere, too: they visit the device with their gradients."""
    num_guests: int = 0
    parameter_bytes: int = 0
    """The bytes of the parameters that are stepped in its turn."""

    def travels(self, how: Stepping) -> bool:
        return bool(self.guest_bytes) or (how.moves and self.moves)

    @property
    def coming_bytes(self) -> int:
        return self.waiting_bytes + 2 * self.guest_bytes

    @property
    def leaving_bytes(self) -> int:
        """Gradients do not go back."""
        return self.waiting_bytes + self.guest_bytes

    def staying(self) -> BucketCost:
        """The same bucket where its state is left as the optimizer makes it."""
        return dataclasses.replace(
            self,
            waiting_bytes=0,
            kept_bytes=self.state_bytes,
            unpacked_bytes=0,
            scratch_bytes=0,
            making_bytes=self.made_bytes,
            moves=False,
        )

    def stays_bytes(self, how: Stepping) -> int:
        return self.kept_bytes + (0 if self.travels(how) else self.waiting_bytes)

    def stepping_bytes(self, how: Stepping) -> int:
        """The bytes that its turn takes above what stays on the device."""
        beside = self.coming_bytes if self.travels(how) else 0
        return beside + self.unpacked_bytes + max(self.step_bytes, self.scratch_bytes)


def peak_of_step(how: Stepping, buckets: list[BucketCost], held_bytes: int, *, is_first: bool) -> int:
    """The most that there is in one step, above what the optimizer does not have; state is made in the first."""
    peak_bytes, leaving = 0, _Leaving(how.window_bytes)
    to_come = collections.deque(bucket for bucket in buckets if bucket.travels(how))
    for bucket in buckets:
        if bucket.travels(how):
            to_come.popleft()
            here_bytes = 2 * bucket.guest_bytes if is_first else bucket.coming_bytes
            peak_bytes = max(peak_bytes, held_bytes + leaving.num_bytes + here_bytes)
            leaving.let_go(but=1)
        coming_bytes = _coming_bytes(how, bucket, to_come[0], is_first=is_first) if to_come else 0
        stepping_bytes = bucket.making_bytes if is_first else bucket.stepping_bytes(how)
        peak_bytes = max(peak_bytes, held_bytes + leaving.num_bytes + coming_bytes + stepping_bytes)
        if bucket.travels(how) and how.prefetches:
            leaving.add(bucket)
        held_bytes += bucket.stays_bytes(how) if is_first else 0
    return peak_bytes


def _coming_bytes(how: Stepping, bucket: BucketCost, following: BucketCost, *, is_first: bool) -> int:
    """What is fetched beside a bucket's step. While state is made nothing is, and there is none to be fetched."""
    if not how.prefetches or (is_first and bucket.travels(how)):
        return 0
    return 2 * following.guest_bytes if is_first else following.coming_bytes


class _Leaving:
    """What is on its way out: state, and guests, both up to the window."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._state: collections.deque[int] = collections.deque()
        self._guests: collections.deque[int] = collections.deque()

    @property
    def num_bytes(self) -> int:
        return sum(self._state) + sum(self._guests)

    def add(self, bucket: BucketCost) -> None:
        for queue, num_bytes in ((self._state, bucket.waiting_bytes), (self._guests, bucket.guest_bytes)):
            queue.append(num_bytes)
            while sum(queue) > self._window_bytes:
                queue.popleft()

    def let_go(self, but: int) -> None:
        for queue in (self._state, self._guests):
            while len(queue) > but:
                queue.popleft()


def launched(buckets: list[BucketCost]) -> tuple[int, int]:
    """Operators of a step, and what they read and write."""
    return sum(bucket.num_launches for bucket in buckets), sum(bucket.launched_bytes for bucket in buckets)
