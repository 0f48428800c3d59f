"""The suite itself: the same cases in every run, and files in any order."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import settings

import memscale
from memscale._torch.live_bytes import LiveBytes
from tests.conftest import (
    _BORN,
    freeze_what_is_left,
    pytest_collectstart,
    pytest_ignore_collect,
    with_files_shuffled,
    with_long_files_first,
)

pytestmark = pytest.mark.unit


def test_property_tests_try_the_same_cases_in_every_run(request: pytest.FixtureRequest) -> None:
    wanted = settings.get_profile(request.config.getoption("--hypothesis-profile") or "fixed")
    assert settings.default == wanted
    functions = [getattr(item, "obj", None) for item in request.session.items]
    for function in functions:
        own = getattr(function, "_hypothesis_internal_use_settings", None)
        assert own is None or own.derandomize == wanted.derandomize, function
    fixed = settings.get_profile("fixed")
    assert fixed.derandomize
    assert fixed.database is None
    assert fixed.deadline is None
    assert not settings.get_profile("search").derandomize


def test_a_profile_that_an_import_loads_is_not_the_next_files(request: pytest.FixtureRequest) -> None:
    """As that of `torch.testing._internal.common_utils` does."""
    before = settings.default
    settings.load_profile("fixed" if before == settings.get_profile("search") else "search")
    assert settings.default != before
    pytest_collectstart(request.session)
    assert settings.default == before


def test_files_are_shuffled_and_their_tests_are_not(request: pytest.FixtureRequest) -> None:
    items = [
        pytest.Function.from_parent(
            pytest.Module.from_parent(request.session, path=Path(request.config.rootpath, "tests", file)),
            name=name,
            callobj=lambda: None,
        )
        for file in ("a.py", "b.py", "c.py", "d.py")
        for name in ("test_2", "test_1")
    ]
    orders = {tuple(item.nodeid for item in with_files_shuffled(items, seed)) for seed in range(20)}
    assert len(orders) > 10
    for order in orders:
        assert sorted(order) == sorted(item.nodeid for item in items)
        assert [name.split("::")[1] for name in order] == ["test_2", "test_1"] * 4
        assert all(order[i].split("::")[0] == order[i + 1].split("::")[0] for i in range(0, 8, 2))
    state = random.getstate()
    assert with_files_shuffled(items, 1) == with_files_shuffled(items[::1], 1)
    assert random.getstate() == state


def test_files_with_slow_tests_come_first_and_short_ones_last(request: pytest.FixtureRequest) -> None:
    def tests_of(file: str, *names: str) -> list[pytest.Item]:
        module = pytest.Module.from_parent(request.session, path=Path(request.config.rootpath, "tests", file))
        return [pytest.Function.from_parent(module, name=name, callobj=lambda: None) for name in names]

    slow = tests_of("d.py", "test_2", "test_1")
    slow[0].add_marker("slow")
    files = [
        tests_of("a.py", "test_1"),
        tests_of("b.py", *(f"test_{i}" for i in range(4))),
        tests_of("c.py", "t"),
        slow,
    ]
    ordered = with_long_files_first([item for file in files for item in file])
    assert ordered == [item for file in (slow, files[1], files[0], files[2]) for item in file]


def test_what_is_left_is_out_of_sight_and_little() -> None:
    kept = torch.ones(1000)
    freeze_what_is_left()
    with memscale.measure("cpu") as seen:
        pass
    assert seen.peak_bytes == 0
    del seen
    gc.collect()
    assert not any(isinstance(each, LiveBytes) for each in _BORN), "counting leaves nothing in the frozen part"
    large = torch.ones(1_000_000)
    with pytest.raises(AssertionError, match=r"4,000,\d+ bytes of tensors outlive their tests"):
        freeze_what_is_left()
    del kept, large


INNER = """
import pytest

def test_that_works():
    sum(range(1_000_000))
"""


@pytest.mark.slow
def test_the_processor_time_of_a_test_is_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_runtest_makereport, pytest_runtest_setup\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])
    (case,) = ElementTree.parse(report).iter("testcase")
    (found,) = (each for each in case.iter("property") if each.attrib["name"] == "processor_s")
    assert float(found.attrib["value"]) > 0


def test_files_of_other_lanes_are_not_imported_for_a_quick_check(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small, large = tmp_path / "test_small.py", tmp_path / "test_large.py"
    small.write_text("pytestmark = pytest.mark.unit")
    large.write_text("import torch")
    for expression, wanted in (("unit and not slow and not full", [None, True]), ("not full", [None, None])):
        monkeypatch.setattr(request.config.option, "markexpr", expression)
        assert [pytest_ignore_collect(path, request.config) for path in (small, large)] == wanted
    monkeypatch.setattr(request.config.option, "markexpr", "unit and not slow and not full")
    assert pytest_ignore_collect(tmp_path, request.config) is None, "folders are looked into"
