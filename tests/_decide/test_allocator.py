"""The allocator model: every rule on its own by hand, published figures, properties of any series."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allocator_series import SERIES, Replay, as_text, draw
from memscale._decide.allocator import CachingAllocator, OutOfMemoryError
from memscale._decide.allocator.blocks import Block, BlockState, SegmentState
from memscale._decide.allocator.settings import NUM_DIVISIONS, AllocatorSettings, parse_settings
from memscale._errors import ConfigError, MemScaleError
from memscale._units import MIB

KIB = 1 << 10
GIB = 1 << 30


def model(conf: str = "", capacity_bytes: int | None = None, **options: Any) -> CachingAllocator:
    return CachingAllocator(parse_settings(conf), capacity_bytes, **options)


def layout(memory: CachingAllocator) -> list[list[tuple[int, str]]]:
    """Sizes and states of all blocks, segment by segment."""
    return [[(block.size_bytes, block.state) for block in segment.blocks] for segment in memory.segments()]


# ---- published figures


def published_cycles(conf: str) -> list[tuple[float, float]]:
    """pytorch#193400: a cycle is 91 MiB, 45.5 MiB and 2 MiB that stay, and the first two are freed. 64 MiB are there
    before (what the published figures of allocated bytes say of the first cycle)."""
    memory = model(conf, 16 * GIB)
    memory.allocate(64 * MIB)
    rows = []
    for cycle in range(101):
        passing = [memory.allocate(91 * MIB), memory.allocate(91 * MIB // 2)]
        memory.allocate(2 * MIB)
        for block in passing:
            memory.free(block)
        if cycle % 20 == 0:
            rows.append((memory.allocated_bytes / MIB, memory.reserved_bytes / MIB))
    return rows


def test_the_twelve_published_figures_of_a_leak() -> None:
    rows = published_cycles("max_split_size_mb:128,expandable_segments:True")
    assert [allocated for allocated, _ in rows] == [66, 106, 146, 186, 226, 266]
    assert [reserved for _, reserved in rows] == [220, 2980, 5760, 8520, 11300, 14060]


@pytest.mark.parametrize(
    ("conf", "reserved_mib"), [("max_split_size_mb:128", 422), ("expandable_segments:True", 420), ("", 422)]
)
def test_either_option_alone_does_not_leak(conf: str, reserved_mib: int) -> None:
    assert published_cycles(conf)[-1] == (266, reserved_mib), "published: under 500"


# ---- rounding


@pytest.mark.parametrize(
    ("num_bytes", "size_bytes"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 1536), (MIB - 1, MIB), (MIB, MIB)],
)
def test_requests_are_rounded_to_512_bytes(num_bytes: int, size_bytes: int) -> None:
    memory = model()
    assert memory.allocate(num_bytes).size_bytes == size_bytes
    assert memory.allocated_bytes == memory.peak_allocated_bytes == size_bytes
    assert memory.requested_bytes == memory.peak_requested_bytes == num_bytes


@pytest.mark.parametrize(
    ("conf", "num_bytes", "size_bytes"),
    [
        ("roundup_power2_divisions:4", 1200, 1536),  # up to 4 x 512 the divisions would be finer than blocks are
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:4", 5 * KIB, 5 * KIB),
        ("roundup_power2_divisions:4", 5 * KIB + 1, 6 * KIB),
        ("roundup_power2_divisions:4", 7 * KIB + 1, 8 * KIB),
        ("roundup_power2_divisions:2", 1200, 1536),
        ("roundup_power2_divisions:8", 4097, 4608),
        ("roundup_power2_divisions:1", 5 * KIB + 1, 5 * KIB + 512),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 65 * MIB, 72 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 33 * MIB, 36 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 300 * MIB, 320 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 129 * MIB + 1, 129 * MIB + 512),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 513 * MIB, 768 * MIB),
    ],
)
def test_requests_are_rounded_to_divisions_of_powers_of_two(conf: str, num_bytes: int, size_bytes: int) -> None:
    memory = model(conf + ",expandable_segments:True")  # where what is left over is always split off
    assert memory.allocate(num_bytes).size_bytes == size_bytes


def test_nothing_is_not_a_request() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        model().allocate(0)


# ---- segments and pools


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded to exactly 10 MiB, which is not packed
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_sizes_of_segments(num_bytes: int, segment_bytes: int) -> None:
    memory = model()
    memory.allocate(num_bytes)
    assert memory.reserved_bytes == memory.peak_reserved_bytes == segment_bytes


def test_the_size_of_large_segments_can_be_set() -> None:
    memory = model("large_segment_size_mb:32")
    memory.allocate(2 * MIB)
    assert memory.reserved_bytes == 32 * MIB


def test_small_and_large_requests_do_not_share() -> None:
    memory = model()
    large = memory.allocate(2 * MIB)
    memory.allocate(512)
    assert memory.reserved_bytes == 22 * MIB
    memory.free(large)
    memory.allocate(MIB)
    assert memory.reserved_bytes == 22 * MIB, "the small segment has room for it; the large pool is not asked"
    memory.allocate(MIB)
    assert memory.reserved_bytes == 24 * MIB


# ---- splitting


def test_small_blocks_are_split_to_the_last_512_bytes() -> None:
    memory = model()
    blocks = [memory.allocate(MIB), memory.allocate(MIB - 512), memory.allocate(1)]
    assert layout(memory) == [[(MIB, "allocated"), (MIB - 512, "allocated"), (512, "allocated")]]
    assert [block.address for block in blocks] == [0, MIB, 2 * MIB - 512]


@pytest.mark.parametrize(
    ("rest_bytes", "is_split"), [(512, False), (MIB, False), (MIB + 512, True), (2 * MIB - 512, True)]
)
def test_large_blocks_are_split_if_more_than_1_mib_is_left(rest_bytes: int, is_split: bool) -> None:
    memory = model()
    block = memory.allocate(26 * MIB - rest_bytes)
    assert memory.reserved_bytes == 26 * MIB
    assert block.size_bytes == (26 * MIB - rest_bytes if is_split else 26 * MIB)
    assert memory.allocated_bytes == block.size_bytes, "what cannot be split off is handed out, too"
    assert memory.requested_bytes == 26 * MIB - rest_bytes


def test_blocks_from_max_split_size_on_are_not_split() -> None:
    memory = model("max_split_size_mb:64")
    memory.free(memory.allocate(80 * MIB))
    whole = memory.allocate(64 * MIB)
    assert whole.size_bytes == 80 * MIB, "a large request gets a block that is less than 20 MiB larger, as it is"
    memory.free(whole)
    memory.allocate(60 * MIB)
    assert memory.reserved_bytes == 140 * MIB, "a smaller request gets none of it"
    memory.allocate(64 * MIB)
    assert memory.reserved_bytes == 140 * MIB


@pytest.mark.parametrize(("conf", "reserved_mib"), [("", 144), (",max_non_split_rounding_mb:21", 84)])
def test_blocks_that_are_much_larger_are_refused(conf: str, reserved_mib: int) -> None:
    memory = model("max_split_size_mb:60" + conf)
    memory.free(memory.allocate(84 * MIB))
    memory.allocate(64 * MIB if conf else 60 * MIB)
    assert memory.reserved_bytes == reserved_mib * MIB


# ---- best fit


def test_the_smallest_block_that_is_large_enough() -> None:
    memory = model()
    blocks = {size: memory.allocate(size * KIB) for size in (8, 1, 4, 2, 6, 3)}
    for size in (8, 4, 6):
        memory.free(blocks[size])
    assert memory.allocate(5 * KIB).address == blocks[6].address
    assert memory.allocate(3 * KIB).address == blocks[4].address


def test_of_equal_blocks_the_one_at_the_lowest_address() -> None:
    memory = model()
    blocks = [memory.allocate(KIB) for _ in range(7)]
    for index in (5, 1, 3):
        memory.free(blocks[index])
    assert [memory.allocate(KIB).address for _ in range(3)] == [blocks[index].address for index in (1, 3, 5)]


def test_of_equal_segments_the_oldest() -> None:
    memory = model()
    blocks = [memory.allocate(12 * MIB) for _ in range(5)]
    for index in (3, 1, 4, 0, 2):
        memory.free(blocks[index])
    assert [memory.allocate(12 * MIB) for _ in range(5)] == blocks, "as seen of PyTorch, wherever the driver put them"


# ---- freeing


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_become_one_block(order: tuple[int, ...]) -> None:
    memory = model()
    blocks = [memory.allocate(size * KIB) for size in (1, 2, 3)]
    for index in order:
        memory.free(blocks[index])
    assert layout(memory) == [[(2 * MIB, "free")]]
    assert (memory.allocated_bytes, memory.requested_bytes) == (0, 0)
    assert memory.reserved_bytes == 2 * MIB


def test_a_block_is_freed_once() -> None:
    memory = model()
    block = memory.allocate(512)
    memory.free(block)
    with pytest.raises(ValueError, match="freed before"):
        memory.free(block)
    with pytest.raises(ValueError, match="no stream"):
        memory.record_stream(block, 1)


def test_only_whole_segments_go_back() -> None:
    memory = model()
    kept, passing, large = memory.allocate(512), memory.allocate(512), memory.allocate(30 * MIB)
    memory.free(passing)
    memory.free(large)
    memory.empty_cache()
    assert memory.reserved_bytes == 2 * MIB
    memory.free(kept)
    memory.empty_cache()
    assert memory.reserved_bytes == 0
    assert memory.segments() == ()


def test_peaks_can_be_counted_anew() -> None:
    memory = model()
    memory.free(memory.allocate(30 * MIB))
    memory.allocate(MIB)
    memory.reset_peaks()
    assert (memory.peak_allocated_bytes, memory.peak_requested_bytes) == (MIB, MIB)
    assert memory.peak_reserved_bytes == 32 * MIB


# ---- streams


def test_streams_do_not_share() -> None:
    memory = model()
    memory.free(memory.allocate(30 * MIB, stream=1))
    memory.allocate(30 * MIB, stream=2)
    assert memory.reserved_bytes == 60 * MIB
    memory.allocate(30 * MIB, stream=1)
    assert memory.reserved_bytes == 60 * MIB
    assert [segment.stream for segment in memory.segments()] == [1, 2]


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    memory = model(event_lag=1)
    block = memory.allocate(1000)
    memory.record_stream(block, 7)
    memory.free(block)
    assert layout(memory) == [[(1024, "awaiting events"), (2 * MIB - 1024, "free")]]
    assert (memory.allocated_bytes, memory.requested_bytes) == (0, 1000), "as PyTorch counts"
    assert memory.allocate(1000).address == 1024, "the device is one request behind"
    assert memory.requested_bytes == 2000
    assert memory.allocate(1000).address == 0
    assert memory.requested_bytes == 2000


def test_without_a_lag_it_is_there_for_the_next_request_but_not_before() -> None:
    memory = model()
    block = memory.allocate(1000)
    memory.record_stream(block, 7)
    memory.free(block)
    assert layout(memory)[0][0] == (1024, "awaiting events")
    assert memory.allocate(1000).address == 0


def test_the_own_stream_needs_no_event() -> None:
    memory = model(event_lag=None)
    block = memory.allocate(1000, stream=3)
    memory.record_stream(block, 3)
    memory.free(block)
    assert memory.allocate(1000, stream=3).address == 0


def test_all_streams_must_be_done() -> None:
    memory = model(event_lag=None)
    block = memory.allocate(1000)
    for stream in (1, 2, 1):
        memory.record_stream(block, stream)
    memory.free(block)
    assert block.num_events == 2
    assert memory.allocate(1000).address == 1024, "with no lag given, events are not done before somebody waits"
    memory.empty_cache()
    assert memory.allocate(1000).address == 0


def test_streams_are_gone_when_a_block_is_handed_out_again() -> None:
    memory = model()
    block = memory.allocate(1000)
    memory.record_stream(block, 1)
    memory.free(block)
    again = memory.allocate(1000)
    memory.free(again)
    assert layout(memory) == [[(2 * MIB, "free")]]


# ---- limits


def test_what_is_cached_goes_back_before_a_request_fails() -> None:
    memory = model(capacity_bytes=100 * MIB)
    memory.free(memory.allocate(60 * MIB, stream=1))
    waiting = memory.allocate(30 * MIB)
    memory.record_stream(waiting, 5)
    memory.free(waiting)
    memory.allocate(90 * MIB, stream=2)
    assert memory.reserved_bytes == 90 * MIB
    assert memory.num_retries == 1
    assert memory.peak_reserved_bytes == 90 * MIB


def test_what_does_not_fit_says_so() -> None:
    memory = model(capacity_bytes=100 * MIB)
    kept = memory.allocate(60 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"52\.4 MB: of 104\.9 MB, 62\.9 MB are reserved"):
        memory.allocate(50 * MIB)
    assert issubclass(OutOfMemoryError, MemScaleError)
    assert memory.allocated_bytes == 60 * MIB, "and nothing has changed"
    memory.free(kept)
    memory.allocate(100 * MIB)


def test_split_segments_are_stranded() -> None:
    memory = model(capacity_bytes=40 * MIB)
    passing, kept = memory.allocate(18 * MIB), memory.allocate(2 * MIB)
    assert memory.reserved_bytes == 38 * MIB
    memory.free(passing)
    memory.allocate(30 * MIB - 10 * MIB)
    assert memory.reserved_bytes == 40 * MIB
    with pytest.raises(OutOfMemoryError):
        memory.allocate(19 * MIB)
    memory.free(kept)
    memory.allocate(19 * MIB)


def test_a_fraction_of_the_card_is_a_limit() -> None:
    memory = model("per_process_memory_fraction:0.5", 100 * MIB, total_bytes=80 * MIB)
    memory.allocate(40 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"of 41\.9 MB"):
        memory.allocate(1)
    with pytest.raises(ConfigError, match="total_bytes"):
        model("per_process_memory_fraction:0.5")


def test_oversize_blocks_go_back_before_all_others() -> None:
    memory = model("max_split_size_mb:32", 200 * MIB)
    sizes = (20, 40, 60, 50)
    for block in [memory.allocate(size * MIB) for size in sizes]:
        memory.free(block)
    memory.allocate(90 * MIB)
    assert memory.num_retries == 0
    assert sorted(segment.size_bytes // MIB for segment in memory.segments()) == [20, 40, 90]
    memory = model("max_split_size_mb:32", 140 * MIB)
    for block in [memory.allocate(size * MIB) for size in (20, 40, 80)]:
        memory.free(block)
    memory.allocate(50 * MIB)
    assert sorted(segment.size_bytes // MIB for segment in memory.segments()) == [20, 40, 50], "one suffices"


def test_too_few_oversize_blocks_are_followed_by_all_others() -> None:
    memory = model("max_split_size_mb:32", 100 * MIB)
    for block in [memory.allocate(size * MIB) for size in (30, 28, 40)]:
        memory.free(block)
    memory.allocate(90 * MIB)
    assert memory.num_retries == 1
    assert memory.reserved_bytes == 90 * MIB


def test_garbage_is_collected_by_age() -> None:
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:1.0"
    memory = model(conf, 300 * MIB)
    old, young = memory.allocate(60 * MIB), memory.allocate(80 * MIB)
    memory.free(old)
    for _ in range(5):
        memory.free(memory.allocate(2 * MIB, stream=1))
    assert memory.reserved_bytes == 160 * MIB
    memory.free(young)
    memory.allocate(81 * MIB)
    assert sorted(segment.size_bytes // MIB for segment in memory.segments()) == [20, 80, 82]
    without = model("garbage_collection_threshold:0.5", 200 * MIB)
    without.free(without.allocate(110 * MIB))
    without.allocate(120 * MIB - 40 * MIB, stream=1)
    assert without.reserved_bytes == 190 * MIB, "where no fraction is set, PyTorch collects nothing"


# ---- expandable segments


def test_expandable_segments_grow_by_pages() -> None:
    memory = model("expandable_segments:True")
    memory.allocate(512)
    assert memory.reserved_bytes == 2 * MIB
    memory.allocate(2 * MIB)
    assert memory.reserved_bytes == 22 * MIB
    memory.allocate(25 * MIB)
    assert memory.reserved_bytes == 42 * MIB, "the free tail of the first page is its beginning"
    assert layout(memory) == [
        [(512, "allocated"), (2 * MIB - 512, "free")],
        [(2 * MIB, "allocated"), (25 * MIB, "allocated"), (13 * MIB, "free")],
    ]
    assert memory.allocated_bytes == 512 + 27 * MIB, "large blocks are split to the last 512 bytes, too"


def test_what_cannot_grow_is_used_first() -> None:
    memory = model("expandable_segments:True")
    wide, kept = memory.allocate(30 * MIB), memory.allocate(2 * MIB)
    memory.free(wide)
    assert layout(memory) == [[(30 * MIB, "free"), (2 * MIB, "allocated"), (8 * MIB, "free")]]
    memory.allocate(5 * MIB)
    assert layout(memory)[0][0] == (5 * MIB, "allocated"), "8 MiB fit better, but can still become more"
    memory.free(kept)


def test_whole_free_pages_are_unmapped_and_mapped_again() -> None:
    memory = model("expandable_segments:True")
    blocks = [memory.allocate(15 * MIB) for _ in range(5)]
    assert memory.reserved_bytes == 80 * MIB
    for block in blocks[1:4]:
        memory.free(block)
    memory.empty_cache()
    assert memory.reserved_bytes == 40 * MIB, "15 to 60 MiB are free: of the pages 20 to 60 are whole"
    assert layout(memory) == [
        [(15 * MIB, "allocated"), (5 * MIB, "free")],
        [(15 * MIB, "allocated"), (5 * MIB, "free")],
    ]
    assert [segment.address for segment in memory.segments()] == [0, 60 * MIB]
    assert memory.allocate(41 * MIB).address == 15 * MIB
    assert memory.reserved_bytes == 80 * MIB
    assert memory.allocate(6 * MIB).address == 75 * MIB
    assert memory.reserved_bytes == 100 * MIB


def test_expandable_segments_go_back_when_they_are_empty() -> None:
    memory = model("expandable_segments:True")
    for block in [memory.allocate(size * MIB, stream) for size in (1, 15) for stream in (0, 1)]:
        memory.free(block)
    assert memory.reserved_bytes == 44 * MIB
    memory.empty_cache()
    assert memory.reserved_bytes == 0
    assert memory.segments() == ()
    memory.allocate(1)
    assert memory.reserved_bytes == 2 * MIB


def test_expandable_segments_are_not_stranded() -> None:
    memory = model("expandable_segments:True", 100 * MIB)
    small = [memory.allocate(20 * MIB) for _ in range(5)]
    for block in small[:4]:
        memory.free(block)
    memory.allocate(41 * MIB, stream=1)
    assert memory.num_retries == 1
    assert memory.reserved_bytes == 80 * MIB


def test_an_expandable_segment_has_room_for_the_card_and_an_eighth() -> None:
    memory = model("expandable_segments:True", 160 * MIB)
    blocks = [memory.allocate(60 * MIB), memory.allocate(60 * MIB)]
    memory.free(blocks[0])
    memory.allocate(80 * MIB, stream=0)
    assert [segment.address for segment in memory.segments()] == [60 * MIB, 180 * MIB], "180 MiB, of which 60 are left"


# ---- what is there already


def _drive(chance: random.Random, memory: CachingAllocator, live: list[Block], num_requests: int) -> None:
    for _ in range(num_requests):
        if live and chance.random() < 0.45:
            memory.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(memory.allocate(int(10 ** chance.uniform(2.5, 7.6)), stream=chance.choice((0, 0, 0, 1))))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "expandable_segments:True,large_segment_size_mb:12"])
@pytest.mark.parametrize("seed", range(5))
def test_adopted_segments_are_used_on_as_if_they_were_ones_own(conf: str, seed: int) -> None:
    chance = random.Random(seed)
    memory, live = model(conf), list[Block]()
    for size in (1000, 3 * MIB):  # an expandable segment begins where its first page is mapped
        for stream in (0, 1):
            memory.allocate(size, stream)
    _drive(chance, memory, live, 200)
    other = model(conf)
    found = other.adopt(memory.segments())
    assert (other.allocated_bytes, other.reserved_bytes) == (memory.allocated_bytes, memory.reserved_bytes)
    assert other.requested_bytes == other.peak_requested_bytes == memory.requested_bytes
    same = [found[block.address] for block in live]
    assert [block.size_bytes for block in same] == [block.size_bytes for block in live]
    again = random.Random(seed)
    again.setstate(chance.getstate())
    _drive(chance, memory, live, 200)
    _drive(again, other, same, 200)
    memory.empty_cache()
    other.empty_cache()
    assert sorted(layout(other)) == sorted(layout(memory))
    assert other.peak_reserved_bytes >= other.reserved_bytes == memory.reserved_bytes


def test_what_waits_for_events_is_adopted_as_free() -> None:
    memory = model(event_lag=None)
    blocks = [memory.allocate(4 * MIB) for _ in range(4)]
    memory.record_stream(blocks[2], 1)
    memory.free(blocks[2])
    memory.free(blocks[1])
    assert [state for _, state in layout(memory)[0]] == ["allocated", "free", "awaiting events", "allocated", "free"]
    other = model()
    other.adopt(memory.segments())
    assert layout(other) == [
        [(4 * MIB, "allocated"), (8 * MIB, "free"), (4 * MIB, "allocated"), (4 * MIB, "free")],
    ]
    assert other.requested_bytes == other.allocated_bytes == 8 * MIB


# ---- settings


def test_settings_from_text() -> None:
    assert parse_settings("") == AllocatorSettings()
    text = " max_split_size_mb: 128, expandable_segments:True,garbage_collection_threshold:0.8,"
    assert parse_settings(text + "max_non_split_rounding_mb:30") == AllocatorSettings(
        max_split_bytes=128 * MIB,
        expandable_segments=True,
        garbage_collection_threshold=0.8,
        max_non_split_rounding_bytes=30 * MIB,
    )
    ignored = "backend:native,pinned_use_background_threads:True,pinned_max_round_threshold_mb:64,"
    assert parse_settings(ignored + "release_lock_on_cudamalloc:True") == AllocatorSettings()
    assert parse_settings("large_segment_size_mb:32,per_process_memory_fraction:0.9") == AllocatorSettings(
        large_segment_bytes=32 * MIB, memory_fraction=0.9
    )


def test_divisions_from_text() -> None:
    assert parse_settings("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * NUM_DIVISIONS
    parsed = parse_settings("roundup_power2_divisions:[4:8,16:2,>:1]").roundup_power2_divisions
    assert parsed == (8, 8, 8, 0, 2, *(1,) * 11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:many", "max_split_size_mb:many"),
        ("expandable_segments:yes", "expandable_segments:True"),
        ("roundup_power2_divisions:3", "3 is neither"),
        ("roundup_power2_divisions:[3:4]", "3 MiB is not a power of two"),
        ("roundup_power2_divisions:[4:4", "not closed"),
        ("garbage_collection_threshold:1.5", "outside 0 to 1"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("nonsense", "'nonsense'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(text)


def test_divisions_are_given_for_all_sizes() -> None:
    with pytest.raises(ConfigError, match="1 entries"):
        AllocatorSettings(roundup_power2_divisions=(4,))


# ---- other settings from then on


def test_segments_stay_what_they_are_under_other_settings() -> None:
    memory = model("")
    before = memory.allocate(30 * MIB)
    memory.configure(parse_settings("expandable_segments:True,large_segment_size_mb:12"))
    memory.free(before)
    assert memory.allocate(20 * MIB).base == before.base, "what is free there is used on"
    grown = memory.allocate(20 * MIB)
    assert memory.reserved_bytes == 30 * MIB + 24 * MIB
    memory.configure(parse_settings("expandable_segments:False,large_segment_size_mb:20"))
    memory.free(grown)
    assert memory.allocate(12 * MIB).base != grown.base, "what is switched off is left alone"
    memory.empty_cache()
    assert memory.reserved_bytes == 30 * MIB + 12 * MIB, "and goes back page by page"


# ---- what PyTorch's own allocator did

RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "data" / "allocator_series.json").read_text())


@pytest.mark.parametrize("recorded", RECORDED["series"], ids=lambda recorded: recorded["name"])
def test_block_by_block_as_pytorch(recorded: dict[str, Any]) -> None:
    assert not Replay(recorded).differences()


def test_the_recorded_series_are_those_that_would_be_recorded() -> None:
    drawn = {series.name: [list(request) for request in draw(series)] for series in SERIES}
    assert drawn == {each["name"]: [step[:3] for step in each["steps"][1:]] for each in RECORDED["series"]}
    assert RECORDED["versions"]["torch"].startswith("2.13")
    assert json.loads(as_text(RECORDED)) == RECORDED


def test_what_happened_in_them() -> None:
    """Series in which nothing is refused or given back would show little."""
    retries, refused = {}, {}
    for recorded in RECORDED["series"]:
        replay = Replay(recorded)
        replay.differences()
        retries[recorded["name"]] = replay.memory.num_retries
        steps = recorded["steps"][1:]
        refused[recorded["name"]] = sum(step[0] == "allocate" and step[3] is None for step in steps)
    assert {name for name, number in retries.items() if number} == {
        "crowded card",
        "max_split, crowded card",
        "expandable, crowded card",
    }
    assert refused["crowded card"]
    assert refused["expandable, crowded card"]


def test_other_settings_are_seen_as_differences() -> None:
    recorded = next(each for each in RECORDED["series"] if each["name"] == "default")
    assert Replay({**recorded, "conf": "max_split_size_mb:24"}).differences()
    assert Replay({**recorded, "steps": recorded["steps"][:200]}).differences() == ["the blocks at the end differ"]


# ---- properties of any series

Request = tuple[str, int, int]
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 64).map(lambda n: n * 32 * KIB),
    st.integers(1, 60 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB]),
)
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 1000), st.integers(0, 2)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:24",
        "max_split_size_mb:24,expandable_segments:True",
        "roundup_power2_divisions:[1:8,8:4,>:2]",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
    ]
)
LAGS = st.sampled_from([0, 1, 3, None])


class Played:
    """A model and the blocks that it has handed out."""

    def __init__(self, conf: str, lag: int | None) -> None:
        self.memory = model(conf, 300 * MIB, event_lag=lag)
        self.held: list[Block] = []
        self.num_refused = 0

    def play(self, series: Iterable[Request]) -> None:
        for action, number, stream in series:
            self.request(action, number, stream)

    def request(self, action: str, number: int, stream: int) -> None:
        if action == "allocate":
            try:
                self.held.append(self.memory.allocate(number, stream))
            except OutOfMemoryError:
                self.num_refused += 1
        elif action == "empty_cache":
            self.memory.empty_cache()
        elif self.held and action == "free":
            self.memory.free(self.held.pop(number % len(self.held)))
        elif self.held:
            self.memory.record_stream(self.held[number % len(self.held)], stream)

    def figures(self) -> tuple[object, ...]:
        memory = self.memory
        counters = (memory.allocated_bytes, memory.requested_bytes, memory.reserved_bytes, memory.num_retries)
        peaks = (memory.peak_allocated_bytes, memory.peak_requested_bytes, memory.peak_reserved_bytes)
        return (*counters, *peaks, self.num_refused, memory.segments())

    def check(self) -> None:
        """The books are those of the blocks, and the blocks fill their segments."""
        memory, segments = self.memory, self.memory.segments()
        blocks = [block for segment in segments for block in segment.blocks]
        assert memory.reserved_bytes == sum(segment.size_bytes for segment in segments)
        assert memory.allocated_bytes == sum(b.size_bytes for b in blocks if b.state == "allocated")
        assert memory.allocated_bytes == sum(block.size_bytes for block in self.held)
        assert memory.requested_bytes == sum(block.requested_bytes for block in blocks)
        assert memory.allocated_bytes <= memory.reserved_bytes <= memory.peak_reserved_bytes <= 300 * MIB
        assert all(block.requested_bytes <= block.size_bytes for block in blocks)
        check_nothing_overlaps(segments, self.held)
        for segment in segments:
            assert segment.size_bytes == sum(block.size_bytes for block in segment.blocks)
            check_neighbours(segment.blocks)


def check_nothing_overlaps(segments: Iterable[SegmentState], held: Iterable[Block]) -> None:
    ends = 0
    for segment in segments:
        assert segment.address >= ends
        ends = segment.address + segment.size_bytes
    ends = 0
    for block in sorted(held, key=lambda block: block.address):
        assert block.address >= ends
        ends = block.address + block.size_bytes


def check_neighbours(blocks: tuple[BlockState, ...]) -> None:
    states = [block.state for block in blocks]
    assert ("free", "free") not in list(itertools.pairwise(states))


@given(REQUESTS, CONFS, LAGS)
def test_after_every_request_the_books_are_right(series: list[Request], conf: str, lag: int | None) -> None:
    played = Played(conf, lag)
    for action, number, stream in series:
        played.request(action, number, stream)
        played.check()


@given(REQUESTS, CONFS, LAGS)
def test_when_all_is_freed_and_given_back_nothing_is_left(series: list[Request], conf: str, lag: int | None) -> None:
    played = Played(conf, lag)
    played.play(series)
    for block in played.held:
        played.memory.free(block)
    played.memory.empty_cache()
    assert played.figures()[:3] == (0, 0, 0)
    assert played.memory.segments() == ()


@given(REQUESTS, CONFS, LAGS)
def test_the_same_series_gives_the_same_figures(series: list[Request], conf: str, lag: int | None) -> None:
    first, second = Played(conf, lag), Played(conf, lag)
    first.play(series)
    second.play(series)
    assert first.figures() == second.figures()


@given(REQUESTS)
def test_settings_that_bind_nothing_change_nothing(series: list[Request]) -> None:
    plain, bounded = Played("", 0), Played("max_split_size_mb:1024,roundup_power2_divisions:1", 0)
    plain.play(series)
    bounded.play(series)
    assert plain.figures() == bounded.figures()


def test_a_long_series_of_a_step_settles() -> None:
    """The same step over and over: what the second one reserves is enough for all that follow."""
    drawn = random.Random(0)
    sizes = [drawn.choice([512, 6 * KIB, 700 * KIB, 6 * MIB, 25 * MIB]) for _ in range(400)]
    memory = model()
    reserved = []
    for _ in range(5):
        held = [memory.allocate(size) for size in sizes]
        for block in reversed(held):
            memory.free(block)
        reserved.append(memory.reserved_bytes)
    assert len(set(reserved)) == 1
    assert memory.allocated_bytes == 0
