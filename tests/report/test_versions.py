"""Versions that were not tried are warned of, once; the table agrees with what is declared and pinned."""

from __future__ import annotations

import pathlib
import re
import warnings

import pytest
import torch
from torch import nn

import memscale
from memscale.report import versions
from memscale.report.versions import TESTED, KnownVersions, warn_of_versions

pytestmark = pytest.mark.unit

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.9.1", "older"),
        ("2.10.0", ""),
        ("2.10.0+cu128", ""),
        ("2.13.0+cpu", ""),
        ("2.15.3", ""),
        ("2.16.0a0+git1234", "newer"),
        ("3.0", "newer"),
        ("unknown", "older"),
    ],
)
def test_a_version_is_older_newer_or_neither(version: str, verdict: str) -> None:
    assert KnownVersions("2.10", "2.15").verdict(version) == verdict


def test_a_range_may_end_with_a_major_version() -> None:
    assert KnownVersions("4.57", "5").verdict("5.99.1") == ""
    assert KnownVersions("4.57", "5").verdict("6.0.0") == "newer"


def test_what_is_declared_is_what_is_warned_of() -> None:
    declared = dict(re.findall(r'"([a-z-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    for name, tested in TESTED.items():
        assert declared[name] == tested.oldest, name


def test_what_is_pinned_is_within() -> None:
    pinned = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, tested in TESTED.items():
        assert tested.verdict(pinned[name]) == "", name


@pytest.fixture
def other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has another torch, and the table says so."""
    monkeypatch.setattr(versions, "_told", set())
    monkeypatch.setitem(TESTED, "torch", KnownVersions("1.0", "1.13"))


def test_a_model_that_is_wrapped_with_another_torch_is_warned_of_once(other_versions: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"^torch .* is newer than what MemScale is known to work with") as caught:
        memscale.wrap(model, memscale.Config(enable_logging=False), torch.zeros(2, 4))
    assert len(caught) == 1
    assert "pip install" in str(caught[0].message)
    memscale.detach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memscale.wrap(model, memscale.Config(enable_logging=False), torch.zeros(2, 4))
    memscale.detach(model)


def test_packages_that_are_not_loaded_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_told", set())
    monkeypatch.setattr(versions, "TESTED", {"no-such-package": KnownVersions("1", "1", "hf")})
    warn_of_versions()
    assert versions._told == set()
