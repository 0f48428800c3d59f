"""The suite itself: the same cases in every run, and files in any order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import pytest_collectstart, with_files_shuffled


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
