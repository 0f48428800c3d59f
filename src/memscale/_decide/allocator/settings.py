"""How PyTorch's caching allocator is configured: `AllocatorSettings`, and reading them from `PYTORCH_ALLOC_CONF`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memscale._errors import ConfigError
from memscale._units import MIB

NUM_DIVISIONS = 16
"""Sizes from 1 MiB to 64 GiB, each twice the one before, have their own number of divisions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_ALLOC_CONF` sets and the model follows; the defaults are PyTorch's."""

    expandable_segments: bool = False
    """One segment a stream and pool, which grows page by page."""
    max_split_bytes: int | None = None
    """Blocks from this size on are not split, and kept for requests of about their size."""
    max_non_split_rounding_bytes: int | None = None
    """How much larger than such a request its block may be; None: the size of a large segment."""
    large_segment_bytes: int = 20 * MIB
    """The segments that requests under 10 MiB share, and the pages of expandable segments."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_DIVISIONS
    """The number of steps of each doubling from 1 MiB on, to which requests are rounded up; 0: they are not."""
    garbage_collection_threshold: float = 0.0
    """From this share of the allowed bytes on, old unused segments are given back; 0: never."""
    memory_fraction: float | None = None
    """The share of the card that may be reserved, as by `set_per_process_memory_fraction`; None: no limit is set."""

    def __post_init__(self) -> None:
        if len(self.roundup_power2_divisions) != NUM_DIVISIONS:
            raise ConfigError(
                f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} entries; "
                f"give {NUM_DIVISIONS}, one for each doubling from 1 MiB to 64 GiB"
            )
        for divisions in self.roundup_power2_divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise ConfigError(f"roundup_power2_divisions={divisions} is neither a power of two nor 0")
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise ConfigError(
                f"max_split_size_mb is {self.max_split_bytes // MIB}; "
                f"it must be at least {self.large_segment_bytes // MIB}, the size of a large segment"
            )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ConfigError(f"garbage_collection_threshold={self.garbage_collection_threshold} is outside 0 to 1")


_SIZES_IN_MIB = {
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "large_segment_size_mb": "large_segment_bytes",
}
_SHARES = {
    "garbage_collection_threshold": "garbage_collection_threshold",
    "per_process_memory_fraction": "memory_fraction",
}
_WITHOUT_EFFECT = ("pinned_", "release_lock_on_", "throw_on_", "graph_capture_")
"""Options about the host's memory, about locks, about errors and about CUDA graphs."""


def parse_settings(text: str) -> AllocatorSettings:
    """Settings from a string as in the environment variable `PYTORCH_ALLOC_CONF`.

        parse_settings("max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]")

    Options that change nothing in the model (those of pinned memory) are passed over. Raises `ConfigError` for what
    PyTorch would refuse and for `backend:cudaMallocAsync`, which is another allocator.
    """
    found: dict[str, object] = {}
    for option in _options_of(text):
        name, _, value = option.partition(":")
        if name.startswith(_WITHOUT_EFFECT) or option == "backend:native":
            continue
        try:
            found.update(_parsed(name, value))
        except ValueError as error:
            raise ConfigError(f"the allocator option {option!r} cannot be read: {error}") from error
    return AllocatorSettings(**found)  # type: ignore[arg-type]


def _options_of(text: str) -> Iterator[str]:
    """The parts between commas, but not between those inside brackets."""
    depth, option = 0, ""
    for letter in "".join(text.split()) + ",":
        depth += (letter == "[") - (letter == "]")
        if letter != "," or depth > 0:
            option += letter
        else:
            if option:
                yield option
            option = ""
    if option:
        raise ConfigError(f"the allocator option {option.rstrip(',')!r} has a bracket that is not closed")


def _parsed(name: str, value: str) -> dict[str, object]:
    if name in _SIZES_IN_MIB:
        return {_SIZES_IN_MIB[name]: int(value) * MIB}
    if name in _SHARES:
        return {_SHARES[name]: float(value)}
    if name == "expandable_segments" and value in ("True", "False"):
        return {name: value == "True"}
    if name == "roundup_power2_divisions":
        return {name: _divisions(value)}
    known = ", ".join((*_SIZES_IN_MIB, *_SHARES, "expandable_segments:True or :False", "roundup_power2_divisions"))
    raise ValueError(f"the model knows {known}")


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all sizes, or a list such as [64:8,256:4,>:1] of sizes in MiB and their divisions."""
    if not value.startswith("["):
        return (int(value),) * NUM_DIVISIONS
    divisions = [0] * NUM_DIVISIONS
    filled = 0
    for entry in value.strip("[]").split(","):
        size, _, number = entry.partition(":")
        if size == ">":
            divisions[filled:] = [int(number)] * (NUM_DIVISIONS - filled)
            continue
        index = min(int(size).bit_length() - 1, NUM_DIVISIONS - 1)
        if index < 0 or int(size) & (int(size) - 1):
            raise ValueError(f"{size} MiB is not a power of two")
        # What is below the first size in the list is divided as that is.
        divisions[0 if filled == 0 else index : index + 1] = [int(number)] * (index + 1 if filled == 0 else 1)
        filled = index + 1
    return tuple(divisions)
