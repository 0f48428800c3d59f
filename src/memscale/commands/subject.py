"""What a command works on: a model with inputs, the hardware, the optimizer, and the user's wishes."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from memscale import zoo
from memscale._config import Config, OptimizationMode
from memscale._errors import ConfigError, quoted, shown
from memscale.commands.progress import progress

if TYPE_CHECKING:
    from torch import nn

    from memscale._hardware import Hardware
    from memscale._planning.job import Job
    from memscale._profile.inputs import Inputs

MAX_HOST_GB = 1e6
_OPTION_OF = {
    "memory_budget_gb": "--budget",
    "target_gpu_utilization": "--utilization",
    "mode": "--mode",
    "offload_dir": "--offload-dir",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The options that say what a command works on."""

    name: str
    batch: int | None
    seq: int | None
    gpu: str | None
    optimizer: str
    with_weights: bool
    lora: int | None = None
    host_gb: float | None = None
    offload_dir: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """The same, built."""

    name: str
    model: nn.Module
    inputs: Inputs
    hardware: Hardware
    optimizer: str

    def job(self, config: Config, **options: Any) -> Job:
        from memscale._planning.job import Job

        return Job(self.model, config, self.hardware, self.optimizer, **options)


def config_of(
    mode: str | None,
    budget: float | None,
    utilization: float,
    overlaps: bool | None,
    *,
    force: bool = False,
    offload_dir: pathlib.Path | None = None,
) -> Config:
    """What the options of a command wish for. What is wrong with one is said of the option, not of the field."""
    try:
        return Config(
            mode=OptimizationMode.BALANCED if mode is None else mode,  # type: ignore[arg-type]
            memory_budget_gb=budget,
            target_gpu_utilization=utilization,
            force_optimize=force,
            async_offload=overlaps,
            offload_dir=None if offload_dir is None else str(offload_dir),
        )
    except ConfigError as error:
        field, equals, rest = str(error).partition("=")
        rest = rest.removesuffix(", or None")  # an option is left out instead
        raise ConfigError(f"{_OPTION_OF.get(field, field)}{equals}{rest}") from error


def open_subject(asked: Asked) -> Subject:
    """Check what is cheap to check before anything heavy is imported, then build the model."""
    zoo.check_name(asked.name)
    _check_directory(asked.offload_dir)
    hardware = _card(asked.gpu, asked.host_gb)
    with progress(f"building {asked.name}"):
        _check_optimizer(asked.optimizer)
        if zoo.is_factory(asked.name):
            model, sample = zoo.load_factory(asked.name, with_weights=asked.with_weights)
        else:
            model, sample = zoo.build(asked.name), None
        inputs = inputs_for(asked.name, model, sample, asked.batch, asked.seq)
        if asked.lora is not None:
            model, inputs = zoo.with_adapters_for(model, inputs, asked.lora)
        return Subject(asked.name, model, inputs, _with_disk(hardware, asked.offload_dir), asked.optimizer)


def _check_directory(offload_dir: pathlib.Path | None) -> None:
    from memscale._hardware.host import nearest_existing

    if offload_dir is None:
        return
    try:
        is_directory = nearest_existing(str(offload_dir)).is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise ConfigError(f"--offload-dir {shown(str(offload_dir))} cannot be used: {quoted(error)}") from error
    if not is_directory:
        raise ConfigError(f"--offload-dir {shown(str(offload_dir))} is not a directory")


def _with_disk(card: Hardware | None, offload_dir: pathlib.Path | None) -> Hardware:
    """The card, or what this machine has, with the room that the directory has on this machine's disk."""
    from memscale._hardware import Hardware
    from memscale._hardware.host import disk_free

    place = None if offload_dir is None else str(offload_dir)
    if card is None:
        return Hardware.detect(offload_dir=place)
    return card if place is None else dataclasses.replace(card, disk_free_bytes=disk_free(place))


def _card(gpu: str | None, host_gb: float | None) -> Hardware | None:
    """The card of this name in a machine with so much memory; None: what this machine has."""
    from memscale._hardware import Hardware
    from memscale.commands.table import with_host

    if host_gb is not None:
        check_host(host_gb)
    if gpu is None:
        if host_gb is not None:
            raise ConfigError("--host is the memory of the machine that a named card is in, and comes with --gpu")
        return None
    hardware = Hardware.from_name(gpu)
    return hardware if host_gb is None else with_host(hardware, host_gb)


def check_host(host_gb: float) -> None:
    if not 0 < host_gb <= MAX_HOST_GB:
        raise ConfigError(f"--host {host_gb:g} must be above 0 and at most {MAX_HOST_GB:g} GB")


def _check_optimizer(name: str) -> None:
    from memscale._profile.optimizer_twin import OPTIMIZERS

    allowed = [*OPTIMIZERS, "none"]
    if name not in allowed:
        raise ConfigError(f"--optimizer {shown(name)} is not known; it must be one of {', '.join(allowed)}")


def inputs_for(name: str, model: nn.Module, sample: Any, batch: int | None, seq: int | None) -> Inputs:
    from memscale._profile.inputs import Inputs, derive_inputs

    if sample is not None:
        if batch is not None or seq is not None:
            raise ConfigError(f"{name} gives its own sample: --batch and --seq do not apply")
        return Inputs.from_sample(sample)
    inputs = derive_inputs(model, batch or 1, seq)
    if inputs is None:
        raise ConfigError(
            f"no inputs can be derived for {type(model).__name__}; let the factory return (model, sample)"
        )
    if seq is not None and "input_ids" not in inputs.kwargs:
        raise ConfigError(f"--seq does not apply to {name}: it does not take a sequence")
    return inputs
