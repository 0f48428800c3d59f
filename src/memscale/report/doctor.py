"""What `memscale doctor` finds: the hardware, versions, and which extras are installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from typing import Any

import memscale
from memscale._errors import install_command
from memscale._hardware import Hardware
from memscale._units import show_speed

TESTED_TORCH = "2.13.0"

EXTRA_OF = {
    "transformers": "hf",
    "accelerate": "hf",
    "peft": "hf",
    "lightning": "lightning",
    "bitsandbytes": "quantization",
    "prometheus-client": "observability",
}
"""Optional distributions, and the extra of this package that installs each."""
_INSTALL_SIMGPU = "pip install -c constraints.txt --no-build-isolation ./simgpu"


@dataclasses.dataclass(frozen=True, slots=True)
class Optional:
    """A distribution that MemScale works without."""

    name: str
    version: str | None
    """None when it is not installed."""
    install: str


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    hardware: Hardware
    versions: dict[str, str]
    optional: tuple[Optional, ...]


def examine() -> Findings:
    """Look at this machine. Optional packages are looked up, not imported."""
    versions = {
        "memscale": memscale.__version__,
        "torch": _version("torch") or "missing",
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    optional = [_optional(name, install_command(extra)) for name, extra in EXTRA_OF.items()]
    return Findings(Hardware.detect(), versions, (*optional, _optional("simgpu", _INSTALL_SIMGPU)))


def _optional(name: str, install: str) -> Optional:
    return Optional(name, _version(name), install)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lines(findings: Findings) -> list[str]:
    """The findings for people."""
    hardware = findings.hardware
    return [
        hardware.describe(),
        "",
        "hardware",
        *(
            _line(field.name, _show(field.name, getattr(hardware, field.name)))
            for field in dataclasses.fields(hardware)
        ),
        "",
        "versions",
        *(_line(name, version) for name, version in findings.versions.items()),
        _line("tested with", f"torch {TESTED_TORCH}"),
        "",
        "optional packages",
        *(_line(entry.name, entry.version or f"missing; {entry.install}") for entry in findings.optional),
    ]


def _line(name: str, value: str) -> str:
    return f"  {name:<21} {value}"


def _show(name: str, value: Any) -> str:
    """A field in its unit."""
    if value is None:
        return "none"
    if name.endswith("_bytes"):
        return f"{value / 1e9:.2f} GB"
    if name.endswith(("_s", "_flops")):
        return show_speed(name, value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
