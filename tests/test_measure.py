"""Figures of this machine: measured once, remembered, and never in the way."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import subprocess
import sys

import pytest
import torch

from memscale import Hardware, _measure
from memscale._measure import FILE_NAME, Figures, cache_dir, device_figures, disk_bytes_per_s

FOUND = Figures(1e11, 2e10, 3e10, 4e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MEMSCALE_MEASURE", "1")
    monkeypatch.setattr(_measure, "_MAX_S", 0.0)  # twice each: what comes out is of no interest here
    return tmp_path / "cache" / FILE_NAME


def remember(cache: pathlib.Path, entry: object, device_name: str = "card") -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({_measure._key(device_name): entry}))


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
        "import torch\nfrom memscale._measure import device_figures\nprint(device_figures(torch.device('cpu'), 'card'))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({run.communicate()[0] for run in runs}) == 1
    assert [run.returncode for run in runs] == [0, 0, 0]


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
    key, threads = _measure._key("card"), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert _measure._key("card") != key
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
    monkeypatch.setattr(_measure, "_DISK_BYTES", 1 << 20)
    directory = tmp_path / "offload"
    directory.mkdir()
    hardware = Hardware.detect("cpu", str(directory))
    assert hardware.link_bytes_per_s == disk_bytes_per_s(directory) > 0
    assert not list(directory.iterdir())
