"""Three suites: the tests in this folder start programs on the card; `card/` and `memscale/` run on it themselves.

python -m pytest tests --ignore tests/card --ignore tests/memscale
python -m emucuda --races --kernels -m pytest tests/card
python -m emucuda --races --lag 100000 -m pytest emucuda/tests/memscale  # from the repository, with MemScale
"""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import emucuda

OnTheCard = Callable[..., Any]


@pytest.fixture
def on_the_card() -> OnTheCard:
    """`on_the_card(code, **settings)`: runs the code on the card; what it prints last is read as JSON."""

    def run(code: str, *, env: dict[str, str] | None = None, **settings: Any) -> Any:
        done = run_on_the_card(code, env=env, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def run_on_the_card(
    code: str, *, env: dict[str, str] | None = None, **settings: Any
) -> "subprocess.CompletedProcess[str]":
    import os

    base = os.environ | (env or {})
    wanted = emucuda.Settings(**settings)
    return emucuda.run(["-c", code], wanted, env=base, capture_output=True, text=True, timeout=600)
