"""What MemScale raises. One base class, so that `except memscale.MemScaleError` catches all of it."""

from __future__ import annotations


class MemScaleError(Exception):
    """Base of every error that MemScale raises on its own account."""


class ConfigError(MemScaleError, ValueError):
    """A setting is outside what is allowed; the message names the field, the value and the range."""


class DoesNotFitError(MemScaleError):
    """No plan with the enabled techniques stays under the budget."""


class ProfileError(MemScaleError):
    """The model could not be profiled."""


class StaticProfileError(ProfileError):
    """A training step could not be rehearsed on fake tensors; the model may still train, and be observed."""

    needs_values = False
    """The forward looks at values, which fake tensors do not have: nothing is wrong with its inputs."""


class PlanError(MemScaleError):
    """A plan cannot be read, or does not belong to this model."""


class VerificationError(MemScaleError):
    """`verify_correctness` found a recomputation that differs from the first computation."""


class UnknownModelError(MemScaleError):
    """A model name or a `file.py:factory` that the command line cannot resolve."""


class OffloadError(MemScaleError):
    """Base of what goes wrong where tensors wait on another tier."""


class StoreFullError(OffloadError):
    """The tier has no room left: its budget is spent, or the disk is full."""


class StoreIOError(OffloadError):
    """The disk failed to write or to read; the bytes concerned are never used."""


class ChecksumError(StoreIOError):
    """What came back from the disk is not what was written."""


class PartialStepError(OffloadError):
    """An optimizer step failed half-way: some parameters are updated, others are not."""
