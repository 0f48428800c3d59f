"""emucuda: the CUDA build of PyTorch on an emulated card, so that what a card would hold can be read off without one.

    python -m emucuda train.py                              # on an RTX 3090
    python -m emucuda --card "RTX 3070" --lag 4 train.py

    emucuda.run(["train.py"], emucuda.Settings(card="A100"))

The dispatcher, the caching allocators, streams, the choice of attention, foreach and fused optimizers, workspaces: all
of it is PyTorch's own, unmodified. The driver and NVIDIA's libraries below it are stand-ins, which count memory and
order, and compute nothing: values are garbage. README.md says what can be believed.
"""

from typing import Any

from emucuda._build import BuildError
from emucuda._cards import Card, cards, find_card
from emucuda._control import Counters, NotOnTheCard, counters, is_active, reset_peaks, take_kernels, take_reports
from emucuda._launch import Settings, environment, run
from emucuda._pins import PINS, Pin

__version__ = "0.1.0"

__all__ = [
    "PINS",
    "BuildError",
    "Card",
    "Counters",
    "NotOnTheCard",
    "Pin",
    "Settings",
    "cards",
    "counters",
    "environment",
    "find_card",
    "is_active",
    "reset_peaks",
    "run",
    "take_kernels",
    "take_reports",
    "watch_races",
]


def __getattr__(name: str) -> Any:
    if name == "watch_races":  # needs torch, which the process that starts others does not
        from emucuda._races import watch_races

        return watch_races
    raise AttributeError(f"module 'emucuda' has no attribute {name!r}")
