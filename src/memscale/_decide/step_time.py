"""The time model: how long a stretch of a step takes on one hardware. No torch.

NOTE [pace]: the host launches, the device computes, and each direction of the link copies, side by side; the slowest of
them sets the pace. Transfers that wait come on top of it, and from memory that is not pinned.

NOTE [calls]: on a CPU calls cost time beside the arithmetic: operators, checkpoints, the optimizer's loop. On models of
a few thousand values a layer this is most of a step; on large ones it is nothing. A GPU's host runs ahead of it, so
there they are not counted. The figures were fitted to the models of the suite, on one core
(`python -m benchmarks.timing`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memscale._hardware import Hardware
from memscale._profile import Segment, Treatment

_TILED_HEAD_SLOWDOWN = 1.02
"""A nominal price of tiling the head, so that plans that are exact bit for bit come first."""
_TILE_MS = 0.08
"""What Python and views around the operators of a tile cost; a host that launches ahead of its device hides it. A
nominal figure. The operators themselves are in the traces: launches on a device, calls on a CPU."""
_FORWARD_MS, _BACKWARD_MS = 0.02, 0.01
"""What an operator costs the host: forward comes from Python, backward from the engine."""
_CHECKPOINT_MS = 0.8
"""What PyTorch's checkpoint and our hooks around it cost, random state and module state included."""
_WATCHED_MS = 0.4
"""What an operator costs that a selective checkpoint looks at, in forward and again in backward."""
_TENSOR_MS = 0.06
"""What the optimizer's step costs for each parameter."""
_BUCKET_MS = 0.4
"""What Python costs for each bucket of an optimizer's step beside its launches: a shadow of the optimizer, and its
groups. A host that launches ahead of its device hides it. Measured on one core with AdamW over 580 parameters."""
_RANDOM_MS = 7e-6
"""What one random number costs: generators are not vectorized."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """What crosses the link. Numbers, or arrays of them."""

    num_copies: Any = 0
    out_bytes: Any = 0
    in_bytes: Any = 0
    landing_bytes: int = 0
    """The part of `out_bytes` that is gradients. A thread of the host is blocked until these arrive."""
    first_bytes: Any = 0
    """What comes beside `in_bytes`, and that no compute could hide."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One bucket of an optimizer's step that travels: what arrives, is computed, and leaves. Numbers, or arrays."""

    in_bytes: Any = 0
    compute_ms: Any = 0.0
    out_bytes: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What an optimizer's step in buckets takes of the device, the host and the link. Numbers, or arrays of them."""

    compute_ms: Any
    num_launches: Any
    host_ms: Any = 0.0
    moved: Moved = Moved()
    turn: Turn = Turn()
    """The largest turn of what travels; nothing where all stays."""
    travelling_ms: Any = 0.0
    """The part of `compute_ms` that what travels takes."""


class Pace:
    """How fast one hardware is; `overlaps`: transfers run beside compute."""

    def __init__(self, hardware: Hardware, *, overlaps: bool = False) -> None:
        self.hardware = hardware
        self.overlaps = overlaps
        self.counts_calls = hardware.device_type == "cpu"

    # ---- pieces of a step

    def run_ms(self, segments: Iterable[Segment], *, halves: bool = False, more: Moved | None = None) -> float:
        """Adjacent segments of one owner. `halves`: products are in 16 bits; `more`: crosses the link, too."""
        segments, more = tuple(segments), more or Moved()
        compute_ms = sum((self.compute_ms(segment, halves=halves) for segment in segments), 0.0)
        moved = Moved(
            num_copies=sum(segment.num_sends + segment.num_fetches for segment in segments),
            out_bytes=sum(segment.sent_bytes for segment in segments) + more.out_bytes,
            in_bytes=sum(segment.fetched_bytes for segment in segments) + more.in_bytes,
            landing_bytes=sum(segment.sent_bytes for segment in segments if segment.phase == "backward"),
            first_bytes=more.first_bytes,
        )
        return float(self.slowest_ms(compute_ms, sum(segment.num_launches for segment in segments), moved))

    def compute_ms(self, segment: Segment, *, halves: bool = False) -> float:
        """The time of a segment by its arithmetic and its memory traffic."""
        hardware = self.hardware
        half_flops = segment.flops if halves else segment.half_flops
        efficiency = hardware.matmul_efficiency
        matmul_ms = (segment.flops - half_flops) / (hardware.fp32_flops * efficiency) * 1e3
        matmul_ms += half_flops / (hardware.half_flops * (hardware.half_matmul_efficiency or efficiency)) * 1e3
        calls_ms = 0.0
        if self.counts_calls:
            calls_ms = _segment_calls_ms(segment.phase, segment.num_launches, segment.num_random)
        products_ms = max(matmul_ms, self.memory_ms(segment.matmul_bytes))
        return float(products_ms + self.memory_ms(segment.other_bytes) + calls_ms)

    def memory_ms(self, num_bytes: Any) -> Any:
        """To read and write so many bytes of the device's memory."""
        rate = self.hardware.memory_bytes_per_s * (self.hardware.memory_efficiency or 1.0)
        return num_bytes / rate * 1e3

    def tiles_ms(self, num_tiles: int) -> float:
        """What so many tiles add to what their traces say."""
        return 0.0 if self.hardware.launch_s else num_tiles * _TILE_MS

    def tiled_head_ms(self, step_ms: Any, num_tiles: int) -> Any:
        """A step of so many milliseconds with the head in so many tiles."""
        return step_ms * _TILED_HEAD_SLOWDOWN + self.tiles_ms(num_tiles)

    def buckets_ms(self, num_buckets: int) -> float:
        """What the host takes for so many buckets of an optimizer's step; a simulated clock does not count it."""
        return 0.0 if self.hardware.host_bytes_per_s is None else _BUCKET_MS * num_buckets

    def hooks_ms(self, treatment: Treatment, num_calls: int, num_operators: int) -> float:
        """What the machinery of a treatment takes in a block, beside what is computed again."""
        return _treatment_calls_ms(treatment, num_calls, num_operators) if self.counts_calls else 0.0

    # ---- the host, the device and the link, side by side. Numbers or arrays of them.

    def slowest_ms(self, compute_ms: Any, num_launches: Any, moved: Moved, host_ms: Any = 0.0) -> Any:
        """See NOTE [pace]. `host_ms` is what the host has to do beside launching."""
        launch_ms = self.hardware.launch_s * 1e3
        launches_ms, copies_ms = num_launches * launch_ms + host_ms, moved.num_copies * launch_ms
        in_ms, out_ms = self.link_ms(moved.in_bytes), self.link_ms(moved.out_bytes)
        if not self.overlaps:
            return larger(compute_ms, launches_ms) + copies_ms + in_ms + out_ms
        link_ms = larger(in_ms, out_ms) if self.hardware.link_directions > 1 else in_ms + out_ms
        landing_ms = self.link_ms(moved.landing_bytes) if self.hardware.has_one_host_thread else 0.0
        paced_ms = larger(larger(compute_ms, launches_ms + copies_ms) + landing_ms, link_ms)
        return paced_ms + self.link_ms(moved.first_bytes)

    def turns_ms(self, works: Sequence[StepWork], early_bytes: Any = 0, late_bytes: Any = 0) -> Any:
        """The time of buckets that take turns: one arrives, one is computed and one leaves at a time.

        `early_bytes` of what would come are there already. `late_bytes` of what would leave, the last of it, do so when
        the step is over.

        NOTE [turns]: the slowest of the three is busy from its first turn to its last. What it waits for comes on top:
        the first turn of what comes before it, and the last turn of what comes behind it. What stays on the device is
        computed while the first turn arrives. Transfers that block have no company.
        """
        moved = Moved(
            sum(work.moved.num_copies for work in works),
            sum(work.moved.out_bytes for work in works),
            sum(work.moved.in_bytes for work in works),
        )
        compute_ms, launches = sum(work.compute_ms for work in works), sum(work.num_launches for work in works)
        host_ms = sum(work.host_ms for work in works)
        if not self.overlaps:
            return self.slowest_ms(compute_ms, launches, moved, host_ms)
        busy_ms = self.slowest_ms(compute_ms, launches, Moved(moved.num_copies), host_ms)
        here_bytes = smaller(early_bytes, moved.in_bytes)
        left_bytes = smaller(late_bytes, moved.out_bytes)
        in_ms, out_ms = self.link_ms(moved.in_bytes - here_bytes), self.link_ms(moved.out_bytes - left_bytes)
        arrives_ms = self.link_ms(_largest(work.turn.in_bytes for work in works))
        leaves_bytes = _largest(work.turn.out_bytes for work in works)
        leaves_ms = self.link_ms(leaves_bytes - smaller(left_bytes, leaves_bytes))
        one_ms = _largest(work.turn.compute_ms for work in works)
        travelling_ms = arrives_ms + sum(work.travelling_ms for work in works)
        computing_ms = larger(travelling_ms, busy_ms) + leaves_ms
        if self.hardware.link_directions < 2:
            return larger(computing_ms, in_ms + out_ms + one_ms)
        return larger(computing_ms, larger(in_ms + one_ms + leaves_ms, arrives_ms + one_ms + out_ms))

    def link_ms(self, num_bytes: Any) -> Any:
        """The time of a transfer in one direction."""
        blocking = self.hardware.blocking_link_bytes_per_s
        rate = self.hardware.link_bytes_per_s if self.overlaps or blocking is None else blocking
        return num_bytes / rate * 1e3

    # ---- transfers beside other blocks

    def spread(self, runs: Sequence[tuple[str, list[Segment]]], param_bytes: Mapping[str, int]) -> dict[int, Moved]:
        """What crosses the link in each run of a block's segments more, or less, than begins there.

        NOTE [side by side]: what blocks send leaves while others compute, and what they need comes back while others
        do, as far as windows allow. So it is spread over all of them. A source is kept until its copy is made, up to
        the window: what backward finds still there is not fetched, and its copy is waited for only at the end of the
        step. It leaves beside what comes back; the rest of it, beside the forward and the backward of its block.

        Weights are fetched ahead, and counted with the block that waits for them; those of the first block that is
        streamed have nothing to hide behind. What forward fetches are weights; backward fetches them again, but for
        the last block's. `param_bytes` has the weights of those blocks that are streamed.
        """
        places: dict[str, list[int]] = {}
        for index, (owner, _) in enumerate(runs):
            places.setdefault(owner, []).append(index)
        pairs = [(owner, found[0], found[1]) for owner, found in places.items() if owner and len(found) == 2]
        if not self.overlaps or not pairs:
            return {}
        traffic = _Traffic.of(
            [(param_bytes.get(owner, 0), runs[first][1], runs[second][1]) for owner, first, second in pairs]
        )
        spread = {}
        for number, (_, first, second) in enumerate(pairs):
            busy_ms = self.busy_ms(runs[first][1]), self.busy_ms(runs[second][1])
            early = busy_ms[0] / max(sum(busy_ms), 1e-12)
            spread[first], spread[second] = traffic.spread(number, early)
        return spread

    def busy_ms(self, segments: list[Segment], *, halves: bool = False) -> float:
        """The time of these segments without transfers."""
        num_launches = sum(segment.num_launches for segment in segments)
        compute_ms = sum(self.compute_ms(segment, halves=halves) for segment in segments)
        return float(self.slowest_ms(compute_ms, num_launches, Moved()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Traffic:
    """What blocks send in forward, and fetch in forward and backward. See NOTE [side by side]."""

    param_bytes: tuple[int, ...]
    sent: tuple[int, ...]
    fetched: tuple[int, ...]
    fetched_back: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[tuple[int, list[Segment], list[Segment]]]) -> _Traffic:
        return cls(
            tuple(num_bytes for num_bytes, _, _ in blocks),
            tuple(sum(segment.sent_bytes for segment in forward) for _, forward, _ in blocks),
            tuple(sum(segment.fetched_bytes for segment in forward) for _, forward, _ in blocks),
            tuple(sum(segment.fetched_bytes for segment in backward) for _, _, backward in blocks),
        )

    def spread(self, number: int, early: float) -> tuple[Moved, Moved]:
        """What one block's forward and backward move; `early` is the share of their time that is forward's."""
        weights = sum(self.fetched)
        streamed = [place for place, num_bytes in enumerate(self.param_bytes) if num_bytes]
        kept = self.param_bytes[streamed[-1]] if streamed else 0
        weights_back = min(sum(self.fetched_back), max(0, weights - kept)) if weights else 0
        returned = sum(self.fetched_back) - weights_back
        lingering = max(0, sum(self.sent) - returned)
        share = self.sent[number] / max(1, sum(self.sent))
        of_weights = self.param_bytes[number] / max(1, sum(self.param_bytes))
        beside = share * max(0, lingering - returned)
        leaves = share * (sum(self.sent) - lingering) + beside * early
        needs = of_weights * weights
        first = needs if streamed and number == streamed[0] else 0
        comes_back = share * returned + of_weights * weights_back
        return (
            Moved(
                out_bytes=leaves - self.sent[number], in_bytes=needs - first - self.fetched[number], first_bytes=first
            ),
            Moved(out_bytes=beside * (1 - early), in_bytes=comes_back - self.fetched_back[number]),
        )


def _largest(values: Iterable[Any]) -> Any:
    """The result is a number, or an array where arguments are."""
    return functools.reduce(larger, values)


def larger(a: Any, b: Any) -> Any:
    """The result is a number, or an array where arguments are."""
    return (a + b + abs(a - b)) / 2


def smaller(a: Any, b: Any) -> Any:
    """The result is a number, or an array where arguments are."""
    return (a + b - abs(a - b)) / 2


# ---- calls, see NOTE [calls]


def _segment_calls_ms(phase: str, num_launches: int, num_random: int) -> float:
    return num_launches * (_FORWARD_MS if phase == "forward" else _BACKWARD_MS) + num_random * _RANDOM_MS


def _treatment_calls_ms(treatment: Treatment, num_calls: int, num_operators: int) -> float:
    """What a treatment costs a block that is called so often and has so many operators in its forward.

    What is computed again is a forward, though it is in the traces of backward.
    """
    if treatment.recompute == "none":
        return 0.0
    watched_ms = _WATCHED_MS if treatment.recompute == "selective" else 0.0
    again_ms = num_operators * (_FORWARD_MS - _BACKWARD_MS + watched_ms)
    return _CHECKPOINT_MS * max(1, num_calls) + again_ms


def optimizer_calls_ms(num_tensors: int) -> float:
    return _TENSOR_MS * num_tensors
