"""Every private API that is used has a test beside it that says when it breaks."""

from __future__ import annotations

import pathlib
import re

import pytest

from memscale._torch import private

pytestmark = pytest.mark.unit


def test_every_name_is_tried_by_the_tests_of_its_module() -> None:
    here = pathlib.Path(__file__).parent
    for name in private.__all__:
        value = getattr(private, name)
        home = getattr(value, "__module__", "").rpartition(".")[2]
        tests = [here / f"test_{home}.py"] if home else sorted(here.glob("test_*.py"))  # a constant has no home
        assert any(re.search(rf"private\.{name}\b", path.read_text()) for path in tests), name
