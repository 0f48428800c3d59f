"""The architecture in order: profile a step, decide, rehearse what was decided. What follows is `execute`.

This is the one place where the stages meet; only frozen data crosses between them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide import OPTIMIZER_BUCKET_BYTES, decide, explain_misfit, full_budget, needs_optimizing
from memscale._errors import DoesNotFitError
from memscale._execute import ExecutionSettings, Executor
from memscale._hardware import Hardware
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
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.optimizers import optimizer_cost
from memscale._profile.profiler import ProfileSettings, open_rehearsal, profile_model, try_variant
from memscale._profile.rehearsal import Attach, Rehearsal
from memscale.techniques import tiling
from memscale.techniques.offload.buckets import split_into_buckets
from memscale.techniques.offload.separable import NotSeparable, check_separable

logger = logging.getLogger("memscale")

MIN_TILE_ROWS = 128
"""Fewer rows at once make a tile's products slow."""
MLP_TILES = 4
_MAX_REHEARSALS = 4


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
