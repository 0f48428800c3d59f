"""What CUDA takes beside tensors, by architecture."""

from __future__ import annotations

import pytest

from memscale import Hardware
from memscale._hardware.cards import KNOWN_CARDS
from memscale._hardware.footprints import FOOTPRINTS, footprint_of
from memscale._units import MIB

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("architecture", "workspace_bytes"),
    [
        ("sm_61", 8_519_680),
        ("sm_86", 8_519_680),
        ("sm_89", 8_519_680),
        ("sm_90", 32 * MIB),
        ("sm_120", 32 * MIB),
        ("sm_37", 8_519_680),
        ("gfx1100", 32 * MIB),
        ("gfx942", 128 * MIB),
        ("something new", 32 * MIB),
    ],
)
def test_workspaces_by_architecture(architecture: str, workspace_bytes: int) -> None:
    assert footprint_of(architecture).workspace_bytes == workspace_bytes


def test_every_figure_has_a_source() -> None:
    for row in FOOTPRINTS:
        assert row.context_source
        assert row.workspace_source
        assert 200 * MIB < row.context_bytes < 1000 * MIB


@pytest.mark.parametrize("card", KNOWN_CARDS, ids=lambda card: card.name)
def test_a_card_of_the_table_is_idle_but_for_the_context(card: object) -> None:
    hardware = Hardware.from_name(card.name)  # type: ignore[attr-defined]
    footprint = footprint_of(hardware.architecture)
    assert hardware.has_caching_allocator
    assert hardware.held_bytes == hardware.context_bytes == footprint.context_bytes
    assert hardware.workspace_bytes == footprint.workspace_bytes


def test_a_cpu_has_neither() -> None:
    hardware = Hardware.detect("cpu")
    assert not hardware.has_caching_allocator
    assert (hardware.context_bytes, hardware.workspace_bytes) == (0, 0)
