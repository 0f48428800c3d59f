"""The public verbs. A `Replanner` makes the plan, an `Executor` attaches it and takes it off again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config, OptimizationMode
from memscale._decide.budget import full_budget
from memscale._decide.eligible import resolve
from memscale._errors import ConfigError, DoesNotFitError, MemScaleError, ParkedError
from memscale._execute import parking, reserving
from memscale._execute.executor import Executor, executor_of
from memscale._execute.executor import execute as execute_plan
from memscale._execute.settings import ExecutionSettings
from memscale._execute.telemetry import StepRecorder
from memscale._hardware import Hardware
from memscale._hardware.host import nearest_existing
from memscale._plan import Plan
from memscale._planning.job import Job, device_of
from memscale._planning.recovery import Recovery
from memscale._planning.replanning import Replanner
from memscale._planning.saved_plans import device_for, refuse_plan
from memscale._planning.shapes import Lengths, samples_of
from memscale._planning.together import withheld_from
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.layers import refuse_compiled_around_blocks
from memscale._profile.profiler import refuse_unprofilable
from memscale._profile.ranks import ALONE, find_group, refuse_flat_parameters
from memscale._torch.optimizer_steps import owns_any
from memscale._torch.overrides import undo_with
from memscale.report import console, outcomes
from memscale.techniques.optimizer8bit.convert import Conversion, NoCounterpart, convert
from memscale.techniques.optimizer8bit.eight_bit import is_8bit, moments_of

logger = logging.getLogger("memscale")

Target = TypeVar("Target")


def wrap(
    target: Target,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
    *,
    lengths: Lengths | None = None,
) -> Target:
    """Make a model train in less memory; the training loop stays as it was.

        model = memscale.wrap(model)
        model = memscale.wrap(model, memscale.Config(memory_budget_gb=8), sample_input=batch)

    A forward that may need more than was planned for (a longer batch, layers that begin to train, another device) is
    planned again. `memscale.detach(model)` undoes everything.

    Args:
        target: An `nn.Module`, or a `transformers.Trainer` that has one.
        config: What may be done, and the budget; None: the mode BALANCED.
        sample_input: A training batch: a tensor, a tuple of positional or a dict of keyword inputs. It is read for
            shapes, dtypes and the values of integers, and lets the plan be made now. Without one, inputs are derived
            from a `transformers` config, or the plan is made at the first training forward. A list is several batches,
            from the shortest to the longest that will come: each shape gets its plan now.
        async_offload: Overlap transfers with compute, or not; None: as `MEMSCALE_ASYNC_OFFLOAD` says, else the config,
            which leaves it to the plan unless it is set there.
        async_config: How transfers overlap; None: as the config says.
        lengths: The lengths of the sequences that will come, or a histogram of them: the sample is planned for in all
            of these lengths.

    Returns:
        The same object. A model's executor is `model._memscale_executor`, and `model._memscale_executor.plan.explain()`
        says what was planned and why.

    Raises:
        TypeError: `target` is neither of the two, or another argument has the wrong type.
        DoesNotFitError: No plan that the config allows fits the budget. The message names the nearest thing that does.
        ProfileError: The model does not run on the sample.
    """
    config = _with_async(_checked_config(config), async_offload, async_config)
    if _is_trainer(target):
        from memscale.integrations.huggingface import wrap_trainer

        samples = _samples_for_trainer(target, sample_input, lengths)
        return cast(Target, wrap_trainer(target, config, functools.partial(attach_unplanned, samples=samples)))
    samples = tuple(samples_of(sample_input, lengths, _model_of(target)))
    _attach(_model_of(target), config, _Circumstances(samples, replica=_replica_of(target)))
    return target


@contextlib.contextmanager
def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Iterator[Executor]:
    """`wrap` for the length of a `with` block; knows the optimizer, so the plan counts its state exactly.

        with memscale.optimize(model, optimizer) as executor:
            train(model, optimizer)
            print(executor.stats())

    Args:
        model: The model, or a `transformers.Trainer` that has one.
        optimizer: The optimizer that trains it; None: one that is not known yet, taken for AdamW.
        config: What may be done, and the budget; None: the mode BALANCED.
        sample_input: A training batch, as for `wrap`.

    Returns:
        A context manager that gives the `Executor`, and detaches it in the end.

    Raises:
        TypeError: An argument has the wrong type.
        DoesNotFitError: No plan that the config allows fits the budget.
        ProfileError: The model does not run on the sample.
    """
    given = _Circumstances(_one_sample(sample_input), _checked_optimizer(optimizer), replica=_replica_of(model))
    _warn_of_stranger(_model_of(model), given.optimizer)
    executor = _attach(_model_of(model), _checked_config(config), given)
    del given, sample_input  # this frame lives as long as the `with` block, and the sample may be on the device
    try:
        yield executor
    finally:
        executor.detach()


def execute(model: nn.Module, plan: Plan, config: Config | None = None, optimizer: Optimizer | None = None) -> Executor:
    """Attach a plan that was made before, here or on another machine; nothing is profiled or decided again.

        memscale.execute(model, memscale.Plan.load("plan.json"))

    What is done, and how tensors travel, is the plan's.

    Args:
        model: A model of the class and structure that the plan was made for.
        plan: What `memscale.Plan.load` or an executor's `plan` gives.
        config: Where it is done: `device` (None: where the plan computes), `max_cpu_offload_gb`, `offload_dir`, the
            budget that this device has; and `verify_correctness`.
        optimizer: The optimizer that trains the model, if it is there already.

    Returns:
        The executor; `executor.detach()` takes everything off again.

    Raises:
        TypeError: An argument has the wrong type.
        PlanError: The plan was made for another model, kind of device or tier.
        DoesNotFitError: The plan peaks above what there is here.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"execute takes a memscale.Plan (Plan.load reads a file), not {type(plan).__name__}")
    known = _checked_optimizer(optimizer)
    config = _checked_config(config)
    _refuse_parked(_model_of(model))
    device = device_for(plan, _model_of(model), config)
    hardware = Hardware.detect(device, config.offload_dir)
    refuse_plan(plan, hardware, config)
    _refuse_unusable(_model_of(model), config)
    _detach_earlier(_model_of(model))
    executor = execute_plan(_model_of(model), plan, _settings(config, device, hardware), known)
    try:
        _serve_metrics(executor, config)
    except BaseException:
        executor.detach()
        raise
    return executor


def detach(model: nn.Module) -> None:
    """Leave the model as it was before `wrap`: class, forward, hooks, parameters, devices, optimizer state.

        memscale.detach(model)

    Args:
        model: A wrapped model, or a `transformers.Trainer` that has one. One that is not wrapped is left alone, with a
            warning.

    Raises:
        TypeError: `model` is neither of the two.
    """
    executor = executor_of(_model_of(model))
    if executor is None:
        warnings.warn(f"this {type(model).__name__} is not wrapped; nothing to detach", stacklevel=2)
        return
    executor.detach()


def park(model: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Hand all of a model's device memory back, between two training steps; `memscale.resume` takes it again.

        memscale.park(model)            # another process, or a generation engine, has the card
        evaluate_elsewhere()
        memscale.resume(model)

    Parameters, gradients, buffers, and the state of every optimizer that steps the model go to host memory, what
    MemScale keeps on the device is let go, and the allocator's cache is emptied. `Parameter` objects stay the same. A
    parked model can be saved, copied and loaded; a forward of it, or a step of its optimizer, raises `MemScaleError`.

    Args:
        model: A model, wrapped or not, or a `transformers.Trainer` that has one.
        optimizer: One that could not be found otherwise; those of this process that step the model's parameters are.

    Returns:
        The bytes that were on devices. 0 if the model was parked before, or computes on the CPU.

    Raises:
        TypeError: An argument has the wrong type.
        MemScaleError: The host has no room for it, or a tensor cannot be moved. Then nothing was moved.

    Memory that something else shares with the model (a `state_dict` that is kept) stays on the device, with a warning
    in the log.
    """
    module = _model_of(model)
    return parking.park(module, executor_of(module), _checked_optimizer(optimizer))


def resume(model: nn.Module) -> int:
    """Bring a parked model back to its devices, bit for bit; training goes on as if nothing had been.

        memscale.resume(model)

    Args:
        model: A model that `memscale.park` was called with. One that is not parked is left alone.

    Returns:
        The bytes that are on devices again.

    Raises:
        TypeError: `model` is neither a model nor a Trainer.
        MemScaleError: The device has no room for it now. The model stays parked, and may be resumed later.
    """
    return parking.resume(_model_of(model))


@contextlib.contextmanager
def parked(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[int]:
    """`park` for the length of a `with` block, which may raise; one that was parked before stays so.

        with memscale.parked(model):
            generate_with_another_engine()

    Args:
        model: A model, wrapped or not, or a `transformers.Trainer` that has one.
        optimizer: One that could not be found otherwise, as for `park`.

    Returns:
        A context manager that gives the bytes that were on devices, and resumes in the end.

    Raises:
        TypeError: An argument has the wrong type.
        MemScaleError: As `park`, and as `resume` in the end.
    """
    was_parked = parking.is_parked(_model_of(model))
    num_bytes = park(model, optimizer)
    try:
        yield num_bytes
    finally:
        if not was_parked:
            resume(model)


def apply_all_optimizations(
    model: nn.Module, optimizer: Optimizer, config: Config | None = None, sample_input: Any = None
) -> tuple[nn.Module, Optimizer]:
    """The full stack in one call, as low as the mode AGGRESSIVE goes.

        model, optimizer = memscale.apply_all_optimizations(model, optimizer)

    Args:
        model: The model to train.
        optimizer: The optimizer that trains it.
        config: Another config than `Config(mode="aggressive", force_optimize=True)`.
        sample_input: A training batch, as for `wrap`.

    Returns:
        The pair to train with: the same model, and the optimizer.

    Raises:
        TypeError: An argument has the wrong type.
        DoesNotFitError: No plan that the config allows fits the budget.

    The optimizer that is returned is bitsandbytes' own 8-bit class where it has one for this optimizer and device: with
    the same groups, options and (converted) state, and schedulers that were bound before go on. Elsewhere it is the one
    that came, whose waiting state is in 8 bits. What was done and what was not, and why, is shown and is in
    `model._memscale_executor.outcomes`. `memscale.detach(model)` undoes it: the optimizer that came has its state back.
    """
    config = (
        Config(mode=OptimizationMode.AGGRESSIVE, force_optimize=True) if config is None else _checked_config(config)
    )
    if config.use_8bit_optimizer:
        config = config.replace(use_8bit_optimizer=True)  # asked for by name: also where the state waits on the host
    samples = _one_sample(sample_input)
    if optimizer is None:
        raise TypeError("apply_all_optimizations takes the optimizer, too; without one use memscale.wrap")
    known = _checked_optimizer(optimizer)
    assert known is not None
    _warn_of_stranger(_model_of(model), known)
    earlier = executor_of(_model_of(model))
    if earlier is not None:
        earlier.detach()  # before the optimizer is looked at: it may have been replaced
    conversion, detail = _convert(known, _model_of(model), config)
    used = known if conversion is None else conversion.optimizer
    with contextlib.ExitStack() as undo:
        if conversion is not None:
            undo.callback(conversion.undo)
        # What came is the baseline of the plan; a copy, since nothing of ours keeps a replaced optimizer alive.
        baseline = known if conversion is None else copy.copy(known)
        given = _Circumstances(samples, used, baseline, _StackReport(config, detail), replica=_replica_of(model))
        executor = _attach(_model_of(model), config, given)
        executor.on_detach(undo.pop_all().close)
    return model, used


def _convert(optimizer: Optimizer, model: nn.Module, config: Config) -> tuple[Conversion | None, str | None]:
    """bitsandbytes' class in the optimizer's place, or None; and what to say about it, if it is known by now."""
    if not config.use_8bit_optimizer:
        return None, None
    name = type(optimizer).__name__
    if is_8bit(optimizer):
        return None, f"{name} keeps its state in 8 bits by itself"
    try:
        conversion = convert(optimizer, model, device_of(model, config))
    except NoCounterpart as reason:
        if moments_of(optimizer) is None:
            return None, None
        return None, f"{name} itself, its waiting state packed in place ({reason})"
    except ImportError:
        return None, None  # the executor says so
    stays = f"; {conversion.num_embeddings} embeddings stay in 32 bits" if conversion.num_embeddings else ""
    return conversion, f"{name} is replaced by bitsandbytes' {type(conversion.optimizer).__name__}{stays}"


class _StackReport:
    """Says after every plan what the full stack came to."""

    def __init__(self, config: Config, optimizer_detail: str | None) -> None:
        self.config = config
        self.optimizer_detail = optimizer_detail

    def __call__(self, executor: Executor, plan: Plan, hardware: Hardware) -> None:
        executor.outcomes = outcomes.outcomes(plan, self.config, hardware, self.optimizer_detail)
        if self.config.enable_logging:
            console.show(outcomes.describe(plan, executor.outcomes))


def attach_unplanned(
    model: nn.Module,
    config: Config,
    optimizer: Optimizer | None,
    baseline: Optimizer | None,
    holds_gradients: bool,
    *,
    samples: tuple[Inputs, ...] = (),
) -> Executor:
    """Wrap a model whose real batches are to come: the plan is made at its first training forward, or for the samples
    that were given."""
    given = _Circumstances(samples, optimizer, baseline, holds_gradients=holds_gradients, derives_inputs=False)
    return _attach(model, config, given)


def _samples_for_trainer(trainer: Any, sample_input: Any, lengths: Lengths | None) -> tuple[Inputs, ...]:
    if sample_input is None and lengths is None:
        return ()
    if trainer.model is None:
        raise ValueError(
            "sample_input and lengths= need the model, which this Trainer makes when it trains (model_init): wrap it "
            "without them"
        )
    return tuple(samples_of(sample_input, lengths, _model_of(trainer)))


def attach_inside(
    model: nn.Module,
    config: Config,
    optimizer: Optimizer | None,
    holds_gradients: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Executor:
    """Wrap a model in the first moment of a training forward with these arguments, which follows the plan already."""
    begun = Inputs(args, kwargs)
    given = _Circumstances((), optimizer, holds_gradients=holds_gradients, begun=begun, derives_inputs=False)
    return _attach(model, config, given)


@dataclasses.dataclass(frozen=True, slots=True)
class _Circumstances:
    """What is known of the training that a model is wrapped for."""

    samples: tuple[Inputs, ...] = ()
    """Batches that will come, the largest first."""
    optimizer: Optimizer | None = None
    baseline: Optimizer | None = None
    """The optimizer that the unmodified model would train with, where that is another."""
    reporter: _StackReport | None = None
    holds_gradients: bool = False
    """The loop adds up gradients over several batches."""
    begun: Inputs | None = None
    """The inputs of a forward that is under way."""
    replica: DistributedDataParallel | None = None
    """The DDP around the model, if it has one already."""
    derives_inputs: bool = True
    """Without a sample, inputs are derived from the model's config where that is possible."""


def _one_sample(sample_input: Any) -> tuple[Inputs, ...]:
    return () if sample_input is None else (Inputs.from_sample(sample_input),)


def _attach(model: nn.Module, config: Config, given: _Circumstances) -> Executor:
    """Wrap all or nothing: an error half-way leaves the model as it was."""
    _refuse_parked(model)
    _detach_earlier(model)
    _refuse_unusable(model, config)
    group = find_group(model, given.replica)
    ranks = ALONE if group is None else group.ranks
    config = withheld_from(config, ranks)
    device = device_of(model, config)
    with console.progress(config.enable_logging):
        hardware = Hardware.detect(device, config.offload_dir)
    executor = Executor(model, _settings(config, device, hardware), given.optimizer)
    try:
        executor.adopt()
        if given.replica is not None:
            executor.show_on(given.replica)
        _introduce(executor, config, hardware)
        recorder = _serve_metrics(executor, config)
        known, replacement = _roles(given.optimizer, given.baseline)
        job = Job(model, config, hardware, known, replacement, given.holds_gradients, ranks)
        replanner = Replanner(executor, job, given.reporter, given.replica)
        if config.recover_from_oom and device.type != "cpu" and not hardware.unified_memory:
            _recover(model, executor, replanner, device)
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


def _recover(model: nn.Module, executor: Executor, replanner: Replanner, device: torch.device) -> None:
    """From here on, steps that run out of memory are run again."""
    undo = contextlib.ExitStack()
    executor.on_detach(undo.close)
    reserving.refuse_to_spill(device, undo)
    Recovery(executor, replanner).attach(model, undo)


def _plan_now(replanner: Replanner, model: nn.Module, given: _Circumstances) -> None:
    """Plan before the first forward, if it is known what will come. Inputs that nobody gave may be too large, and what
    does not fit the host may fit the device that the model moves to: then its first training forward decides."""
    is_guess = not given.samples and given.derives_inputs
    samples = given.samples
    if is_guess and (derived := derive_inputs(model)) is not None:
        samples = (derived,)
    if not samples:
        return
    try:
        replanner.plan_shapes(model, samples, is_guess=is_guess)
    except DoesNotFitError as error:
        may_move = replanner.config.device is None and replanner.hardware.device_type == "cpu"
        if not (is_guess and may_move and torch.accelerator.is_available()):
            raise
        logger.info("on the CPU, where the model is now: %s It is planned at its first training forward.", error)


def _settings(config: Config, device: torch.device, hardware: Hardware) -> ExecutionSettings:
    return ExecutionSettings.from_config(config, device, full_budget(hardware, config).host_bytes)


def _detach_earlier(model: nn.Module) -> None:
    earlier = executor_of(model)
    if earlier is not None:
        logger.info("%s was wrapped already: its plan is replaced", type(model).__name__)
        earlier.detach()


def _roles(optimizer: Optimizer | None, baseline: Optimizer | None) -> tuple[str | Optimizer, Optimizer | None]:
    """Who trains the unmodified model (AdamW, if nobody knows), and who steps in its place, if that is another."""
    trained_by = optimizer if baseline is None else baseline
    return "adamw" if trained_by is None else trained_by, None if trained_by is optimizer else optimizer


def _introduce(executor: Executor, config: Config, hardware: Hardware) -> None:
    """Say where the model will compute, and what of the wishes cannot be followed there."""
    console.open_log(config, executor.on_detach)
    if config.enable_logging:
        console.show_hardware(hardware)
    _warn_of_slow_math(config, hardware)
    _tell_of_unified_memory(config, hardware)


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


def _warn_of_slow_math(config: Config, hardware: Hardware) -> None:
    if not config.asks_for("use_mixed_precision"):
        return
    if resolve(config, hardware).half_type is None:
        warnings.warn(
            f"use_mixed_precision=True is not followed: {hardware.device_name} has no fast 16-bit math, so the model "
            "stays in full precision",
            stacklevel=5,
        )


def _tell_of_unified_memory(config: Config, hardware: Hardware) -> None:
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
        raise ConfigError(f"offload_dir={offload_dir!r} is not a directory")
    try:
        with tempfile.TemporaryDirectory(prefix=".memscale-", dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"offload_dir={offload_dir!r} cannot be written: {error}") from error


def _model_of(target: object) -> nn.Module:
    if isinstance(target, DistributedDataParallel):
        return _model_of(target.module)  # what DDP itself does is communication, which no plan changes
    if isinstance(target, nn.Module):
        return target
    if _is_trainer(target):
        return _model_of(target.model)
    raise TypeError(f"MemScale takes an nn.Module or a transformers.Trainer, not {type(target).__name__}")


def _replica_of(target: object) -> DistributedDataParallel | None:
    return target if isinstance(target, DistributedDataParallel) else None


def _is_trainer(target: Any) -> TypeGuard[Any]:
    trainer = sys.modules.get("transformers.trainer")  # not loaded: then nobody can have made one
    return trainer is not None and isinstance(target, trainer.Trainer)


def _checked_config(config: object) -> Config:
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    raise TypeError(f"config must be a memscale.Config or None, not {type(config).__name__}")


def _checked_optimizer(optimizer: object) -> Optimizer | None:
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, not {type(optimizer).__name__}")


def _warn_of_stranger(model: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is not None and not owns_any(optimizer, model.parameters()):
        warnings.warn(
            f"this {type(optimizer).__name__} has no parameter of the {type(model).__name__}: it will not train it. "
            "Was it made for another model, or before this one was loaded?",
            stacklevel=3,
        )


def _with_async(config: Config, async_offload: bool | None, async_config: AsyncOffloadConfig | None) -> Config:
    """The argument wins, then the environment, then the config."""
    changes: dict[str, Any] = {}
    if async_offload is None and "MEMSCALE_ASYNC_OFFLOAD" in os.environ:
        async_offload = _parse_switch(os.environ["MEMSCALE_ASYNC_OFFLOAD"])
    if async_offload is not None:
        changes["async_offload"] = async_offload
    if async_config is not None:
        changes["async_config"] = async_config
    return config.replace(**changes) if changes else config


def _parse_switch(text: str) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("", "0", "false", "no", "off"):
        return False
    raise MemScaleError(f"MEMSCALE_ASYNC_OFFLOAD={text!r} is not allowed; it must be 1 or 0")
