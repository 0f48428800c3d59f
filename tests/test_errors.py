"""One base class catches everything that MemScale raises on its own account."""

from __future__ import annotations

import inspect

import memscale
from memscale import _errors


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
