"""The public verbs: arguments are checked here, and `_planning/attaching.py` does the rest.

wrap, optimize    ->  attach         profile, decide and execute, now or at the first training forward
execute           ->  attach_saved   execute alone: the plan was made before
detach            ->  Executor.detach
park, resume      ->  _execute/parking.py
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config, OptimizationMode
from memscale._errors import DoesNotFitError, MemScaleError, no_model
from memscale._execute import parking
from memscale._execute.executor import Executor
from memscale._execute.executor import executor_of as find_executor
from memscale._plan import Plan
from memscale._planning.attaching import Circumstances, attach, attach_saved
from memscale._planning.full_stack import StackReport, convert_optimizer
from memscale._planning.loop.shapes import Lengths, samples_of
from memscale._profile.inputs import Inputs
from memscale._torch.optimizer_steps import owns_any

Target = TypeVar("Target")

logger = logging.getLogger("memscale")


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
        The same object. `memscale.executor_of(target)` is what carries out its plan, and its `plan.explain()` says what
        was planned and why.

    Raises:
        TypeError: `target` is neither of the two, or another argument has the wrong type.
        DoesNotFitError: No plan that the config allows fits the budget. The message names the nearest thing that does.
        ProfileError: The model does not run on the sample.
    """
    config = _with_async(_checked_config(config), async_offload, async_config)
    if _is_trainer(target):
        from memscale.integrations.huggingface import wrap_trainer

        samples = _samples_for_trainer(target, sample_input, lengths)
        attaching = functools.partial(attach_unplanned, samples=samples)
        return cast(Target, wrap_trainer(target, config, attaching, reads_lengths=not samples))
    samples = tuple(samples_of(sample_input, lengths, _model_of(target)))
    attach(_model_of(target), config, Circumstances(samples, replica=_replica_of(target)))
    return target


class _Optimizing(contextlib.AbstractContextManager[Executor]):
    """What `optimize` gives: attached when the block is entered, detached at its end.

    Without `with` nothing would be attached, and nothing in the training would show it. So one that was never entered
    says so when it is thrown away.
    """

    def __init__(self, attaching: Callable[[], Executor]) -> None:
        self._attaching: Callable[[], Executor] | None = attaching
        self._executor: Executor | None = None

    def __enter__(self) -> Executor:
        # Given up here: it holds the sample, which may be on the device for as long as the block takes.
        attaching, self._attaching = self._attaching, None
        if attaching is None:
            raise RuntimeError("this memscale.optimize(...) was entered before; make another one for another block")
        self._executor = attaching()
        return self._executor

    def __exit__(self, *_: object) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.detach()

    def __del__(self) -> None:
        if self._attaching is not None:
            warnings.warn(
                "memscale.optimize(...) was called without `with`, so nothing was attached: write "
                "`with memscale.optimize(...):` around the training, or memscale.wrap(model), which needs no block",
                stacklevel=2,
            )


def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> contextlib.AbstractContextManager[Executor]:
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
    given = Circumstances(_one_sample(sample_input), _checked_optimizer(optimizer), replica=_replica_of(model))
    _warn_of_stranger(_model_of(model), given.optimizer)
    return _Optimizing(functools.partial(attach, _model_of(model), _checked_config(config), given))


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
    return attach_saved(_model_of(model), plan, _checked_config(config), _checked_optimizer(optimizer))


def detach(model: nn.Module) -> None:
    """Leave the model as it was before `wrap`: class, forward, hooks, parameters, devices, optimizer state.

        memscale.detach(model)

    Args:
        model: A wrapped model, or a `transformers.Trainer` that has one. One that is not wrapped is left alone, with a
            warning.

    Raises:
        TypeError: `model` is neither of the two.
    """
    executor = find_executor(_model_of(model))
    if executor is None:
        warnings.warn(f"this {type(model).__name__} is not wrapped; nothing to detach", stacklevel=2)
        return
    executor.detach()


def executor_of(model: nn.Module) -> Executor:
    """What carries out the plan of a wrapped model: the plan itself, what was moved and waited for, reports.

        model = memscale.wrap(model)
        ...                                     # some steps of training
        executor = memscale.executor_of(model)
        print(executor.plan.explain())
        executor.report("run.html")

    Args:
        model: A wrapped model, or a `transformers.Trainer` that has one.

    Returns:
        The executor; its `plan` is None until the first training forward, where `wrap` knew no batch.

    Raises:
        TypeError: `model` is neither of the two.
        MemScaleError: The model is not wrapped.
    """
    executor = find_executor(_model_of(model))
    if executor is None:
        raise MemScaleError(f"this {type(model).__name__} is not wrapped: memscale.wrap(model) plans for it")
    return executor


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
    return parking.park(module, find_executor(module), _checked_optimizer(optimizer))


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
    `memscale.executor_of(model).outcomes`. `memscale.detach(model)` undoes it: the optimizer that came has its state
    back.
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
    earlier = find_executor(_model_of(model))
    if earlier is not None:
        earlier.detach()  # before the optimizer is looked at: it may have been replaced
    conversion, detail = convert_optimizer(known, _model_of(model), config)
    used = known if conversion is None else conversion.optimizer
    with contextlib.ExitStack() as undo:
        if conversion is not None:
            undo.callback(conversion.undo)
        # What came is the baseline of the plan; a copy, since nothing of ours keeps a replaced optimizer alive.
        baseline = known if conversion is None else copy.copy(known)
        given = Circumstances(samples, used, baseline, StackReport(config, detail), replica=_replica_of(model))
        executor = attach(_model_of(model), config, given)
        executor.on_detach(undo.pop_all().close)
    return model, used


def attach_unplanned(
    model: nn.Module,
    config: Config,
    optimizer: Optimizer | None,
    baseline: Optimizer | None,
    holds_gradients: bool,
    *,
    samples: tuple[Inputs, ...] = (),
    batch: Any = None,
    lengths: Lengths | None = None,
) -> Executor:
    """Wrap a model whose real batches are to come: the plan is made at its first training forward, or for the samples
    that were given, or for the longest batch and the lengths of a dataset."""
    given = Circumstances(samples, optimizer, baseline, holds_gradients=holds_gradients, derives_inputs=False)
    if lengths is None:
        return attach(model, config, given)
    try:
        found = tuple(samples_of(batch, lengths, model))
        sizes = [sample.size(1) for sample in found]
        logger.info("the dataset has batches of up to %s: planned for the lengths %s", sizes[0], sizes)
        return attach(model, config, dataclasses.replace(given, samples=found))
    except DoesNotFitError:
        raise
    except MemScaleError as error:  # nobody asked for it: the real batches will tell
        logger.info("the dataset's longest batch cannot be planned for (%s): its batches are, as they come", str(error))
        return attach(model, config, given)


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
    given = Circumstances((), optimizer, holds_gradients=holds_gradients, begun=begun, derives_inputs=False)
    return attach(model, config, given)


def _one_sample(sample_input: Any) -> tuple[Inputs, ...]:
    return () if sample_input is None else (Inputs.from_sample(sample_input),)


def _model_of(target: object) -> nn.Module:
    if isinstance(target, DistributedDataParallel):
        return _model_of(target.module)  # what DDP itself does is communication, which no plan changes
    if isinstance(target, nn.Module):
        return target
    if _is_trainer(target):
        return _model_of(target.model)
    raise TypeError(f"MemScale takes an nn.Module or a transformers.Trainer, not {no_model(target)}")


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
