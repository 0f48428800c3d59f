"""The architecture in order: profile a step, decide, rehearse what was decided. What follows is `execute`.

This is the one place where the stages meet; only frozen data crosses between them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide import (
    OPTIMIZER_BUCKET_BYTES,
    cut_inside,
    decide,
    explain_misfit,
    full_budget,
    needs_optimizing,
)
from memscale._errors import DoesNotFitError
from memscale._execute import ExecutionSettings, Executor
from memscale._hardware import Hardware
from memscale._peak import INSIDE, TILE_HEAD, Choice, CostModel, Outcome, choice_of, tile_name
from memscale._plan import (
    Action,
    Checkpoint,
    OffloadActivations,
    Plan,
    Reason,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._policy import Strategy, choose_strategy
from memscale._profile import OptimizerCost, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.optimizers import optimizer_cost
from memscale._profile.profiler import ProfileSettings, open_rehearsal, profile_model, try_variant
from memscale._profile.rehearsal import Attach, Rehearsal
from memscale._profile.shallow import ShallowRehearsal, open_shallow
from memscale.techniques import tiling
from memscale.techniques.offload.buckets import split_into_buckets
from memscale.techniques.offload.separable import NotSeparable, check_separable

logger = logging.getLogger("memscale")

MIN_TILE_ROWS = 128
"""Fewer rows at once make the head's products slow."""
MAX_INNER_TILES, MIN_INNER_ROWS = 16, 16
"""Attention and MLPs are cut into two to so many tiles, of at least so many positions."""
_MAX_REHEARSALS = 4


def make_plan(
    model: nn.Module,
    inputs: Inputs,
    config: Config,
    optimizer: str | Optimizer = "adamw",
    hardware: Hardware | None = None,
    before_real: Callable[[], None] | None = None,
) -> Plan:
    """The stages in order: profile, choose a strategy, decide, rehearse. `DoesNotFitError` when nothing fits.

    `before_real` is called before a real step is run on the model itself.
    """
    hardware = hardware or Hardware.detect(device_of(model, config), config.offload_dir)
    study = Study(model, inputs, config, optimizer, hardware, before_real)
    plan = study.plan(choose_strategy(config))
    if not plan.fits:
        raise DoesNotFitError(explain_misfit(study.profile, plan, config))
    return plan


class Study:
    """One model's step on one hardware: the stage where it can be tried, and the profile of what was tried so far.

    Techniques are tried only when a plan needs them, each once; several strategies can be planned on one study.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        config: Config,
        optimizer: str | Optimizer,
        hardware: Hardware,
        before_real: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.optimizer = optimizer
        self.hardware = hardware
        settings = ProfileSettings(config.use_static_profiling, config.use_empirical_fallback, config.warmup_steps)
        split = _split_of(optimizer) if has_next_tier(hardware, config) else None
        cost = optimizer_cost(model, optimizer, hardware.device_type, split=split)
        device = torch.device(hardware.device_type)
        self.rehearsal, plain = open_rehearsal(model, inputs, device, settings, before_real)
        self.profile = profile_model(model, self.rehearsal, plain, cost, inputs)
        self._tried: set[str] = set()
        self._tiles: _Tiles | None = None
        self._resident: dict[tuple[str, ...], OptimizerCost] = {}
        self._traces: dict[str, StepTrace] = {}

    def plan(self, strategy: Strategy) -> Plan:
        """The cheapest plan that fits under this strategy; `plan.fits` is False when there is none."""
        config = strategy.config
        if not needs_optimizing(self.profile, self.hardware, config):
            return self._decide_and_rehearse(strategy)
        self._try(self._treatments(config), config)
        if config.enable_tiling:
            self._try_head(config)
        if not config.enable_tiling:
            return self._decide_and_rehearse(strategy)
        if not config.force_optimize:
            plan = self._decide_and_rehearse(strategy)
            if plan.fits:
                return plan
        self._try_inside(config)  # dear to find out, and of use only when nothing else is left
        return self._decide_and_rehearse(strategy)

    def _decide_and_rehearse(self, strategy: Strategy) -> Plan:
        """Decide, and decide again with what the rehearsal taught, until the plan fits or cannot."""
        margin_bytes = 0
        for _ in range(_MAX_REHEARSALS):
            decided = decide(
                self.profile,
                self.hardware,
                strategy.config,
                strategy.source,
                margin_bytes=margin_bytes,
                raise_if_unfit=False,
            )
            plan = self._confirm(decided, strategy.config)
            if plan.fits or not decided.fits:
                break
            margin_bytes += plan.predicted_peak_bytes - plan.budget_bytes
            logger.debug("the rehearsal peaked %d bytes above the budget: deciding again", margin_bytes)
        return plan

    def _confirm(self, plan: Plan, config: Config) -> Plan:
        """The number holds: run this very plan on the stage, and promise what that shows."""
        if not plan.actions:
            return dataclasses.replace(plan, rehearsed=True)  # the profile was such a run
        trace = self._rehearsed(plan.actions, config)
        choice = choice_of(plan.actions)
        peak_bytes = CostModel(self.profile, self.hardware).peak_of(trace, choice, self._resident_optimizer(choice))
        shown = Outcome(peak_bytes, 0.0, plan.host_bytes, plan.movable_bytes)
        fits = full_budget(self.hardware, config).admits(shown)
        return dataclasses.replace(plan, predicted_peak_bytes=peak_bytes, fits=fits, rehearsed=True)

    def _rehearsed(self, actions: tuple[Action, ...], config: Config) -> StepTrace:
        without_reasons = [dataclasses.replace(action, reason=Reason("")) for action in actions]
        key = f"{without_reasons} {config.async_offload}"
        if key not in self._traces:
            self._traces[key] = self.rehearsal.run(self._attacher(actions, config))
        return self._traces[key]

    def _resident_optimizer(self, choice: Choice) -> OptimizerCost | None:
        """The optimizer over what is not streamed, to the byte."""
        streamed = tuple(fqn for fqn, treatment in choice.blocks if treatment == "stream")
        if not streamed or choice.run.offloads_optimizer:
            return None
        if streamed not in self._resident:
            self._resident[streamed] = optimizer_cost(
                self.model, self.optimizer, self.hardware.device_type, without=streamed
            )
        return self._resident[streamed]

    # ---- trying techniques

    def _try(self, variants: Mapping[str, tuple[Action, ...]], config: Config) -> None:
        traces = dict(self.profile.variants)
        for name, actions in variants.items():
            if name not in self._tried:
                self._tried.add(name)
                trace = self._tried_trace(name, actions, config)
                if trace is not None:
                    traces[name] = trace
        rest = self.profile.rest_optimizer
        if "stream" in traces and rest is None:
            blocks = tuple(find_blocks(self.rehearsal.model))
            rest = optimizer_cost(self.model, self.optimizer, self.hardware.device_type, without=blocks)
        self.profile = dataclasses.replace(self.profile, variants=traces, rest_optimizer=rest)

    def _tried_trace(self, name: str, actions: tuple[Action, ...], config: Config) -> StepTrace | None:
        """On a shorter model where that shows the same."""
        shallow = self.shallow
        if shallow is not None:
            names = {None, *(name for name, _ in shallow.stage.model.named_modules())}
            here = tuple(action for action in actions if getattr(action, "module_fqn", None) in names)
            trace = try_variant(shallow.stage, self._attacher(here, config), name)
            return None if trace is None else shallow.stretch(trace)
        return try_variant(self.rehearsal, self._attacher(actions, config), name)

    @functools.cached_property
    def shallow(self) -> ShallowRehearsal | None:
        if not self.rehearsal.is_fake:
            return None
        return open_shallow(self.model, self.inputs, self.hardware.device_type, self.profile.plain)

    def _treatments(self, config: Config) -> dict[str, tuple[Action, ...]]:
        """By eligible treatment: the actions that give it to every block."""
        blocks = tuple(find_blocks(self.rehearsal.model))
        treatments: dict[str, tuple[Action, ...]] = {}
        if config.enable_checkpointing:
            treatments["checkpoint"] = tuple(Checkpoint(fqn) for fqn in blocks)
            treatments["selective"] = tuple(Checkpoint(fqn, keep=("matmul", "attention")) for fqn in blocks)
        if config.enable_offloading and has_next_tier(self.hardware, config):
            treatments["offload"] = tuple(OffloadActivations(fqn) for fqn in blocks)
            if config.enable_checkpointing and self.hardware.device_type != "cpu":
                treatments["stream"] = tuple(StreamParameters(fqn) for fqn in blocks)
        return treatments if blocks else {}

    def _try_head(self, config: Config) -> None:
        """The smallest tiles and the largest: what lies between, the peak model knows."""
        head = self.tiles.head
        if head is not None:
            self.profile = dataclasses.replace(self.profile, head=head)
            ends = {
                tile_name(TILE_HEAD, rows): (dataclasses.replace(head, rows=rows),) for rows in self.tiles.head_rows
            }
            self._try(ends, config)

    def _try_inside(self, config: Config) -> None:
        inside = self.tiles.inside
        if inside:
            self.profile = dataclasses.replace(self.profile, inside=inside)
            smallest = {k: v for k, v in self._treatments(config).items() if k in ("checkpoint", "stream")}
            for num_tiles in self.tiles.num_inside:
                cut = cut_inside(inside, num_tiles)
                named = {tile_name(INSIDE, num_tiles, name): (*cut, *actions) for name, actions in smallest.items()}
                self._try(named, config)

    @property
    def tiles(self) -> _Tiles:
        if self._tiles is None:
            self._tiles = _find_tiles(self.rehearsal, self.shallow)
        return self._tiles

    def _attacher(self, actions: tuple[Action, ...], config: Config) -> Attach:
        settings = execution_settings(config, torch.device(self.rehearsal.device_type))
        return functools.partial(_rehearse_actions, actions, settings)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """What could be tiled, and how finely."""

    head: TileHead | None
    head_rows: tuple[int, ...]
    """The smallest and the largest tile worth having."""
    inside: tuple[TileAttention | TileMlp, ...]
    """In two tiles each."""
    num_inside: tuple[int, ...]


def _find_tiles(whole: Rehearsal, shallow: ShallowRehearsal | None) -> _Tiles:
    """By a recorded forward."""
    rehearsal = whole if shallow is None else shallow.stage
    with rehearsal.stage():
        recording = tiling.record(rehearsal.model, rehearsal.inputs.args, rehearsal.inputs.kwargs)
        finders = (tiling.find_head, tiling.find_attentions, tiling.find_mlps)
        head, attentions, mlps = (find(recording) for find in finders)
    for found in (head, attentions, mlps):
        logger.debug("tiling: %s: %s", ", ".join(found.module_fqns) or "nothing", found.reason)
    action: TileHead | None = None
    head_rows: tuple[int, ...] = ()
    if head:
        head_rows = _head_rows(head.numbers["num_rows"], head.numbers["rows"])
        action = TileHead(head.module_fqns[0], rows=head_rows[0], weight_fqn=head.weight_fqn)
    inside: list[TileAttention | TileMlp] = []
    for fqn in attentions.module_fqns:
        rows = -(-attentions.numbers[fqn] // 2)
        inside += [TileAttention(name, rows=rows) for name in _whole_names(shallow, fqn)]
    for fqn in mlps.module_fqns:
        inside += [TileMlp(name, num_tiles=2) for name in _whole_names(shallow, fqn)]
    longest = max([*attentions.numbers.values(), *mlps.numbers.values()], default=0)
    num_inside = sorted({2, min(MAX_INNER_TILES, _power_of_two_below(longest // MIN_INNER_ROWS + 1))} - {0, 1})
    order = {name: index for index, (name, _) in enumerate(whole.model.named_modules())}
    inside.sort(key=lambda action: order[action.module_fqn])
    return _Tiles(action, head_rows, tuple(inside), tuple(num_inside))


def _whole_names(shallow: ShallowRehearsal | None, module_fqn: str) -> list[str]:
    return [module_fqn] if shallow is None else shallow.whole_names([module_fqn])


def _head_rows(num_rows: int, suggested: int) -> tuple[int, ...]:
    """From tiles that are small but still fast to the largest that are smaller than the batch."""
    largest = _power_of_two_below(num_rows)
    smallest = min(largest, max(suggested, min(MIN_TILE_ROWS, num_rows // 4), 1))
    return tuple(sorted({smallest, largest}))


def _power_of_two_below(number: int) -> int:
    """The largest power of two that is smaller; 0 if there is none."""
    return 1 << ((number - 1).bit_length() - 1) if number > 1 else 0


def _rehearse_actions(actions: tuple[Action, ...], settings: ExecutionSettings, model: nn.Module) -> Executor:
    executor = Executor(model, settings)
    executor.attach(actions)
    return executor


def _split_of(optimizer: str | Optimizer) -> Callable[[list[int]], list[list[int]]] | None:
    """How the optimizer's parameters would be split into buckets; None where its step cannot be split."""
    if isinstance(optimizer, Optimizer):
        try:
            check_separable(optimizer)
        except NotSeparable:
            return None
    return functools.partial(split_into_buckets, bucket_bytes=OPTIMIZER_BUCKET_BYTES)


def has_next_tier(hardware: Hardware, config: Config) -> bool:
    """Whether there is anywhere for tensors to wait: host memory beside a device, or a directory on disk."""
    if hardware.device_type == "cpu":
        return config.offload_dir is not None
    return not hardware.unified_memory


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
