"""The public verbs. `_pipeline.make_plan` gives the plan, an `Executor` attaches it and takes it off again."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config
from memscale._errors import MemScaleError
from memscale._execute import Executor, executor_of
from memscale._hardware import Hardware
from memscale._patching import OwnHook
from memscale._pipeline import device_of, execution_settings, make_plan
from memscale._plan import MixedPrecision
from memscale._profile.inputs import Inputs, derive_inputs
from memscale.report import console

logger = logging.getLogger("memscale")

Target = TypeVar("Target")


def wrap(
    target: Target,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
) -> Target:
    """Make a model train in less memory; the training loop stays as it was.

        model = memscale.wrap(model)

    `sample_input` (a tensor, a tuple or a dict; read for shapes and dtypes) lets the plan be made now. Without one,
    inputs are derived from a `transformers` config, or the plan is made at the first training forward. A later,
    larger batch is planned again. Returns the same object; `memscale.detach(model)` undoes everything.
    """
    config = _with_async(_checked_config(config), async_offload, async_config)
    if _is_trainer(target):
        from memscale.integrations.huggingface import wrap_trainer

        return cast(Target, wrap_trainer(target, config, _attach_unplanned))
    inputs = None if sample_input is None else Inputs.from_sample(sample_input)
    _attach(_model_of(target), config, inputs, None)
    return target


@contextlib.contextmanager
def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Iterator[Executor]:
    """`wrap` for the length of a `with` block; knows the optimizer, so the plan counts its state exactly."""
    inputs = None if sample_input is None else Inputs.from_sample(sample_input)
    executor = _attach(_model_of(model), _checked_config(config), inputs, _checked_optimizer(optimizer))
    try:
        yield executor
    finally:
        executor.detach()


def detach(model: nn.Module) -> None:
    """Leave the model as it was before `wrap`. Detaching what is not wrapped warns and does nothing."""
    executor = executor_of(_model_of(model))
    if executor is None:
        warnings.warn(f"this {type(model).__name__} is not wrapped; nothing to detach", stacklevel=2)
        return
    executor.detach()


def apply_all_optimizations(
    model: nn.Module, optimizer: Optimizer, config: Config | None = None, sample_input: Any = None
) -> tuple[nn.Module, Optimizer]:
    """Everything that the mode AGGRESSIVE allows, in one call. Returns the model and the optimizer to train with."""
    config = Config(mode="aggressive") if config is None else _checked_config(config)  # type: ignore[arg-type]
    inputs = None if sample_input is None else Inputs.from_sample(sample_input)
    _attach(_model_of(model), config, inputs, _checked_optimizer(optimizer))
    return model, optimizer


class _Planner(OwnHook):
    """A forward pre-hook: plans at the first training forward, and again when a larger batch comes."""

    def __init__(self, executor: Executor, config: Config, optimizer: str | Optimizer) -> None:
        self.executor = executor
        self.config = config
        self.optimizer = optimizer
        self.planned_elements = 0
        self._is_planning = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_planning or not (model.training and torch.is_grad_enabled()):
            return  # a real rehearsal runs the model, and with it this hook
        inputs = Inputs(args, kwargs)
        if _num_elements(inputs) > self.planned_elements:
            if self.executor.plan is not None:
                logger.info("a larger batch than planned for: planning again")
            self.plan(model, inputs, inside=True)

    def plan(self, model: nn.Module, inputs: Inputs, *, inside: bool = False) -> None:
        """`inside`: in the first moment of a forward, which is to follow the plan already."""
        # Copies of a wrapped model are plain, so a plan on fake tensors needs nothing taken off.
        self._is_planning = True
        try:
            plan = make_plan(model, inputs, self.config, self.optimizer, before_real=self.executor.suspend)
        finally:
            self._is_planning = False
        if inside:
            self.executor.apply_inside(plan, inputs.args, inputs.kwargs)
        else:
            self.executor.apply(plan)
        self.planned_elements = _num_elements(inputs)
        if self.config.enable_logging:
            console.show_plan(plan)


def _num_elements(inputs: Inputs) -> int:
    return sum(tensor.numel() for tensor in inputs.tensors())


def _attach_unplanned(model: nn.Module, config: Config, optimizer: Optimizer | None) -> Executor:
    """Wrap a model whose real batches are to come: the plan is made at its first training forward."""
    return _attach(model, config, None, optimizer, derive=False)


def _attach(
    model: nn.Module, config: Config, inputs: Inputs | None, optimizer: Optimizer | None, *, derive: bool = True
) -> Executor:
    """Wrap all or nothing: an error half-way leaves the model as it was."""
    earlier = executor_of(model)
    if earlier is not None:
        logger.info("%s was wrapped already: its plan is replaced", type(model).__name__)
        earlier.detach()
    device = device_of(model, config)
    hardware = Hardware.detect(device, config.offload_dir)
    executor = Executor(model, execution_settings(config, device, hardware), optimizer)
    try:
        executor.adopt()
        console.open_log(config, executor.on_detach)
        if config.enable_logging:
            console.show_hardware(hardware)
        _warn_of_slow_math(config, hardware)
        planner = _Planner(executor, config, optimizer if optimizer is not None else "adamw")
        if inputs is None and derive:
            inputs = derive_inputs(model)
        if inputs is not None:
            planner.plan(model, inputs)
        handle = model.register_forward_pre_hook(planner, prepend=True, with_kwargs=True)
        executor.on_detach(handle.remove)
    except BaseException:
        executor.detach()
        raise
    return executor


def _warn_of_slow_math(config: Config, hardware: Hardware) -> None:
    if not config.asks_for("use_mixed_precision"):
        return
    dtype = MixedPrecision.choose_dtype(
        hardware.device_type,
        supports_bf16=hardware.supports_bf16,
        supports_fp16=hardware.supports_fp16,
        has_fast_16bit=hardware.has_fast_16bit,
    )
    if dtype is None:
        warnings.warn(
            f"use_mixed_precision=True is not followed: {hardware.device_name} has no fast 16-bit math, so the model "
            "stays in full precision",
            stacklevel=4,
        )


def _model_of(target: object) -> nn.Module:
    if isinstance(target, nn.Module):
        return target
    if _is_trainer(target):
        return _model_of(target.model)
    raise TypeError(f"memscale.wrap takes an nn.Module or a transformers.Trainer, not {type(target).__name__}")


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
