"""Starts programs on the emulated card: a child process with the stand-ins loaded before anything else.

NOTE [preload]: torch's libraries find NVIDIA's through DT_RPATH, which wins over LD_LIBRARY_PATH; a library that is
already loaded under the same SONAME wins over both. So the stand-ins are named in LD_PRELOAD, of the child only:
nothing in the environment is replaced, and other programs see the real libraries.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emucuda._build import libraries
from emucuda._cards import find_card

_INSIDE = Path(__file__).with_name("_inside.py")
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the card behaves. Every field is also an option of `python -m emucuda`."""

    card: str = "RTX 3090"
    """A name in `emucuda.cards()`."""
    total_bytes: int | None = None
    """The card's memory, if it is not to be that of the card of this name."""
    context_bytes: int = 256 * _MIB
    """What the context, and others that use the card, hold of its memory. PyTorch can never have it."""
    copy_limit_bytes: int | None = None
    """Copies of more bytes are counted and not made: faster, where nobody looks at the values."""
    lag: int = 0
    """How many pieces of work a stream may be behind the host. Events are not ready before. 0: no wait is seen."""
    races: bool = False
    """Compare the memory of all copies, and of what `emucuda.watch_races()` reports, with the order of events.

    Set a large `lag` with it (100000): without one every `event.query()` says that the work is over, the host then
    knows it, and a wait that was left out after such a question is not seen."""
    kernels: bool = False
    """Count launches by the kernels' names."""
    log: int = 0
    """1: the first launch of every kernel (with `kernels`); 2: every allocation, on stderr."""
    pins: bool = True
    """Answer for host code that would decide by values of the device. The list is `emucuda.PINS`."""

    def __post_init__(self) -> None:
        card = find_card(self.card)
        total_bytes = card.total_bytes if self.total_bytes is None else self.total_bytes
        if not 0 <= self.context_bytes < total_bytes:
            raise ValueError(
                f"context_bytes is {self.context_bytes:,}, which is not less than the card's {total_bytes:,} bytes. "
                "Set a smaller context_bytes or a larger total_bytes."
            )
        if self.lag < 0 or self.log < 0:
            raise ValueError(f"lag and log are counts and cannot be negative; they are {self.lag} and {self.log}.")

    def variables(self) -> dict[str, str]:
        """The settings as the C++ side reads them."""
        card = find_card(self.card)
        if self.total_bytes is not None:
            card = dataclasses.replace(card, total_bytes=self.total_bytes)
        variables = {
            "EMUCUDA_CARD": card.described(),
            "EMUCUDA_CONTEXT_BYTES": str(self.context_bytes),
            "EMUCUDA_LAG": str(self.lag),
            "EMUCUDA_RACES": str(int(self.races)),
            "EMUCUDA_KERNELS": str(int(self.kernels)),
            "EMUCUDA_LOG": str(self.log),
            "EMUCUDA_PINS": str(int(self.pins)),
        }
        if self.copy_limit_bytes is not None:
            variables["EMUCUDA_COPY_LIMIT_BYTES"] = str(self.copy_limit_bytes)
        return variables


def environment(settings: Settings | None = None, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process on the card: `base` (this process's own) with the stand-ins loaded first."""
    base = os.environ if base is None else base
    stand_ins = libraries()
    preloaded = [str(path) for path in stand_ins]
    if already := base.get("LD_PRELOAD"):
        preloaded.append(already)
    package = str(Path(__file__).parent.parent)
    paths = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path and path != package]
    return {
        "TRITON_LIBCUDA_PATH": str(stand_ins[0].parent),  # otherwise Triton asks the linker's cache for a driver
        **base,
        **(settings or Settings()).variables(),
        "LD_PRELOAD": ":".join(preloaded),
        "PYTHONPATH": os.pathsep.join([*paths, package]),
    }


def command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs `arguments` (`program.py ...`, `-m module ...` or `-c code ...`) with the pins."""
    if not arguments:
        raise ValueError("There is nothing to run. Name a program: program.py, -m module, or -c code.")
    return [sys.executable, str(_INSIDE), *arguments]


def run(
    arguments: Sequence[str],
    settings: Settings | None = None,
    *,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Run a Python program on the card and wait for it.

        emucuda.run(["train.py", "--steps", "3"], emucuda.Settings(card="RTX 3070"), check=True)

    Arguments:
        arguments: What would follow `python`: `program.py ...`, `-m module ...` or `-c code ...`.
        settings: The card; an RTX 3090 if None.
        env: The environment to start from; this process's own if None.
        options: Handed to `subprocess.run`.

    Raises:
        BuildError: The stand-ins could not be built.
    """
    return subprocess.run(command(arguments), env=environment(settings, env), **options)
