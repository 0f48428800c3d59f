"""Known cards, as data: what their vendors publish, and how a card is found by its name.

    find_card("rtx 3090")                                   # the card of this name, or None: nothing is guessed
    find_card("NVIDIA A100-SXM4-80GB", loosely=True)        # for a card that is present

Add a card by adding a row to `KNOWN_CARDS`.
"""

from __future__ import annotations

import dataclasses
import re

GIB = 1024**3


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """A known GPU: the vendor's published figures for dense math."""

    name: str
    total_bytes: int
    memory_bytes_per_s: float
    fp32_flops: float
    half_flops: float
    """Dense 16-bit tensor-core throughput with 32-bit accumulation."""
    link_bytes_per_s: float
    """Host link, one direction, what a pinned copy reaches of the nominal rate (about 80 %)."""
    architecture: str
    num_multiprocessors: int
    bf16: bool = True


def _card(
    name: str,
    gib: float,
    gb_per_s: float,
    tflops: float,
    half: float,
    link: float,
    arch: str,
    multiprocessors: int,
    bf16: bool = True,
) -> Card:
    speeds = gb_per_s * 1e9, tflops * 1e12, half * 1e12, link * 1e9
    return Card(name, int(gib * GIB), *speeds, arch, multiprocessors, bf16)


KNOWN_CARDS: tuple[Card, ...] = (
    _card("GTX 1080 Ti", 11, 484, 11.3, 11.3, 12, "sm_61", 28, bf16=False),
    _card("RTX 2060", 6, 336, 6.5, 25.8, 12, "sm_75", 30, bf16=False),
    _card("RTX 2080 Ti", 11, 616, 13.4, 53.8, 12, "sm_75", 68, bf16=False),
    _card("RTX 3060", 12, 360, 12.7, 25.5, 24, "sm_86", 28),
    _card("RTX 3070", 8, 448, 20.3, 40.6, 24, "sm_86", 46),
    _card("RTX 3080", 10, 760, 29.8, 59.5, 24, "sm_86", 68),
    _card("RTX 3090", 24, 936, 35.6, 71.0, 24, "sm_86", 82),
    _card("RTX 4060", 8, 272, 15.1, 30.2, 12, "sm_89", 24),
    _card("RTX 4070", 12, 504, 29.1, 58.3, 24, "sm_89", 46),
    _card("RTX 4070 Ti SUPER", 16, 672, 44.1, 88.2, 24, "sm_89", 66),
    _card("RTX 4080", 16, 717, 48.7, 97.5, 24, "sm_89", 76),
    _card("RTX 4090", 24, 1008, 82.6, 165.2, 24, "sm_89", 128),
    _card("RTX 5080", 16, 960, 56.3, 112.6, 48, "sm_120", 84),
    _card("RTX 5090", 32, 1792, 104.8, 209.5, 48, "sm_120", 170),
    _card("RTX A4000", 16, 448, 19.2, 76.7, 24, "sm_86", 48),
    _card("RTX A6000", 48, 768, 38.7, 154.8, 24, "sm_86", 84),
    _card("T4", 16, 320, 8.1, 65.0, 12, "sm_75", 40, bf16=False),
    _card("V100", 16, 900, 15.7, 125.0, 12, "sm_70", 80, bf16=False),
    _card("L4", 24, 300, 30.3, 121.0, 24, "sm_89", 58),
    _card("L40S", 48, 864, 91.6, 362.0, 24, "sm_89", 142),
    _card("A10G", 24, 600, 31.2, 125.0, 24, "sm_86", 80),
    _card("A100", 40, 1555, 19.5, 312.0, 24, "sm_80", 108),
    _card("A100 80GB", 80, 2039, 19.5, 312.0, 24, "sm_80", 108),
    _card("H100", 80, 3350, 66.9, 989.0, 48, "sm_90", 132),
)


def find_card(name: str, *, loosely: bool = False) -> Card | None:
    """The table's card of this name: `"rtx 3090"`, `"NVIDIA GeForce RTX 3090"`.

    Loosely, a card whose words are all in the name will do ("NVIDIA A100-SXM4-80GB"): good enough for the
    throughput of a card that is present, whose memory was read from the card itself.
    """
    wanted = _words(name)
    if loosely:
        matches = [card for card in KNOWN_CARDS if _words(card.name) <= wanted]
    else:
        joined = "".join(sorted(wanted))
        matches = [card for card in KNOWN_CARDS if "".join(sorted(_words(card.name))) == joined]
    return max(matches, key=lambda card: len(card.name), default=None)


def _words(name: str) -> set[str]:
    """ "RTX3090" and "NVIDIA GeForce RTX 3090" both mean {"rtx", "3090"}."""
    spaced = re.sub(r"(?<=[a-z]{2})(?=\d)", " ", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return set(spaced.split()) - {"nvidia", "geforce", "tesla", "gpu"}
