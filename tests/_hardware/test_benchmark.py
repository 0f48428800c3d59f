"""Figures of this machine: measured once, remembered, and never in the way."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import simgpu
from memscale import Hardware
from memscale._hardware import benchmark
from memscale._hardware.benchmark import (
    FILE_NAME,
    Figures,
    NotMeasuredError,
    device_figures,
    disk_bytes_per_s,
)
from memscale._hardware.detect import _measured
from memscale._hardware.user_cache import cache_dir

FOUND = Figures(1e11, 2e10, 3e10, 4e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MEMSCALE_MEASURE", "1")
    monkeypatch.setattr(benchmark, "_MAX_S", 0.0)  # twice each: what comes out is of no interest here
    return tmp_path / "cache" / FILE_NAME


def remember(cache: pathlib.Path, entry: object, device_name: str = "card") -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({benchmark._key(device_name): entry}))


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("MEMSCALE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "memscale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == pathlib.Path.home() / ".cache" / "memscale"


def test_measured_once(cache: pathlib.Path) -> None:
    first = device_figures(torch.device("cpu"), "card")
    assert min(first.fp32_flops, first.half_flops, first.memory_bytes_per_s, first.launch_s) > 0
    assert first.link_bytes_per_s is None
    written = cache.read_text()
    assert device_figures(torch.device("cpu"), "card") == first
    assert cache.read_text() == written
    assert sorted(path.name for path in cache.parent.iterdir()) == [FILE_NAME, "hardware.lock"]


def test_processes_that_begin_at_once_have_the_same_figures(cache: pathlib.Path) -> None:
    code = (
        "import torch\nfrom memscale._hardware import benchmark\n"
        "benchmark._LOCK_WAIT_S = 600.0  # a busy machine measures slowly, and nobody is to give up on it here\n"
        "print(benchmark.device_figures(torch.device('cpu'), 'card'))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({run.communicate()[0] for run in runs}) == 1
    assert [run.returncode for run in runs] == [0, 0, 0]


def test_of_two_that_measured_at_once_the_first_is_kept(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: torch.device) -> benchmark.Figures:
        remember(cache, dataclasses.asdict(FOUND), "card")  # by another process, meanwhile
        return dataclasses.replace(FOUND, fp32_flops=FOUND.fp32_flops / 2)

    monkeypatch.setattr(benchmark, "_measure", measure)
    assert device_figures(torch.device("cpu"), "card") == FOUND
    assert device_figures(torch.device("cpu"), "card") == FOUND


def test_what_is_remembered_is_what_plans_rest_on(cache: pathlib.Path) -> None:
    name = Hardware.detect("cpu").device_name
    remember(cache, dataclasses.asdict(FOUND), name)
    hardware = Hardware.detect("cpu")
    assert hardware == dataclasses.replace(hardware, fp32_flops=1e11, half_flops=2e10, memory_bytes_per_s=3e10)
    assert hardware.matmul_efficiency == 1.0


def test_others_figures_are_kept(cache: pathlib.Path) -> None:
    remember(cache, dataclasses.asdict(FOUND), "another")
    device_figures(torch.device("cpu"), "card")
    assert device_figures(torch.device("cpu"), "another") == FOUND


def test_another_number_of_threads_is_another_device() -> None:
    key, threads = benchmark._key("card"), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert benchmark._key("card") != key
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "\x00"])
def test_a_broken_file_counts_as_empty(cache: pathlib.Path, content: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    found = device_figures(torch.device("cpu"), "card")
    assert device_figures(torch.device("cpu"), "card") == found


@pytest.mark.parametrize(
    "entry",
    [3, {}, {"fp32_flops": 1.0}, {**dataclasses.asdict(FOUND), "launch_s": None},
     {**dataclasses.asdict(FOUND), "fp32_flops": -1.0}, {**dataclasses.asdict(FOUND), "half_flops": "fast"}],
)  # fmt: skip
def test_an_entry_that_is_no_figures_is_measured_again(cache: pathlib.Path, entry: object) -> None:
    remember(cache, entry)
    assert device_figures(torch.device("cpu"), "card").fp32_flops > 1e6


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.DEBUG, "memscale"):
        assert device_figures(torch.device("cpu"), "card").fp32_flops > 0
    assert sum("cannot be kept" in record.message for record in caplog.records) == 1


def test_switched_off_nothing_is_measured(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_MEASURE", "0")
    assert Hardware.detect("cpu").matmul_efficiency < 1
    assert not cache.exists()


def test_a_card_that_is_not_here_is_not_measured(cache: pathlib.Path) -> None:
    assert Hardware.from_name("RTX 3090").fp32_flops == 35.6e12
    assert not cache.exists()


def test_the_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_DISK_BYTES", 1 << 20)
    directory = tmp_path / "offload"
    directory.mkdir()
    hardware = Hardware.detect("cpu", str(directory))
    assert hardware.link_bytes_per_s == disk_bytes_per_s(directory) > 0
    assert not list(directory.iterdir())


# ---- the lock and the file belong to us


def test_a_lock_that_nobody_releases_is_not_waited_for(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(benchmark, "_LOCK_WAIT_S", 0.0)
    cache.parent.mkdir()
    with cache.with_suffix(".lock").open("w") as held, caplog.at_level(logging.INFO, "memscale"):
        fcntl.flock(held, fcntl.LOCK_EX)
        found = device_figures(torch.device("cpu"), "card")
        assert device_figures(torch.device("cpu"), "card") == found, "it was kept, with or without the lock"
    assert ["without waiting" in record.message for record in caplog.records] == [True], "the second needed no lock"


def test_a_lock_that_is_released_in_time_is_waited_for(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LOCK_WAIT_S", 600.0)
    cache.parent.mkdir()
    held = cache.with_suffix(".lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def finish(seconds: float) -> None:  # the other process writes its figures while this one waits
        remember(cache, dataclasses.asdict(FOUND))
        held.close()

    monkeypatch.setattr(benchmark.time, "sleep", finish)
    assert device_figures(torch.device("cpu"), "card") == FOUND


@pytest.mark.parametrize("name", ["hardware.lock", FILE_NAME])
def test_no_file_behind_a_link_is_touched(cache: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text(json.dumps({benchmark._key("card"): dataclasses.asdict(FOUND)}))
    before = victim.read_text(), victim.stat().st_mtime_ns
    cache.parent.mkdir()
    (cache.parent / name).symlink_to(victim)
    assert device_figures(torch.device("cpu"), "card") != FOUND, "what lies there is not ours to read either"
    assert (victim.read_text(), victim.stat().st_mtime_ns) == before


def test_a_link_to_nothing_makes_no_file(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache.parent.mkdir()
    cache.with_suffix(".lock").symlink_to(tmp_path / "victim")
    device_figures(torch.device("cpu"), "card")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("name", ["hardware.lock", FILE_NAME])
def test_a_pipe_of_that_name_is_not_waited_for(cache: pathlib.Path, name: str) -> None:
    cache.parent.mkdir()
    os.mkfifo(cache.parent / name)
    assert device_figures(torch.device("cpu"), "card").fp32_flops > 0


def test_another_users_lock_is_left_as_it_is(cache: pathlib.Path) -> None:
    cache.parent.mkdir()
    cache.with_suffix(".lock").write_text("precious")
    device_figures(torch.device("cpu"), "card")
    assert cache.with_suffix(".lock").read_text() == "precious"


def test_the_files_are_the_users_alone(cache: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        device_figures(torch.device("cpu"), "card")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, cache.with_suffix(".lock"))] == [0o600, 0o600]


def test_a_file_that_is_nested_too_deeply_counts_as_empty(cache: pathlib.Path) -> None:
    cache.parent.mkdir()
    cache.write_text("[" * 100_000)
    assert device_figures(torch.device("cpu"), "card").fp32_flops > 0


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")  # what pathlib says

    for name in ("MEMSCALE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert device_figures(torch.device("cpu"), "card").fp32_flops > 0


# ---- an accelerator, which may be full

GPU = torch.device("simgpu", 0)


@pytest.fixture
def card() -> Iterator[None]:
    """An accelerator that is idle before and after."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(GPU)
    before = simgpu.get_cap()
    yield
    simgpu.set_cap(before)


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, with less to compute."""
    sizes = tuple(benchmark._Sizes(line, 64) for line in (2**18, 2**17, 2**16))
    monkeypatch.setattr(benchmark, "_ON_ACCELERATOR", sizes)


def state_of_the_card() -> tuple[int, ...]:
    accelerator = torch.accelerator
    return accelerator.memory_allocated(GPU), accelerator.memory_reserved(GPU), accelerator.max_memory_allocated(GPU)


def peaks_of_the_card() -> tuple[int, ...]:
    return torch.accelerator.max_memory_allocated(GPU), torch.accelerator.max_memory_reserved(GPU)


def leave_free(num_bytes: int) -> None:
    simgpu.set_cap(torch.accelerator.memory_reserved(GPU) + num_bytes)


def test_an_accelerator_is_measured_and_gets_everything_back(card: None, small_sizes: None) -> None:
    held, before = torch.ones(1000, device=GPU), state_of_the_card()
    found = device_figures(GPU, "card")
    assert found.link_bytes_per_s is not None
    assert found.blocking_link_bytes_per_s is not None
    assert min(found.fp32_flops, found.link_bytes_per_s, found.blocking_link_bytes_per_s) > 0
    assert state_of_the_card() == before
    assert bool((held == 1).all())


def test_an_earlier_peak_is_not_forgotten(card: None, small_sizes: None) -> None:
    torch.ones(20_000_000, device=GPU)
    before = peaks_of_the_card()
    device_figures(GPU, "card")
    assert peaks_of_the_card() == before


def test_an_earlier_peak_is_not_raised(card: None, small_sizes: None) -> None:
    torch.ones(100_000, device=GPU)
    before = peaks_of_the_card()
    with pytest.raises(NotMeasuredError, match="peak statistics"):
        device_figures(GPU, "card")
    assert peaks_of_the_card() == before


def test_little_is_taken_for_it() -> None:
    assert max(sizes.num_bytes for sizes in benchmark._ON_ACCELERATOR) < 0.3e9


def test_never_more_is_taken_than_said(card: None, small_sizes: None) -> None:
    before = torch.accelerator.memory_allocated(GPU)
    sizes = benchmark._Sizes(2**18, 512)
    benchmark._figures(GPU, sizes)
    torch.accelerator.synchronize(GPU)
    assert torch.accelerator.max_memory_allocated(GPU) - before <= sizes.num_bytes + 512


def test_what_is_measured_with_leaves_half_of_the_free_memory_alone(
    card: None, small_sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(benchmark, "_figures", lambda device, sizes: used.append(sizes) or FOUND)
    for free_bytes in (10_000_000, 3_000_000, 1_300_000):
        leave_free(free_bytes)
        benchmark._measure(GPU)
    assert [sizes.line for sizes in used] == [2**18, 2**17, 2**16]


def test_a_full_card_is_not_measured_and_not_remembered(
    card: None, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    published = Hardware.from_name("RTX 3090")
    before = state_of_the_card()
    leave_free(1_000_000)
    with caplog.at_level(logging.INFO, "memscale"):
        assert _measured(published, GPU) == published
    assert "RTX 3090 is not measured (1.0 MB of it are free" in caplog.text
    assert state_of_the_card() == before
    assert not cache.exists()


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_memory_that_runs_out_on_the_way_is_given_back(card: None, small_sizes: None, nth: int) -> None:
    before = state_of_the_card()
    with simgpu.fail_allocation(nth), pytest.raises(NotMeasuredError, match="OutOfMemoryError"):
        device_figures(GPU, "card")
    assert state_of_the_card() == before


def test_pinned_memory_that_is_refused(card: None, small_sizes: None) -> None:
    published = Hardware.from_name("RTX 3090")
    with simgpu.fail_pinned_allocation():
        assert _measured(published, GPU) == published
