"""What `memscale doctor` finds: the hardware, versions, and which extras are installed."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import memscale
from memscale._errors import install_command
from memscale._hardware import Hardware
from memscale._hardware.allocator_environment import growing_segments, own_settings
from memscale._hardware.footprints import footprint_of
from memscale._units import show_bytes, show_speed
from memscale.report.versions import TESTED, version_of

EXTRA_OF = {name: tested.extra for name, tested in TESTED.items() if tested.extra is not None} | {"plotly": "report"}
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
        "torch": version_of("torch") or "missing",
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    optional = [_optional(name, install_command(extra)) for name, extra in EXTRA_OF.items()]
    return Findings(Hardware.detect(), versions, (*optional, _optional("simgpu", _INSTALL_SIMGPU)))


def _optional(name: str, install: str) -> Optional:
    return Optional(name, version_of(name), install)


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
        *_card_lines(hardware),
        "",
        "versions",
        *(_line(name, version) for name, version in findings.versions.items()),
        _line("known to work with", f"torch {TESTED['torch'].oldest} to {TESTED['torch'].newest}"),
        "",
        "optional packages",
        *(_line(entry.name, entry.version or f"missing; {entry.install}") for entry in findings.optional),
    ]


def _card_lines(hardware: Hardware) -> list[str]:
    """What counts on a card beside tensors, where each figure is from, and how PyTorch's allocator is set."""
    if not hardware.has_caching_allocator:
        return []
    footprint = footprint_of(hardware.architecture)
    return [
        "",
        "beside tensors on the card",
        _line("context and others", f"{show_bytes(hardware.held_bytes)}, measured here"),
        _line(
            "context",
            f"{show_bytes(footprint.context_bytes)} for {hardware.architecture} by {footprint.context_source}",
        ),
        _line("workspaces", f"2 of {show_bytes(footprint.workspace_bytes)}, by {footprint.workspace_source}"),
        _line("allocator settings", own_settings() or "none; PYTORCH_ALLOC_CONF would set some"),
        _line("growing segments", growing_segments()),
    ]


def _line(name: str, value: str) -> str:
    return f"  {name:<21} {value}"


def _show(name: str, value: Any) -> str:
    """A field in its unit."""
    if value is None:
        return "none"
    if name.endswith("_bytes"):
        return show_bytes(value)
    if name.endswith(("_s", "_flops")):
        return show_speed(name, value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
