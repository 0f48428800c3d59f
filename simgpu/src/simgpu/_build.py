"""Builds the C++ runtime on first import, and loads it from a cache ever after.

The cache key holds the sources, the torch version and the compiler, so a change of any of them builds anew. The
directory is `SIMGPU_CACHE_DIR`, else `TORCH_EXTENSIONS_DIR`/simgpu, else `~/.cache/simgpu`; one that other users can
write is refused.
"""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

_NAME = "simgpu_native"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O2", "-std=c++20", "-Wno-interference-size", "-fvisibility=hidden"]
_QUIET_SECONDS = 3.0


class BuildError(ImportError):
    """The C++ runtime could not be built; the message says what is missing."""


def load_native() -> ModuleType:
    """The compiled runtime; builds it if this machine has not done so yet."""
    directory = _private(_private(_cache_root()) / _key())
    library = directory / f"{_NAME}.so"
    if not library.exists():
        with _exclusive(directory / "build.lock"):
            if not library.exists():
                return _build(directory, library)
    return _import(library)


def _cache_root() -> Path:
    if own := os.environ.get("SIMGPU_CACHE_DIR"):
        return Path(own)
    if extensions := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions) / "simgpu"
    return Path.home() / ".cache" / "simgpu"


def _private(directory: Path) -> Path:
    """The directory, made if need be. A library that others could replace is never loaded."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"simgpu loads its C++ runtime from {directory}, which others than you can write. "
            f"Run `chmod 700 {directory}`, or name another directory in SIMGPU_CACHE_DIR."
        )
    return directory


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    python_abi = importlib.machinery.EXTENSION_SUFFIXES[0]
    for part in (torch.__version__, python_abi, _compiler_identity(), *_FLAGS):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _compiler_identity() -> str:
    """Path, size and time of the compiler: cheaper than asking it for its version on every import."""
    found = shutil.which(_compiler())
    if found is None:
        return "no compiler"  # a cached build made elsewhere cannot match; _require_tools explains
    status = os.stat(os.path.realpath(found))
    return f"{os.path.realpath(found)}:{status.st_size}:{int(status.st_mtime)}"


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One builder at a time; the operating system drops the lock of a process that dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(directory: Path, library: Path) -> ModuleType:
    with _tools_on_path(), _progress():
        _require_tools()
        work = directory / "work"
        shutil.rmtree(work, ignore_errors=True)  # what a killed build left, its lock file included
        work.mkdir()
        module = _compile_and_load(work)
        os.replace(work / f"{_NAME}.so", library)  # atomic: nobody ever sees half a library
        shutil.rmtree(work)
    return module


def _compile_and_load(work: Path) -> ModuleType:
    from torch.utils import cpp_extension

    sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
    try:
        module: ModuleType = cpp_extension.load(
            name=_NAME,
            sources=sources,
            build_directory=str(work),
            extra_cflags=_FLAGS,
            verbose=bool(os.environ.get("SIMGPU_VERBOSE")),
        )
        return module
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise BuildError(f"simgpu: the C++ runtime did not build. Set SIMGPU_VERBOSE=1 to see why.\n{error}") from error


def _require_tools() -> None:
    if shutil.which(_compiler()) is None:
        raise BuildError(
            f"simgpu builds its C++ runtime on first import and needs the compiler '{_compiler()}', which is not on "
            "the PATH. Install it (Debian: apt-get install g++) or name another one in CXX."
        )
    if shutil.which("ninja") is None:
        raise BuildError(
            "simgpu builds its C++ runtime on first import and needs ninja, which is not on the PATH. "
            "Install it: pip install ninja."
        )


@contextlib.contextmanager
def _tools_on_path() -> Iterator[None]:
    """pip puts ninja beside the interpreter, which need not be on the PATH; two jobs unless told otherwise."""
    before = {name: os.environ.get(name) for name in ("PATH", "MAX_JOBS")}
    os.environ["PATH"] = os.environ.get("PATH", "") + os.pathsep + str(Path(sys.executable).parent)
    os.environ.setdefault("MAX_JOBS", "2")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    def say() -> None:
        print("simgpu: building the C++ runtime (once, a minute or two) ...", file=sys.stderr, flush=True)

    started = time.monotonic()
    timer = threading.Timer(_QUIET_SECONDS, say)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if (seconds := time.monotonic() - started) > _QUIET_SECONDS:
        print(f"simgpu: built in {seconds:.0f} s", file=sys.stderr, flush=True)


def _import(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
