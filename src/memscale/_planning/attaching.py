"""From a model to the executor on it: what `wrap` and the other verbs do once their arguments are checked.

    executor = attach(model, config, Circumstances(samples))        # planned now, or at the first training forward
    executor = attach_saved(model, plan, config, optimizer)         # a plan that was made before

A `Replanner` makes the plan, and an `Executor` attaches it. An error half-way leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
import warnings
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memscale._config import Config
from memscale._decide.eligible import Eligible
from memscale._errors import ConfigError, DoesNotFitError, MemScaleError, ParkedError, shortened, shown
from memscale._execute import parking, reserving
from memscale._execute.executor import Executor, executor_of
from memscale._execute.executor import execute as execute_plan
from memscale._execute.settings import ExecutionSettings
from memscale._execute.telemetry import StepRecorder
from memscale._hardware.host import nearest_existing
from memscale._plan import Plan
from memscale._planning.full_stack import StackReport
from memscale._planning.job import Job, device_of, eligible_here
from memscale._planning.loop.replanning import Replanner
from memscale._planning.rank_meetings import withheld_from
from memscale._planning.recovery.oom_recovery import Recovery
from memscale._planning.saved.saved_plans import device_for, refuse_plan
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.layers import refuse_compiled_around_blocks
from memscale._profile.profiler import refuse_unprofilable
from memscale._profile.ranks import ALONE, find_group, refuse_data_parallel, refuse_flat_parameters
from memscale._torch.overrides import undo_with
from memscale.report import console
from memscale.report.versions import warn_of_versions

logger = logging.getLogger("memscale")


@dataclasses.dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of the training that a model is wrapped for."""

    samples: tuple[Inputs, ...] = ()
    """Batches that will come, the largest first."""
    optimizer: Optimizer | None = None
    baseline: Optimizer | None = None
    """The optimizer that the unmodified model would train with, where that is another."""
    reporter: StackReport | None = None
    holds_gradients: bool = False
    """The loop adds up gradients over several batches."""
    begun: Inputs | None = None
    """The inputs of a forward that is under way."""
    replica: DistributedDataParallel | None = None
    """The DDP around the model, if it has one already."""
    derives_inputs: bool = True
    """Inputs are derived from the model's config where there is no sample and that is possible."""


def attach(model: nn.Module, config: Config, given: Circumstances) -> Executor:
    """Let the model be planned for and carried out, all or nothing."""
    warn_of_versions()
    _refuse_parked(model)
    _detach_earlier(model)
    _refuse_unusable(model, config)
    group = find_group(model, given.replica)
    ranks = ALONE if group is None else group.ranks
    config = withheld_from(config, ranks)
    device = device_of(model, config)
    with console.progress(config.enable_logging):
        eligible = eligible_here(config, device)
    hardware, executor = eligible.hardware, Executor(model, _settings(eligible, device), given.optimizer)
    try:
        executor.adopt()
        if given.replica is not None:
            executor.show_on(given.replica)
        _introduce(executor, eligible)
        recorder = _serve_metrics(executor, config)
        known, replacement = _roles(given.optimizer, given.baseline)
        job = Job(model, config, hardware, known, replacement, given.holds_gradients, ranks, resolved=eligible)
        replanner = Replanner(executor, job, given.reporter, given.replica)
        if config.recover_from_oom is not False and device.type != "cpu" and not hardware.unified_memory:
            _recover(model, executor, replanner, device, config.recover_from_oom)
        _plan_now(replanner, model, given)
        handle = model.register_forward_pre_hook(replanner, prepend=True, with_kwargs=True)
        executor.on_detach(handle.remove)
        if given.begun is not None:  # PyTorch goes through the hooks that were there when the forward began
            for hook in (replanner, recorder):
                if hook is not None:
                    hook(model, given.begun.args, given.begun.kwargs)
    except BaseException:
        executor.detach()
        raise
    return executor


def attach_saved(model: nn.Module, plan: Plan, config: Config, optimizer: Optimizer | None) -> Executor:
    """Attach a plan that was made before; nothing is profiled or decided again."""
    warn_of_versions()
    _refuse_parked(model)
    device = device_for(plan, model, config)
    eligible = eligible_here(config, device)
    refuse_plan(plan, eligible)
    _refuse_unusable(model, config)
    _detach_earlier(model)
    executor = execute_plan(model, plan, _settings(eligible, device), optimizer)
    try:
        _serve_metrics(executor, config)
    except BaseException:
        executor.detach()
        raise
    return executor


def _recover(
    model: nn.Module, executor: Executor, replanner: Replanner, device: torch.device, extent: bool | str
) -> None:
    """From here on, steps that run out of memory are run again."""
    undo = contextlib.ExitStack()
    executor.on_detach(undo.close)
    recovery = Recovery(executor, replanner, extent)
    if recovery.may_repeat and recovery.repeats_backward:  # else spilling is the lesser evil
        reserving.refuse_to_spill(device, undo)
    recovery.attach(model, undo)


def _plan_now(replanner: Replanner, model: nn.Module, given: Circumstances) -> None:
    """Plan before the first forward, if it is known what will come. Inputs that nobody gave may be larger than what
    comes: then its first training forward decides. For a batch that was given the answer is wanted now; what does not
    fit the host may fit the device that the model moves to."""
    is_guess = not given.samples and given.derives_inputs
    samples = given.samples
    if is_guess and (derived := derive_inputs(model)) is not None:
        samples = (derived,)
    if not samples:
        return
    try:
        replanner.plan_shapes(model, samples, is_guess=is_guess)
    except DoesNotFitError as error:
        if is_guess:
            logger.info("for derived inputs: %s It is planned for the batch of its first training forward.", str(error))
            return
        accelerator = _may_move_to(replanner)
        if accelerator is None:
            raise
        _refuse_unless_it_fits(replanner, model, samples[0], accelerator, error)


def _may_move_to(replanner: Replanner) -> torch.device | None:
    """Where a model may still go that lies on the CPU, and of which nobody has said where it computes."""
    if replanner.job.config.device is not None or replanner.job.hardware.device_type != "cpu":
        return None
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _refuse_unless_it_fits(
    replanner: Replanner, model: nn.Module, sample: Inputs, accelerator: torch.device, on_host: DoesNotFitError
) -> None:
    """This batch does not fit the CPU, where the model is now. Whether it fits where the model may go is found now;
    the plan itself is made by the first training forward, which knows where the model is then."""
    try:
        replanner.job.plan_for_device(model, sample, accelerator)
    except DoesNotFitError as error:
        misfit = DoesNotFitError(
            f"{error} This is for {accelerator.type}; on the CPU, where the model is now, it does not fit either: "
            f"{on_host}"
        )
        misfit.batch_size = error.batch_size
        raise misfit from error
    logger.warning(
        "this batch does not fit the CPU, where the model is now, but fits %s: it is planned for in the first training "
        'forward, where the model is then. Config(device="%s") plans for it now',
        accelerator.type,
        accelerator.type,
    )


def _settings(eligible: Eligible, device: torch.device) -> ExecutionSettings:
    return ExecutionSettings.from_config(eligible.config, device, eligible.budget.host_bytes)


def _detach_earlier(model: nn.Module) -> None:
    earlier = executor_of(model)
    if earlier is not None:
        logger.info("%s was wrapped already: its plan is replaced", type(model).__name__)
        earlier.detach()


def _roles(optimizer: Optimizer | None, baseline: Optimizer | None) -> tuple[str | Optimizer, Optimizer | None]:
    """Who trains the unmodified model (AdamW, if nobody knows), and who steps in its place, if that is another."""
    trained_by = optimizer if baseline is None else baseline
    return "adamw" if trained_by is None else trained_by, None if trained_by is optimizer else optimizer


def _introduce(executor: Executor, eligible: Eligible) -> None:
    """Say where the model will compute, and what of the wishes cannot be followed there."""
    config = eligible.config
    console.open_log(config, executor.on_detach)
    if config.enable_logging:
        console.show_hardware(eligible.hardware)
    _warn_of_slow_math(eligible)
    _tell_of_unified_memory(eligible)


def _serve_metrics(executor: Executor, config: Config) -> StepRecorder | None:
    """Show what happens in training on the port that the config names, until detached or until the model is gone."""
    if config.observability_port is None:
        return None
    from memscale.report import metrics

    recorder = StepRecorder(executor)
    reference = weakref.ref(recorder)
    # Every process of a node would take the same port: each takes the one of its place on the node.
    shift = int(os.environ.get("LOCAL_RANK", "0")) if config.observability_port else 0
    server = metrics.serve(
        lambda: None if (alive := reference()) is None else alive.read(),
        config.observability_host,
        config.observability_port + shift,
    )
    closing = contextlib.ExitStack()
    undo_with(executor.model, server.close, closing)
    executor.on_detach(closing.close)
    executor.metrics_url = server.url
    logger.info("metrics are served at %s", server.url)
    return recorder


def _warn_of_slow_math(eligible: Eligible) -> None:
    if eligible.config.asks_for("use_mixed_precision") and eligible.half_type is None:
        warnings.warn(
            f"use_mixed_precision=True is not followed: {eligible.hardware.device_name} has no fast 16-bit math, so "
            "the model stays in full precision",
            stacklevel=5,
        )


def _tell_of_unified_memory(eligible: Eligible) -> None:
    config, hardware = eligible.config, eligible.hardware
    if not (hardware.unified_memory and config.enable_offloading):
        return
    text = f"{hardware.device_name} shares its memory with the host: offloading would gain nothing and is left out"
    if config.asks_for("enable_offloading"):
        warnings.warn(f"enable_offloading=True is not followed: {text}", stacklevel=5)
    else:
        logger.info(text)


def _refuse_parked(model: nn.Module) -> None:
    if parking.is_parked(model):
        raise ParkedError(f"this {type(model).__name__} is parked: call memscale.resume(model) before it is wrapped")


def _refuse_unusable(model: nn.Module, config: Config) -> None:
    refuse_unprofilable(model)
    refuse_flat_parameters(model)
    refuse_data_parallel(model)
    refuse_compiled_around_blocks(model)
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise MemScaleError(
            f"{type(model).__name__} is on the meta device and has no weights to train: give it some before it is "
            "wrapped; memscale.estimate() needs none"
        )
    if config.offload_dir is not None:
        _check_directory(config.offload_dir)


def _check_directory(offload_dir: str) -> None:
    """Check now that files can be made there: the first tensor may be sent hours later. Nothing is left behind."""
    existing = nearest_existing(offload_dir)
    if not existing.is_dir():
        raise ConfigError(f"offload_dir={shown(offload_dir)} is not a directory")
    try:
        with tempfile.TemporaryFile(dir=existing):  # it has no name, or only for a moment: a kill leaves nothing
            pass
    except OSError as error:
        raise ConfigError(f"offload_dir={shown(offload_dir)} cannot be written: {shortened(str(error))}") from error
