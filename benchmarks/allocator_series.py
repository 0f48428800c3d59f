"""What PyTorch's own CUDA allocator does for series of requests, written down to hold the model of it against.

    python -m benchmarks.allocator_series tests/data/allocator_series.json

Needs the CUDA build of PyTorch and a card, a real or an emulated one. Each series runs in a process of its own, under
its own `PYTORCH_ALLOC_CONF`, and is drawn from a seed: requests on several streams, frees, uses by other streams, and
caches that are emptied. Of each request the address is kept, and after it what PyTorch counts; at the end of the
series all blocks. Addresses count from the lowest. `Replay` lets the model do the same and says where it differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from memscale._decide.allocator import CachingAllocator, OutOfMemoryError
from memscale._decide.allocator.blocks import Block, SegmentState
from memscale._decide.allocator.settings import parse_settings
from memscale._units import MIB

KIB = 1 << 10
NUM_STREAMS = 3
SMALL_PAGES = "expandable_segments:True,large_segment_size_mb:12"
AS_IT_COMES = "expandable_segments:False,large_segment_size_mb:20"


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """What is drawn, and under which settings."""

    name: str
    conf: str = ""
    num_requests: int = 300
    most_live: int = 60
    largest_bytes: int = 60 * MIB
    sizes: tuple[int, ...] = ()
    """Few sizes, so that many blocks are alike; empty: all sizes are drawn."""
    room_bytes: int | None = None
    """One block takes all of the card but this much before the series; None: the card is empty."""
    switches: tuple[tuple[int, str], ...] = ()
    """Other settings from a request on, by its number."""


SERIES = (
    Series("default"),
    Series("small", largest_bytes=2 * MIB, most_live=120),
    Series("alike", sizes=(512, 700 * KIB, MIB, 6 * MIB, 12 * MIB)),
    Series("crowded card", room_bytes=300 * MIB),
    Series("max_split", "max_split_size_mb:24"),
    Series("max_split, crowded card", "max_split_size_mb:24", room_bytes=250 * MIB),
    Series("roundup", "roundup_power2_divisions:[1:8,8:4,>:2]"),
    Series("large segments", "large_segment_size_mb:32"),
    Series("garbage", "garbage_collection_threshold:0.01,per_process_memory_fraction:0.9"),
    Series("expandable", "expandable_segments:True"),
    Series("expandable, crowded card", "expandable_segments:True", room_bytes=250 * MIB),
    Series("expandable, max_split", "expandable_segments:True,max_split_size_mb:24"),
    Series("expandable from then on", switches=((120, SMALL_PAGES),)),
    Series("expandable for a while", switches=((100, SMALL_PAGES), (200, AS_IT_COMES))),
)


# ---- drawing


def draw(series: Series) -> Iterator[tuple[str, int, int]]:
    """Requests: what to do, then the bytes or which of the live blocks, then the stream."""
    drawn = random.Random(series.name)
    live, switched = 0, {at: place for place, (at, _) in enumerate(series.switches)}
    for index in range(series.num_requests):
        if index in switched:
            yield "switch", switched[index], 0
        action = drawn.random()
        if action < 0.01:
            yield "empty", 0, 0
        elif live and action < 0.08:
            yield "use", drawn.randrange(live), drawn.randrange(NUM_STREAMS)
        elif live and (action < 0.5 or live >= series.most_live):
            yield "free", drawn.randrange(live), 0
            live -= 1
        else:
            # Also a request that is refused counts as live: it is freed as nothing.
            size = drawn.choice(series.sizes) if series.sizes else _size(drawn, series.largest_bytes)
            yield "allocate", size, _stream(drawn)
            live += 1


def _size(drawn: random.Random, largest_bytes: int) -> int:
    kind = drawn.random()
    if kind < 0.35:
        return drawn.randint(1, 64 * KIB)
    if kind < 0.5:
        return drawn.randint(1, 64) * 32 * KIB
    if kind < 0.65:
        return min(largest_bytes, drawn.choice((512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB, 25 * MIB)))
    return drawn.randint(1, largest_bytes)


def _stream(drawn: random.Random) -> int:
    return drawn.choices(range(NUM_STREAMS), (4, 1, 1))[0]


# ---- recording


class _Card:
    """The real allocator, asked for bytes."""

    def __init__(self, switches: tuple[tuple[int, str], ...]) -> None:
        import torch

        from memscale._torch import private

        self._torch = torch
        self._set = private.set_allocator_settings
        self._switches = switches
        self._module: Any = torch.get_device_module("cuda")
        self.streams = [self._module.default_stream(), *(self._module.Stream() for _ in range(NUM_STREAMS - 1))]
        self.live: list[Any] = []

    def request(self, action: str, number: int, stream: int) -> Any:
        """The tensor, where one was asked for and came."""
        if action == "empty":
            self._module.empty_cache()
        elif action == "switch":
            self._set(self._switches[number][1])
        elif action == "free":
            self.live.pop(number)
        elif action == "use" and self.live[number] is not None:
            self.live[number].record_stream(self.streams[stream])
        elif action == "allocate":
            self.live.append(self._tensor(number, stream))
            return self.live[-1]
        elif action == "fill":
            self._filled = self._tensor(number, stream) if number else None
            return self._filled
        return None

    def _tensor(self, num_bytes: int, stream: int) -> Any:
        try:
            with self._module.stream(self.streams[stream]):
                return self._torch.empty(num_bytes, dtype=self._torch.uint8, device="cuda")
        except self._torch.OutOfMemoryError:
            return None

    def counters(self) -> list[int]:
        stats = self._module.memory_stats()
        return [stats[f"{name}_bytes.all.current"] for name in ("allocated", "requested", "reserved")]

    def segments(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = sorted(self._module.memory_snapshot(), key=lambda segment: segment["address"])
        return found


def record(series: Series) -> dict[str, Any]:
    """Run a series on the card of this process."""
    card = _Card(series.switches)
    capacity_bytes, total_bytes = card._module.mem_get_info()
    filled_bytes = 0 if series.room_bytes is None else (capacity_bytes - series.room_bytes) // (2 * MIB) * 2 * MIB
    steps = []
    for action, number, stream in [("fill", filled_bytes, 0), *draw(series)]:
        tensor = card.request(action, number, stream)
        steps.append([action, number, stream, None if tensor is None else tensor.data_ptr(), *card.counters()])
    return {
        **dataclasses.asdict(series),
        "capacity_bytes": capacity_bytes,
        "total_bytes": total_bytes,
        "steps": steps,
        "streams": [stream.cuda_stream for stream in card.streams],
        "segments": card.segments(),
    }


def compact(recorded: dict[str, Any]) -> dict[str, Any]:
    """The same with small numbers: addresses from the lowest on, streams by index, blocks as lists."""
    seen = [step[3] for step in recorded["steps"] if step[3] is not None]
    lowest = min([*seen, *(segment["address"] for segment in recorded["segments"])])
    streams = recorded.pop("streams")
    segments = [
        [
            segment["address"] - lowest,
            streams.index(segment["stream"]),
            segment["segment_type"],
            [_compact_block(block) for block in segment["blocks"]],
        ]
        for segment in recorded["segments"]
    ]
    moved = [None if step[3] is None else step[3] - lowest for step in recorded["steps"]]
    steps = [[*step[:3], address, *step[4:]] for step, address in zip(recorded["steps"], moved, strict=True)]
    return {**recorded, "steps": steps, "segments": segments}


def _compact_block(block: dict[str, Any]) -> list[Any]:
    # PyTorch leaves on a free block what was last asked for there, or in a part of it.
    requested_bytes = 0 if block["state"] == "inactive" else block["requested_size"]
    return [block["size"], requested_bytes, block["state"]]


# ---- the model does the same

_STATES = {"free": "inactive", "allocated": "active_allocated", "awaiting events": "active_awaiting_free"}


class Replay:
    """A recorded series on the model. `differences` is empty where both agree in everything.

    Segments lie elsewhere in the model. So each segment of the model is taken for the recorded one in which its first
    block came to lie, and from then on all its blocks must be found there.
    """

    def __init__(self, recorded: dict[str, Any]) -> None:
        self._recorded = recorded
        self.memory = CachingAllocator(
            parse_settings(recorded["conf"]), recorded["capacity_bytes"], total_bytes=recorded["total_bytes"]
        )
        self._live: list[Block | None] = []
        self._real_bases: dict[int, int] = {}

    def differences(self) -> list[str]:
        memory, found = self.memory, []
        for index, (action, number, stream, *recorded) in enumerate(self._recorded["steps"]):
            block = self._request(action, number, stream)
            address = None if block is None else self._real_address(block, recorded[0])
            shown = [address, memory.allocated_bytes, memory.requested_bytes, memory.reserved_bytes]
            if shown != recorded:
                found.append(f"request {index}, {action} {number} on {stream}: {shown}, recorded {recorded}")
        if self._recorded["segments"] != self._segments():
            found.append("the blocks at the end differ")
        return found

    def _request(self, action: str, number: int, stream: int) -> Block | None:
        """The new block, where one was asked for and came."""
        if action == "empty":
            self.memory.empty_cache()
        elif action == "switch":
            self.memory.configure(parse_settings(self._recorded["switches"][number][1]))
        elif action == "fill":
            return self._block(number, stream) if number else None
        elif action == "allocate":
            self._live.append(self._block(number, stream))
            return self._live[-1]
        else:
            block = self._live.pop(number) if action == "free" else self._live[number]
            if block is not None and action == "free":
                self.memory.free(block)
            elif block is not None:
                self.memory.record_stream(block, stream)
        return None

    def _block(self, num_bytes: int, stream: int) -> Block | None:
        try:
            return self.memory.allocate(num_bytes, stream)
        except OutOfMemoryError:
            return None

    def _real_address(self, block: Block, recorded: int | None) -> int | None:
        if recorded is None:
            return -1
        offset = block.address - block.base
        return self._real_bases.setdefault(block.base, recorded - offset) + offset

    def _segments(self) -> list[Any]:
        return sorted(self._written(segment) for segment in self.memory.segments())

    def _written(self, segment: SegmentState) -> list[Any]:
        base = max(base for base in self._real_bases if base <= segment.address)
        blocks = [[block.size_bytes, block.requested_bytes, _STATES[block.state]] for block in segment.blocks]
        address = self._real_bases[base] + segment.address - base
        return [address, segment.stream, "small" if segment.is_small else "large", blocks]


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "target", nargs="?", type=pathlib.Path, help="the file to write; without it, a summary is shown"
    )
    parser.add_argument("--only", action="append", help="the name of a series; may be given several times")
    parser.add_argument("--card", help="what to call the card in the file, e.g. that its driver is emulated")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(record(next(series for series in SERIES if series.name == options.one))))
        return
    chosen = [series for series in SERIES if options.only is None or series.name in options.only]
    recorded = [compact(_in_own_process(series)) for series in chosen]
    for each in recorded:
        differences = Replay(each).differences()
        print(
            f"{each['name']}: {len(each['steps'])} requests, {len(differences)} differences",
            *differences[:3],
            sep="\n  ",
        )
    if options.target is not None:
        options.target.write_text(as_text({"versions": _versions(options.card), "series": recorded}))


def _in_own_process(series: Series) -> dict[str, Any]:
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": series.conf}
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    command = [sys.executable, "-m", "benchmarks.allocator_series", "--one", series.name]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    recorded: dict[str, Any] = json.loads(run.stdout)
    return recorded


def _versions(card: str | None) -> dict[str, str]:
    import torch

    module: Any = torch.get_device_module("cuda")
    return {
        "torch": str(torch.version.__version__),
        "cuda": str(torch.version.cuda),
        "card": card or module.get_device_name(0),
    }


def as_text(data: dict[str, Any]) -> str:
    """A line a request and a segment: differences between recordings can be read."""
    series = []
    for each in data["series"]:
        lists = {name: ",\n".join(json.dumps(row) for row in each[name]) for name in ("steps", "segments")}
        rest = json.dumps({name: value for name, value in each.items() if name not in lists})
        series.append(f'{rest[:-1]},\n"steps": [\n{lists["steps"]}],\n"segments": [\n{lists["segments"]}]}}')
    return f'{{"versions": {json.dumps(data["versions"])},\n"series": [\n' + ",\n".join(series) + "]}\n"


if __name__ == "__main__":
    main()
