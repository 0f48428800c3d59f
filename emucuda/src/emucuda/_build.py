"""Builds the stand-ins with g++, in seconds, into a cache that only the user can write; later runs find them there.

The cache key holds our sources, the real libraries' sizes and the compiler, so a change of any of them builds anew. The
directory is `EMUCUDA_CACHE_DIR`, else `XDG_CACHE_HOME`/emucuda, else `~/.cache/emucuda`.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emucuda import _stubs
from emucuda._libraries import LIBRARIES, Library, Parameters

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O1", "-fPIC", "-std=c++17", "-Wall", "-Wextra")
_GENERATED = ("-Wno-unused-parameter", "-fno-builtin")


class BuildError(RuntimeError):
    """The stand-ins could not be built; the message says what is missing."""


def libraries() -> list[Path]:
    """The stand-ins, built if need be, in the order in which they must be loaded."""
    root = _private(_cache_root())
    directory = root / _key()
    made = [directory / library.soname for library in LIBRARIES]
    if not directory.exists():
        with _exclusive(root / "build.lock"):
            if not directory.exists():
                _build(directory)
    return made


def _cache_root() -> Path:
    if own := os.environ.get("EMUCUDA_CACHE_DIR"):
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "emucuda"


def _private(directory: Path) -> Path:
    """The directory, made if need be. Libraries that others could replace are never loaded."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"emucuda loads libraries from {directory}, which others than you can write. "
            f"Run `chmod 700 {directory}`, or name another directory in EMUCUDA_CACHE_DIR."
        )
    return directory


def _site() -> tuple[Path, Path]:
    """The `nvidia` package, which the CUDA build of torch brings, and the directory of CUDA headers within triton."""
    found = [importlib.util.find_spec(name) for name in ("nvidia", "triton")]
    places = [Path(next(iter(spec.submodule_search_locations or ()))) for spec in found if spec is not None]
    if len(places) < 2 or not (places[0] / "cu13").is_dir():
        raise BuildError(
            "emucuda needs the CUDA 13 build of torch in this environment, with the NVIDIA libraries that pip installs "
            "with it. Install it into an environment of its own: pip install 'torch===2.13.0'."
        )
    return places[0], places[1] / "backends" / "nvidia" / "include"


def _includes() -> list[str]:
    nvidia, triton = _site()
    return [f"-I{nvidia}/cu13/include", f"-I{nvidia}/cudnn/include", "-idirafter", str(triton)]


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise BuildError(
            f"emucuda needs the compiler '{name}', which is not on the PATH. "
            "Install it (Debian: apt-get install g++) or name another one in CXX."
        )
    return os.path.realpath(found)


def _key() -> str:
    digest = hashlib.sha256()
    recipe = [Path(__file__).with_name(name) for name in ("_build.py", "_libraries.py", "_stubs.py")]
    for path in [*sorted(_SOURCES.iterdir()), *recipe]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    nvidia, _ = _site()
    real = [nvidia / library.real for library in LIBRARIES if library.real]
    compiler = Path(_compiler())
    for path in (*real, compiler):
        digest.update(f"{path}:{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One builder at a time; the operating system drops the lock of a process that dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(directory: Path) -> None:
    started = time.monotonic()
    print("emucuda: building the stand-ins for the CUDA libraries ...", file=sys.stderr, flush=True)
    work = directory.with_name(f"{directory.name}.work")
    shutil.rmtree(work, ignore_errors=True)  # what a killed build left
    work.mkdir(mode=0o700)
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(lambda library: _objects(library, work), LIBRARIES))
        driver, *others = LIBRARIES
        _link(driver, objects[0], work)
        list(pool.map(lambda pair: _link(pair[0], pair[1], work), zip(others, objects[1:], strict=True)))
    os.replace(work, directory)  # atomic: nobody ever sees half of them
    print(f"emucuda: built in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _objects(library: Library, work: Path) -> list[Path]:
    made = []
    for name in library.sources:
        made.append(work / f"{name}.o")
        _run([*_FLAGS, *_includes(), "-Wno-unused-parameter", "-c", str(_SOURCES / name), "-o", str(made[-1])])
    generated = work / f"{library.soname}.stubs.cpp"
    generated.write_text(_stub_source(library, made))
    made.append(generated.with_suffix(".o"))
    _run([*_FLAGS, *_GENERATED, f"-I{_SOURCES}", "-c", str(generated), "-o", str(made[-1])])
    return made


def _stub_source(library: Library, objects: list[Path]) -> str:
    nvidia, _ = _site()
    known: dict[str, Parameters] = {}
    if library.real is not None:
        theirs = _stubs.exported(nvidia / library.real)
        for header in library.headers:
            known |= _stubs.declarations((nvidia / header).read_text(errors="replace"))
    elif library.headers:
        theirs = _stubs.driver_functions(_run([*_includes(), "-E", "-x", "c++", f"{nvidia}/cu13/include/cuda.h"]))
    else:
        theirs = set()
    return _stubs.source(library, theirs - _stubs.defined(objects), known)


def _link(library: Library, objects: list[Path], work: Path) -> None:
    options = ["-shared", f"-Wl,-soname,{library.soname}", "-o", str(work / library.soname), *map(str, objects), "-ldl"]
    if library.real is not None:
        script = work / f"{library.soname}.map"
        script.write_text(_stubs.version_script(library.soname))
        options.append(f"-Wl,--version-script={script}")
    if library is not LIBRARIES[0]:
        options += [f"-L{work}", f"-l:{LIBRARIES[0].soname}", "-Wl,-rpath,$ORIGIN"]
    _run(options)


def _run(arguments: list[str]) -> str:
    done = subprocess.run([_compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"emucuda: {' '.join(arguments[-3:])} did not build.\n{done.stderr[-4000:]}")
    return done.stdout
