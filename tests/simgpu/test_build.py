"""Building on first import: cached, safe with several builders, and clear about what is missing."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from simgpu import _build


def library(directory: Path) -> Path:
    return next(directory.glob("*/simgpu_native.so"))


def import_simgpu(**environment: str) -> subprocess.CompletedProcess[str]:
    code = "import torch, simgpu; print((torch.ones(2, device='simgpu') + 1).tolist())"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=1500,
    )


def test_the_key_covers_sources_torch_and_compiler(monkeypatch):
    before = _build._key()
    assert before == _build._key()
    monkeypatch.setattr(_build.torch, "__version__", "9.9.9")
    assert _build._key() != before
    monkeypatch.undo()
    monkeypatch.setattr(_build, "_compiler_identity", lambda: "another compiler")
    assert _build._key() != before
    monkeypatch.undo()
    monkeypatch.setattr(_build, "_SOURCES", Path(__file__).parent)
    assert _build._key() != before


def test_the_cache_directory_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("SIMGPU_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    assert _build._cache_root() == tmp_path / "own"
    monkeypatch.delenv("SIMGPU_CACHE_DIR")
    assert _build._cache_root() == tmp_path / "extensions" / "simgpu"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert _build._cache_root() == Path.home() / ".cache" / "simgpu"


@pytest.mark.parametrize("where", ["", "84d488e0602cfc0d5e7c9b82"])
def test_a_library_that_others_could_replace_is_never_loaded(monkeypatch, tmp_path, where):
    shared = tmp_path / where
    shared.mkdir(exist_ok=True)
    shared.chmod(0o777)
    monkeypatch.setenv("SIMGPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_build, "_key", lambda: "84d488e0602cfc0d5e7c9b82")
    with pytest.raises(_build.BuildError, match=f"others than you can write. Run `chmod 700 {shared}`"):
        _build.load_native()


def test_directories_that_are_made_are_private(monkeypatch, tmp_path):
    monkeypatch.setenv("SIMGPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_build, "_build", lambda directory, library: directory)
    made = _build.load_native()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent)] == [0o700, 0o700]


def test_a_missing_compiler_is_named(tmp_path):
    answer = import_simgpu(SIMGPU_CACHE_DIR=str(tmp_path), CXX="no-such-compiler")
    assert answer.returncode != 0
    assert "needs the compiler 'no-such-compiler', which is not on the PATH" in answer.stderr


def test_missing_ninja_is_named(monkeypatch, tmp_path):
    for tool in ("g++", "gcc"):
        script = tmp_path / tool
        script.write_text("#!/bin/sh\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(_build.BuildError, match="needs ninja, which is not on the PATH"):
        _build._require_tools()


def test_a_failing_build_raises_and_leaves_no_library(monkeypatch, tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "broken.cpp").write_text("this is not C++")
    monkeypatch.setattr(_build, "_SOURCES", sources)
    monkeypatch.setenv("SIMGPU_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(_build.BuildError, match="did not build"):
        _build.load_native()
    assert not list((tmp_path / "cache").glob("*/*.so"))


def test_two_builders_take_turns(tmp_path):
    order = []

    def build(name):
        with _build._exclusive(tmp_path / "lock"):
            order.append((name, "in"))
            time.sleep(0.2)
            order.append((name, "out"))

    threads = [threading.Thread(target=build, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [step for _, step in order] == ["in", "out", "in", "out"]


def test_progress_is_told_when_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(_build, "_QUIET_SECONDS", 0.05)
    told = ""
    with _build._progress():
        deadline = time.monotonic() + 60  # only a test that fails waits to the end
        while "building the C++ runtime" not in told and time.monotonic() < deadline:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert "building the C++ runtime" in told
    assert "built in" in capsys.readouterr().err
    monkeypatch.setattr(_build, "_QUIET_SECONDS", 30.0)
    with _build._progress():
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_two_processes_at_once_build_it_once(tmp_path):
    """How long it takes is said by `python -m simgpu.benchmarks build`."""
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(import_simgpu(SIMGPU_CACHE_DIR=str(tmp_path), MAX_JOBS="2")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.stdout.strip() for answer in answers] == ["[2.0, 2.0]"] * 2, answers
    assert sum("building" in answer.stderr for answer in answers) == 1  # only one of them built
    assert library(tmp_path).exists()
