"""Which versions of other packages MemScale is known to work with, and a warning, once, where another one is in use.

    warn_of_versions()      # torch 2.20.0 is newer than what MemScale is known to work with ...

A version below the range is known not to suffice; one above it may well work, and nobody has tried. PyTorch and the
libraries whose internals matter here change with minor versions, so a range ends with the newest minor version that was
tried; elsewhere with the newest major one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
import warnings

from memscale._errors import install_command


@dataclasses.dataclass(frozen=True, slots=True)
class KnownVersions:
    """The versions of a package that are known to work."""

    oldest: str
    newest: str
    """Compared by as many numbers as it has: "5" ends with 5.x, "2.15" with 2.15.x."""
    extra: str | None = None
    """The extra of this package that installs it; None: it is always there."""

    def verdict(self, version: str) -> str:
        """What is to be said about a version: "older", "newer", or nothing."""
        if _numbers(version) < _numbers(self.oldest):
            return "older"
        newest = _numbers(self.newest)
        return "newer" if _numbers(version)[: len(newest)] > newest else ""


TESTED = {
    "torch": KnownVersions("2.13", "2.15"),
    "transformers": KnownVersions("4.57", "5", "hf"),
    "accelerate": KnownVersions("1.1", "1", "hf"),
    "peft": KnownVersions("0.15", "0", "hf"),
    "lightning": KnownVersions("2.4", "2", "lightning"),
    "bitsandbytes": KnownVersions("0.46", "0", "quantization"),
    "trl": KnownVersions("1.0", "1", "libraries"),
    "diffusers": KnownVersions("0.36", "0", "libraries"),
    "torchao": KnownVersions("0.14", "0", "torchao"),
    "prometheus-client": KnownVersions("0.20", "0", "observability"),
}
"""The lower ends are those of pyproject.toml, whose newest pinned versions (constraints.txt) lie inside."""

_told: set[str] = set()


def warn_of_versions() -> None:
    """Say once for each package that this process has loaded if its version was not tried."""
    for name, tested in TESTED.items():
        if name in _told or name.replace("-", "_") not in sys.modules:
            continue
        _told.add(name)
        version = version_of(name)
        verdict = tested.verdict(version) if version else ""
        if verdict:
            warnings.warn(
                f"{name} {version} is {verdict} than what MemScale is known to work with ({name} {tested.oldest} to "
                f"{tested.newest}.x). Compare a few steps with an unwrapped copy before you rely on it: "
                f"`memscale verify`. {_remedy(name, tested)}",
                stacklevel=4,
            )


def version_of(name: str) -> str | None:
    """The installed version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _remedy(name: str, tested: KnownVersions) -> str:
    if tested.extra is None:
        return f'A version that is: pip install "{name}>={tested.oldest},<={tested.newest}.99".'
    return f"A version that is: {install_command(tested.extra)}"


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: (2, 13, 0) of "2.13.0+cpu" and of "2.13.0a0+git"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
