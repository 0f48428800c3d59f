"""The end of a process: a thread of PyTorch that is late does not abort it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import textwrap

import pytest

from memscale._execute import orderly_exit

LATE_THREAD = r"""
#include <Python.h>
#include <pthread.h>
#include <thread>
#include <time.h>

#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

// A thread that is runnable for a while, until the interpreter stops at the latest, and then wants its lock inside what
// may not throw, as the destructor of a collective does.
static void need_the_lock() noexcept {
  PyGILState_Release(PyGILState_Ensure());
}

static void run(const char* name, double seconds) {
  pthread_setname_np(pthread_self(), name);
  timespec used;
  do {
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  } while (used.tv_sec + used.tv_nsec * 1e-9 < seconds && !Py_IsFinalizing());
  need_the_lock();
}

extern "C" void start(const char* name, double seconds) { std::thread(run, name, seconds).detach(); }
"""

SCRIPT = """
    import ctypes, sys
    from memscale._execute import orderly_exit
    if {orderly}:
        orderly_exit.be_orderly()
        orderly_exit.be_orderly()
    library = ctypes.CDLL({library!r})
    library.start.argtypes = (ctypes.c_char_p, ctypes.c_double)
    library.start(b"pt_late", 0.5)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("late")
    source, built = directory / "late.cpp", directory / "late.so"
    source.write_text(LATE_THREAD)
    include = sysconfig.get_paths()["include"]
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", f"-I{include}", "-o", built, source], check=True, timeout=300)
    return built


def run(library: pathlib.Path, *, orderly: bool) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(SCRIPT).format(library=str(library), orderly=orderly)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_late_thread_is_waited_for(library: pathlib.Path) -> None:
    answer = run(library, orderly=True)
    assert answer.stdout == "done\n"
    assert answer.returncode == 0, answer.stderr


def test_the_wait_ends_when_nobody_is_on_the_way() -> None:
    """In a process with idle threads of PyTorch, or with none, and with threads of others that are busy."""
    orderly_exit.let_threads_finish()
    assert orderly_exit._busy_threads() == []


def test_names_with_brackets_are_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "stat").write_text("17 (pt_odd) (name) R 1 17 17 0 -1 4194368")
    assert orderly_exit._read(tmp_path) == ("pt_odd) (name", "R")


def test_the_names_are_pytorchs() -> None:
    """gloo's thread of this release, which holds Python objects of the last all-reduce."""
    code = """
        import torch, torch.distributed as dist
        from memscale._execute import orderly_exit
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        names = [orderly_exit._read(task)[0] for task in orderly_exit.TASKS.iterdir()]
        dist.destroy_process_group()
        print(sum(name.startswith(orderly_exit.PREFIX + "gloo") for name in names) > 0)
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert answer.stdout == "True\n", answer.stderr
