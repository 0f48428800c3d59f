"""What there is to spend: control groups, known cards, disks, and this machine."""

from __future__ import annotations

import dataclasses
import pathlib

import psutil
import pytest

from memscale import ConfigError, Hardware
from memscale._hardware import (
    KNOWN_CARDS,
    _cgroup_limit,
    _cpu_hardware,
    find_card,
    host_memory,
)

GIB = 1024**3


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v2(root: pathlib.Path, path: str, limit: str, use: int = 0) -> None:
    write(root / path / "memory.max", f"{limit}\n")
    write(root / path / "memory.current", f"{use}\n")


def group_v1(root: pathlib.Path, path: str, limit: str, use: int = 0) -> None:
    write(root / "memory" / path / "memory.limit_in_bytes", f"{limit}\n")
    write(root / "memory" / path / "memory.usage_in_bytes", f"{use}\n")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "cgroup"


@pytest.fixture
def own(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "self"


def test_no_control_groups_at_all(root: pathlib.Path, own: pathlib.Path) -> None:
    assert _cgroup_limit(root, own) is None


def test_v2_of_a_container(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "0::/\n")
    group_v2(root, "", str(4 * GIB), GIB)
    assert _cgroup_limit(root, own) == (4 * GIB, GIB)


def test_v2_without_a_limit(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "0::/a/b\n")
    group_v2(root, "a", "max", GIB)
    group_v2(root, "a/b", "max", GIB)
    assert _cgroup_limit(root, own) is None


def test_v2_the_tightest_group_above_binds(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "0::/slice/job/step\n")
    group_v2(root, "slice", str(8 * GIB), 7 * GIB)
    group_v2(root, "slice/job", str(4 * GIB), GIB)
    group_v2(root, "slice/job/step", "max", GIB)
    assert _cgroup_limit(root, own) == (8 * GIB, 7 * GIB), "less is left there than in the smaller group below"


def test_v1_of_a_container(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "9:memory:/docker/abc\n1:name=systemd:/docker/abc\n")
    group_v1(root, "", str(2 * GIB), GIB)
    assert _cgroup_limit(root, own) == (2 * GIB, GIB)


def test_v1_of_a_batch_job(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "11:cpuset:/\n9:cpu,memory:/slurm/uid_1/job_2\n")
    group_v1(root, "", str(9223372036854771712), GIB)
    group_v1(root, "slurm/uid_1/job_2", str(3 * GIB), GIB)
    assert _cgroup_limit(root, own) == (3 * GIB, GIB)


def test_v1_without_a_limit(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "9:memory:/\n")
    group_v1(root, "", str(9223372036854771712), GIB)
    assert _cgroup_limit(root, own) is None


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/..\n", "0::\n"])
def test_odd_listings(root: pathlib.Path, own: pathlib.Path, text: str) -> None:
    write(own, text)
    group_v2(root, "", str(GIB), 5)
    assert _cgroup_limit(root, own) == (GIB, 5)


@pytest.mark.parametrize("text", ["", "many", "-1"])
def test_unreadable_limits_are_no_limits(root: pathlib.Path, own: pathlib.Path, text: str) -> None:
    write(own, "0::/\n")
    group_v2(root, "", text)
    assert _cgroup_limit(root, own) is None


def test_missing_use_counts_as_none(root: pathlib.Path, own: pathlib.Path) -> None:
    write(own, "0::/\n")
    write(root / "memory.max", str(GIB))
    assert _cgroup_limit(root, own) == (GIB, 0)


def test_host_memory_is_within_the_machine() -> None:
    total, available = host_memory()
    assert 0 < available <= total <= psutil.virtual_memory().total


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


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA H100 PCIe", "H100"), ("Tesla V100-SXM2-16GB", "V100")],
)
def test_cards_that_are_present_are_found_loosely(name: str, found: str) -> None:
    card = find_card(name, loosely=True)
    assert card is not None
    assert card.name == found


def test_a_named_card_is_whole_and_elsewhere() -> None:
    card = Hardware.from_name("RTX 3090")
    assert card.total_bytes == card.free_bytes == 24 * GIB
    assert card.device_type == "cuda"
    assert card.architecture == "sm_86"
    assert card.present is False
    assert card.supports_bf16
    assert not Hardware.from_name("T4").supports_bf16


def test_the_table_is_sane() -> None:
    assert len({card.name for card in KNOWN_CARDS}) == len(KNOWN_CARDS)
    for card in KNOWN_CARDS:
        assert find_card(card.name) is card
        assert 4 * GIB <= card.total_bytes <= 200 * GIB
        assert 1e11 < card.memory_bytes_per_s < 1e13
        assert card.fp32_flops <= card.half_flops
        assert card.link_bytes_per_s < card.memory_bytes_per_s


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


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "cpu:"])
def test_no_device_of_this_name(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        Hardware.detect(device)


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="not available"):
        Hardware.detect("mps")


def test_plain_data() -> None:
    hardware = _cpu_hardware(8 * GIB, 4 * GIB, None)
    assert dataclasses.replace(hardware, total_bytes=1) != hardware
    assert hardware.unified_memory is False
    resident = psutil.Process().memory_info().rss
    assert hardware.total_bytes == 8 * GIB
    assert hardware.free_bytes == pytest.approx(4 * GIB + resident, rel=0.02), "what this process holds is ours to use"
