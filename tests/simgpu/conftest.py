"""Helpers of the simgpu tests."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def _nothing_survives() -> None:
    """In place of the check of that name for memscale's tests: torch's device threads rightly outlive a test here."""


PREAMBLE = "import torch, simgpu\nfrom torch import nn\n"


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs code in a process of its own, which must end well; gives its standard output. The limit ends what hangs."""

    def run(code: str, timeout: float = 600, **environment: str) -> str:
        answer = subprocess.run(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"PYTHONWARNINGS": "error"} | environment,
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    return run
