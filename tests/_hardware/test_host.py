"""The machine around the device: control groups of either kind, and what they leave of its memory."""

from __future__ import annotations

import pathlib

import psutil
import pytest

from memscale._hardware.host import _cgroup_limit, host_memory, local_ranks

pytestmark = pytest.mark.unit
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


@pytest.mark.parametrize(("said", "expected"), [("8", 8), ("0", 1), ("many", 1), (None, 1)])
def test_ranks_of_one_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, said: str | None, expected: int
) -> None:
    if said is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert local_ranks() == expected
