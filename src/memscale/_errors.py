"""What MemScale raises, and how its messages quote others. One base class, so that `except memscale.MemScaleError`
catches all of it. Beside them, what every room asks of a value before it raises one."""

from __future__ import annotations

import os

MAX_QUOTED_CHARACTERS = 300
"""How much of another's error message is quoted. The whole of it is the `__cause__`, or in the log at DEBUG."""
_MAX_SHOWN_CHARACTERS = 100
_MAX_SHOWN_BITS = 256
"""Python refuses to write integers of many thousand digits."""


def quoted(error: BaseException) -> str:
    """Another's error in one line: its class, and the beginning of what it says."""
    try:
        said = shortened(str(error).rstrip(". \n"))
    except Exception:  # its class cannot even say what is wrong
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def shortened(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_QUOTED_CHARACTERS else f"{line[:MAX_QUOTED_CHARACTERS].rstrip()} ..."


def shown(value: object) -> str:
    """A value that is not allowed, as it is written in Python, unless that is long."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"<an integer of {value.bit_length()} bits>"
    try:
        text = repr(value)
    except Exception:  # its class cannot say what it is, which is nothing that the message is about
        text = f"<a {type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def is_system_name(text: str) -> bool:
    """Whether the system may take it as a name: it is not empty, and has no character that a name cannot have."""
    try:
        return bool(os.fsencode(text)) and "\0" not in text
    except UnicodeEncodeError:
        return False


_OF_LIGHTNING = "wrap the module, or give the Trainer memscale.integrations.lightning.MemScaleCallback(config)"
_INSTEAD = {
    "accelerate": "wrap the model, before or after accelerator.prepare",
    "diffusers": "wrap the network that is trained, such as pipeline.unet or pipeline.transformer",
    "lightning": _OF_LIGHTNING,
    "peft": "wrap what get_peft_model returns",
    "pytorch_lightning": _OF_LIGHTNING,
    "transformers": "wrap the model, or the Trainer that has it",
}
"""What to do with an object of a package that is no model, by its package."""


def no_model(target: object) -> str:
    """What came in the place of a model, for a `TypeError`; and what to do instead, where that is known."""
    if isinstance(target, type):
        return f"the class {target.__name__}: make an instance of it"
    name = type(target).__name__
    packages = (base.__module__.partition(".")[0] for base in type(target).__mro__)
    package = next((package for package in packages if package in _INSTEAD), None)
    return name if package is None else f"{name} of {package}: {_INSTEAD[package]}"


def install_command(extra: str) -> str:
    """What installs an optional dependency: the line for a message about a missing one."""
    return f'pip install -c constraints.txt ".[{extra}]"'


class MemScaleError(Exception):
    """Base of every error that MemScale raises on its own account.

        try:
            memscale.wrap(model, memscale.Config(memory_budget_gb=2.0), batch)
        except memscale.DoesNotFitError as error:
            print(error)  # what was tried, the numbers, and a batch or a mode that does fit

    An argument of a wrong type is a `TypeError`, as everywhere.
    """


class ConfigError(MemScaleError, ValueError):
    """A setting is outside what is allowed; the message names the field, the value and the range."""


class DoesNotFitError(MemScaleError):
    """No plan with the enabled techniques stays under the budget."""

    batch_size: int | None = None
    """The batch size that the message names as one that would fit; None where it names none."""


class ProfileError(MemScaleError):
    """The model could not be profiled."""


class StaticProfileError(ProfileError):
    """A training step could not be rehearsed on fake tensors; the model may still train, and be observed."""

    def __init__(self, message: str, *, what: str = "", needs_values: bool = False) -> None:
        super().__init__(message)
        self.what = what or message
        """The message without what a caller who gave a `sample_input` can do."""
        self.needs_values = needs_values
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
    """`verify_correctness` found that what came back from the disk is not what was written."""


class PartialStepError(OffloadError):
    """An optimizer step failed half-way: some parameters are updated, others are not."""


class ParkedError(MemScaleError):
    """A model whose memory was handed back is used before `memscale.resume`."""


class StepInBackwardError(MemScaleError):
    """The training loop, or its optimizer, does what `step_in_backward=True` does not allow."""


def runs_in_threads(model: str) -> MemScaleError:
    """The error about a model that `nn.DataParallel` runs on several devices."""
    return MemScaleError(
        f"{model} runs in nn.DataParallel on several devices, as copies in threads of one process, which MemScale "
        "cannot plan. Start one process for each device, with DistributedDataParallel around the model (`torchrun "
        "--nproc-per-node=2 train.py`; a Trainer puts it there by itself), or show the program one device "
        "(CUDA_VISIBLE_DEVICES=0)."
    )
