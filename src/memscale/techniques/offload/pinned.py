"""What pinned memory takes beside the bytes that wait in it. No torch.

Allocators of pinned memory round every block up to a power of two, so stores take it in segments (see NOTE [pinned
rounding] in `store/host.py`); and gradients of streamed parameters need memory to arrive in.
"""

from __future__ import annotations

from memscale._units import round_up

SEGMENT_BYTES = 64 * 1024 * 1024
"""The largest segment of a store; a larger tensor is split over several."""
PAGE_BYTES = 4096
"""A store gives each tensor a multiple of this."""
LANDING_BYTES = 128 * 1024 * 1024
"""The bytes of pinned memory in which gradients arrive. A larger gradient comes home in plain memory."""


def segments_bytes(num_bytes: int) -> int:
    """What a store takes for tensors of so many bytes together: segments that are full, but for the last ones."""
    half = SEGMENT_BYTES // 2
    return round_up(num_bytes, half) if num_bytes > half else num_bytes and power_of_two_above(num_bytes)


def arriving_bytes(gradient_bytes: int, shared_bytes: int, *, stays: bool) -> int:
    """What gradients of streamed parameters take on the host beside the memory that is theirs.

    If a gradient stays where it lands (`stays`), it is in no memory twice. But parts of a gradient that several modules
    add to (`shared_bytes`: those of tied weights) land one by one, and their sum is elsewhere.
    """
    if not stays:
        return min(gradient_bytes, LANDING_BYTES)
    return 2 * shared_bytes


def power_of_two_above(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()
