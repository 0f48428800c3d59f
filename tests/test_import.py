"""Importing does no work."""

from __future__ import annotations

import subprocess
import sys

import memscale


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_starts_nothing() -> None:
    out = run(
        "import sys, threading, os; before = set(os.listdir('/proc/self/fd'))\n"
        "import memscale\n"
        "assert threading.active_count() == 1\n"
        "assert set(os.listdir('/proc/self/fd')) == before\n"
        "print(sorted(m for m in ('torch', 'numpy', 'rich', 'transformers', 'psutil', 'typer') if m in sys.modules))"
    )
    assert out.strip() == "[]"


def test_the_api_touches_no_device_and_starts_no_thread() -> None:
    out = run(
        "import threading\n"
        "import torch\n"
        "from memscale import wrap, optimize, detach, estimate, measure, Plan\n"
        "import sys\n"
        "print(threading.active_count(), torch.cuda.is_initialized(), 'transformers' in sys.modules)"
    )
    assert out.split() == ["1", "False", "False"]


def test_every_public_name_is_there() -> None:
    for name in memscale.__all__:
        assert getattr(memscale, name) is not None
    assert set(memscale.__all__) <= set(dir(memscale))
    promised = ("wrap", "optimize", "detach", "apply_all_optimizations", "estimate", "measure", "Config", "Hardware")
    for name in (*promised, "OptimizationMode", "AsyncOffloadConfig", "MemScaleError", "Plan", "Executor", "Estimate"):
        assert name in memscale.__all__


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(memscale, "wrapp")


def test_every_error_of_ours_has_a_public_name() -> None:
    from memscale import _errors

    ours = {name for name, value in vars(_errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours <= set(memscale.__all__)
