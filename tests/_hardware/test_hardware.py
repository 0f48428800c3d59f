"""What there is to spend: on a card of this name, and on this machine."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import psutil
import pytest

import simgpu  # noqa: F401  (registers the device)
from memscale import ConfigError, Hardware
from memscale._errors import shown
from memscale._hardware.detect import _architecture, _cpu_hardware

pytestmark = pytest.mark.unit
GIB = 1024**3


# ---- cards


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX 3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("rtx-3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("nvidia geforce rtx 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("Tesla V100", "V100"),
        ("A100", "A100"),
        ("A100 80GB", "A100 80GB"),
        ("a100-80gb", "A100 80GB"),
        ("GTX 1080 Ti", "GTX 1080 Ti"),
        ("gtx1080 ti", "GTX 1080 Ti"),
    ],
)
def test_cards_by_name(name: str, found: str) -> None:
    assert Hardware.from_name(name).device_name == found


@pytest.mark.parametrize(
    "name", ["RTX 3080 Ti", "RTX 3090 Ti", "3090", "RTX", "", "RTX 30900", "A1000", "RTX 3090 RTX 4090", "GTX 1080"]
)
def test_other_cards_are_refused_not_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"known are: .*RTX 3090"):
        Hardware.from_name(name)


@pytest.mark.parametrize("name", [None, 3090, b"RTX 3090", ["RTX 3090"]], ids=repr)
def test_a_card_is_named_by_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match=f"name of a card as a string, not {type(name).__name__}"):
        Hardware.from_name(name)


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        Hardware.from_name("x" * 10_000)
    assert len(str(caught.value)) < 1000


@dataclasses.dataclass
class Properties:
    """What PyTorch tells of a device, as far as the architecture is concerned."""

    gcnArchName: str
    major: int
    minor: int


@pytest.mark.parametrize(
    ("properties", "architecture"),
    [
        (Properties("NVIDIA GeForce RTX 3090", 8, 6), "sm_86"),  # the CUDA build copies the card's name there
        (Properties("NVIDIA GeForce RTX 5090", 12, 0), "sm_120"),
        (Properties("", 7, 5), "sm_75"),
        (Properties("gfx90a:sramecc+:xnack-", 9, 0), "gfx90a:sramecc+:xnack-"),
        (None, "xpu"),
    ],
)
def test_the_architecture_is_not_the_name_of_the_card(properties: Properties | None, architecture: str) -> None:
    assert _architecture(properties, "xpu") == architecture


def test_a_named_card_is_whole_and_elsewhere() -> None:
    card = Hardware.from_name("RTX 3090")
    assert card.total_bytes == 24 * GIB
    assert card.free_bytes == card.total_bytes - card.context_bytes
    assert card.device_type == "cuda"
    assert card.architecture == "sm_86"
    assert card.present is False
    assert card.supports_bf16
    assert not Hardware.from_name("T4").supports_bf16


# ---- this machine


def test_this_machine() -> None:
    hardware = Hardware.detect("cpu")
    assert hardware.device_type == "cpu"
    assert hardware.present
    assert 0 < hardware.free_bytes <= hardware.total_bytes <= psutil.virtual_memory().total
    assert hardware.disk_free_bytes is None
    assert "GB" in hardware.describe()
    assert hardware.device_name in hardware.describe()


def test_free_disk_of_a_directory_that_does_not_exist_yet(tmp_path: pathlib.Path) -> None:
    hardware = Hardware.detect("cpu", str(tmp_path / "not" / "yet" / "there"))
    assert hardware.disk_free_bytes == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.05)
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "cpu:", 1.5, [], f"cuda:{10**30}", 10**400], ids=shown)
def test_no_device_of_this_name(device: Any) -> None:
    with pytest.raises(ConfigError, match="device"):
        Hardware.detect(device)


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="not available"):
        Hardware.detect("mps")


def test_one_more_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"simgpu:2.* has 2 of that type"):
        Hardware.detect("simgpu:2")


def test_plain_data() -> None:
    hardware = _cpu_hardware(8 * GIB, 4 * GIB, None)
    assert dataclasses.replace(hardware, total_bytes=1) != hardware
    assert hardware.unified_memory is False
    resident = psutil.Process().memory_info().rss
    assert hardware.total_bytes == 8 * GIB
    assert hardware.free_bytes == pytest.approx(4 * GIB + resident, rel=0.02), "what this process holds is ours to use"
