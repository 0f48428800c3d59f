"""The public verbs. `make_plan` is the architecture: profile, decide, rehearse; `wrap` then executes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide import OPTIMIZER_BUCKET_BYTES, decide, explain_misfit, full_budget, needs_optimizing
from memscale._errors import DoesNotFitError, MemScaleError
from memscale._execute import ExecutionSettings, Executor, executor_of
from memscale._hardware import Hardware
from memscale._patching import OwnHook
from memscale._peak import INSIDE, CostModel, Outcome, choice_of
from memscale._plan import (
    Action,
    Checkpoint,
    OffloadActivations,
    Plan,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._policy import Strategy, choose_strategy
from memscale._profile import Profile
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.layers import find_blocks
from memscale._profile.optimizers import optimizer_cost
from memscale._profile.profiler import (
    ProfileSettings,
    open_rehearsal,
    profile_model,
    try_variant,
)
from memscale._profile.rehearsal import Attach, Rehearsal
from memscale.report import console
from memscale.techniques import tiling
from memscale.techniques.offload.buckets import split_into_buckets
from memscale.techniques.offload.separable import NotSeparable, check_separable

logger = logging.getLogger("memscale")

Target = TypeVar("Target")

MIN_TILE_ROWS = 128
"""Fewer rows at once make a tile's products slow."""
MLP_TILES = 4
_MAX_REHEARSALS = 4


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
    config = _with_async(config or Config(), async_offload, async_config)
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
    executor = _attach(_model_of(model), config or Config(), inputs, _checked_optimizer(optimizer))
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
    config = config or Config(mode="aggressive")  # type: ignore[arg-type]
    inputs = None if sample_input is None else Inputs.from_sample(sample_input)
    _attach(_model_of(model), config, inputs, _checked_optimizer(optimizer))
    return model, optimizer


def make_plan(
    model: nn.Module,
    inputs: Inputs,
    config: Config,
    optimizer: str | Optimizer = "adamw",
    hardware: Hardware | None = None,
    before_real: Callable[[], None] | None = None,
) -> Plan:
    """The stages in order: profile on fake tensors, decide, and rehearse what was decided.

    `before_real` is called before a real step is run on the model itself.
    """
    hardware = hardware or Hardware.detect(device_of(model, config), config.offload_dir)
    strategy = choose_strategy(config)
    rehearsal, profile = profile_step(model, inputs, config, optimizer, hardware, before_real)
    if needs_optimizing(profile, hardware, strategy.config):
        profile = with_variants(profile, rehearsal, model, strategy.config, optimizer, hardware)
    plan = decide_and_rehearse(profile, rehearsal, hardware, strategy)
    if not plan.fits:
        raise DoesNotFitError(explain_misfit(profile, plan, config))
    return plan


def decide_and_rehearse(profile: Profile, rehearsal: Rehearsal, hardware: Hardware, strategy: Strategy) -> Plan:
    """Decide, and decide again with what the rehearsal taught, until the plan fits or cannot."""
    margin_bytes = 0
    for _ in range(_MAX_REHEARSALS):
        decided = decide(
            profile, hardware, strategy.config, strategy.source, margin_bytes=margin_bytes, raise_if_unfit=False
        )
        plan = confirm(decided, profile, rehearsal, hardware, strategy.config)
        if plan.fits or not decided.fits:
            break
        margin_bytes += plan.predicted_peak_bytes - plan.budget_bytes
        logger.debug("the rehearsal peaked %d bytes above the budget: deciding again", margin_bytes)
    return plan


def profile_step(
    model: nn.Module,
    inputs: Inputs,
    config: Config,
    optimizer: str | Optimizer,
    hardware: Hardware,
    before_real: Callable[[], None] | None = None,
) -> tuple[Rehearsal, Profile]:
    """A stage for training steps of this model, and what the plain step costs on it."""
    settings = ProfileSettings(config.use_static_profiling, config.use_empirical_fallback, config.warmup_steps)
    split = _split_of(optimizer) if config.enable_offloading and has_next_tier(hardware, config) else None
    cost = optimizer_cost(model, optimizer, hardware.device_type, split=split)
    rehearsal, plain = open_rehearsal(model, inputs, torch.device(hardware.device_type), settings, before_real)
    return rehearsal, profile_model(model, rehearsal, plain, cost, inputs)


def _split_of(optimizer: str | Optimizer) -> Callable[[list[int]], list[list[int]]] | None:
    """How the optimizer's parameters would be split into buckets; None where its step cannot be split."""
    if isinstance(optimizer, Optimizer):
        try:
            check_separable(optimizer)
        except NotSeparable:
            return None
    return functools.partial(split_into_buckets, bucket_bytes=OPTIMIZER_BUCKET_BYTES)


def with_variants(
    profile: Profile,
    rehearsal: Rehearsal,
    model: nn.Module,
    config: Config,
    optimizer: str | Optimizer,
    hardware: Hardware,
) -> Profile:
    """The same profile with the step under each eligible technique beside the plain one."""
    treatments = _eligible_treatments(rehearsal, config, hardware)
    head, inside = _find_tiles(rehearsal) if config.enable_tiling else (None, ())
    variants = dict(treatments)
    if head is not None:
        variants["tile_head"] = (head,)
    if inside:
        variants |= {f"{INSIDE}{name}": (*inside, *actions) for name, actions in {"keep": (), **treatments}.items()}
    traces = {}
    for name, actions in variants.items():
        trace = try_variant(rehearsal, _attacher(actions, config, rehearsal), name)
        if trace is not None:
            traces[name] = trace
    rest = None
    if "stream" in traces:
        blocks = tuple(find_blocks(rehearsal.model))
        rest = optimizer_cost(model, optimizer, hardware.device_type, without=blocks)
    return dataclasses.replace(profile, variants=traces, head=head, inside=inside, rest_optimizer=rest)


def _eligible_treatments(rehearsal: Rehearsal, config: Config, hardware: Hardware) -> dict[str, tuple[Action, ...]]:
    """By treatment: the actions that give it to every block."""
    blocks = tuple(find_blocks(rehearsal.model))
    treatments: dict[str, tuple[Action, ...]] = {}
    if config.enable_checkpointing:
        treatments["checkpoint"] = tuple(Checkpoint(fqn) for fqn in blocks)
        treatments["selective"] = tuple(Checkpoint(fqn, keep=("matmul", "attention")) for fqn in blocks)
    if config.enable_offloading and has_next_tier(hardware, config):
        treatments["offload"] = tuple(OffloadActivations(fqn) for fqn in blocks)
        if config.enable_checkpointing and rehearsal.device_type != "cpu":
            treatments["stream"] = tuple(StreamParameters(fqn) for fqn in blocks)
    return treatments if blocks else {}


def _find_tiles(rehearsal: Rehearsal) -> tuple[TileHead | None, tuple[TileAttention | TileMlp, ...]]:
    """What could be tiled, found in a recorded forward."""
    with rehearsal.stage():
        recording = tiling.record(rehearsal.model, rehearsal.inputs.args, rehearsal.inputs.kwargs)
        head, attentions, mlps = (
            find(recording) for find in (tiling.find_head, tiling.find_attentions, tiling.find_mlps)
        )
    for found in (head, attentions, mlps):
        logger.debug("tiling: %s: %s", ", ".join(found.module_fqns) or "nothing", found.reason)
    action = None
    if head:
        rows = max(head.numbers["rows"], min(MIN_TILE_ROWS, head.numbers["num_rows"] // 4))
        action = TileHead(head.module_fqns[0], rows=rows, weight_fqn=head.weight_fqn)
    inside = [TileAttention(fqn, rows=MIN_TILE_ROWS) for fqn in attentions.module_fqns]
    return action, (*inside, *(TileMlp(fqn, num_tiles=MLP_TILES) for fqn in mlps.module_fqns))


def has_next_tier(hardware: Hardware, config: Config) -> bool:
    """Whether there is anywhere for tensors to wait: host memory beside a device, or a directory on disk."""
    if hardware.device_type == "cpu":
        return config.offload_dir is not None
    return not hardware.unified_memory


def confirm(plan: Plan, profile: Profile, rehearsal: Rehearsal, hardware: Hardware, config: Config) -> Plan:
    """The number holds: run this very plan on the stage, and promise what that shows."""
    if not plan.actions:
        return dataclasses.replace(plan, rehearsed=True)  # the profile was such a run
    trace = rehearsal.run(_attacher(plan.actions, config, rehearsal))
    peak_bytes = CostModel(profile, hardware).peak_of(trace, choice_of(plan.actions))
    shown = Outcome(peak_bytes, 0.0, plan.host_bytes, plan.movable_bytes)
    fits = full_budget(hardware, config).admits(shown)
    return dataclasses.replace(plan, predicted_peak_bytes=peak_bytes, fits=fits, rehearsed=True)


def _attacher(actions: tuple[Action, ...], config: Config, rehearsal: Rehearsal) -> Attach:
    settings = execution_settings(config, torch.device(rehearsal.device_type))
    return functools.partial(_rehearse_actions, actions, settings)


def _rehearse_actions(actions: tuple[Action, ...], settings: ExecutionSettings, model: nn.Module) -> Executor:
    executor = Executor(model, settings)
    executor.attach(actions)
    return executor


def execution_settings(config: Config, device: torch.device, hardware: Hardware | None = None) -> ExecutionSettings:
    return ExecutionSettings(
        device=device,
        verify=config.verify_correctness,
        asynchronous=config.async_offload,
        async_config=config.async_config or AsyncOffloadConfig(),
        host_budget_bytes=None if hardware is None else full_budget(hardware, config).host_bytes,
        offload_dir=config.offload_dir,
    )


def device_of(model: nn.Module, config: Config) -> torch.device:
    """Where the model computes: as configured, else where its parameters are."""
    if config.device is not None:
        return torch.device(config.device)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


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
            self.plan(model, inputs)

    def plan(self, model: nn.Module, inputs: Inputs) -> None:
        # Copies of a wrapped model are plain, so a plan on fake tensors needs nothing taken off.
        self._is_planning = True
        try:
            plan = make_plan(model, inputs, self.config, self.optimizer, before_real=self.executor.suspend)
        finally:
            self._is_planning = False
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


def _model_of(target: object) -> nn.Module:
    if isinstance(target, nn.Module):
        return target
    if _is_trainer(target):
        return _model_of(target.model)
    raise TypeError(f"memscale.wrap takes an nn.Module or a transformers.Trainer, not {type(target).__name__}")


def _is_trainer(target: Any) -> TypeGuard[Any]:
    trainer = sys.modules.get("transformers.trainer")  # not loaded: then nobody can have made one
    return trainer is not None and isinstance(target, trainer.Trainer)


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
