"""One base class catches everything that MemScale raises on its own account."""

from __future__ import annotations

import inspect

import pytest

import memscale
from memscale import _errors
from memscale._errors import quoted, shown

pytestmark = pytest.mark.unit


def test_every_error_has_one_base() -> None:
    errors = [value for _, value in inspect.getmembers(_errors, inspect.isclass) if issubclass(value, Exception)]
    assert len(errors) > 5
    assert all(issubclass(error, memscale.MemScaleError) for error in errors)
    assert all(error.__doc__ for error in errors)


def test_a_bad_setting_is_a_value_error() -> None:
    assert issubclass(memscale.ConfigError, ValueError)


def test_every_public_error_is_exported() -> None:
    for name in ("ConfigError", "DoesNotFitError", "PlanError", "ProfileError", "VerificationError"):
        assert getattr(memscale, name) is getattr(_errors, name)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("wrong."), "ValueError: wrong"),
        (ValueError(), "ValueError"),
        (KeyError("name"), "KeyError: 'name'"),
        (RuntimeError("first\n\n   second\tthird\n"), "RuntimeError: first second third"),
        (Speechless(), "Speechless"),
        (RuntimeError("x" * 2000), f"RuntimeError: {'x' * 300} ..."),
    ],
)
def test_others_are_quoted_in_one_short_line(error: Exception, said: str) -> None:
    assert quoted(error) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (8, "8"),
        (True, "True"),
        ("eight", "'eight'"),
        (10**400, "<an integer of 1329 bits>"),
        (-(10**9999), "<an integer of 33216 bits>"),
        ("x" * 2000, f"'{'x' * 99}..."),
    ],
    ids=["int", "bool", "str", "huge", "negative", "long"],
)
def test_values_are_shown_in_few_words(value: object, said: str) -> None:
    assert shown(value) == said
