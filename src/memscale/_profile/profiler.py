"""`profile_model`: one training step tried on a stage, plain and under each technique, written down as a `Profile`."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale import _torch_private
from memscale._errors import ProfileError
from memscale._memory import LiveBytes
from memscale._profile import Layer, OptimizerCost, Profile, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.layers import describe_layers
from memscale._profile.rehearsal import Attach, FakeRehearsal, RealRehearsal, Rehearsal

logger = logging.getLogger("memscale")

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adafactor": ("Adafactor", {}),
}
"""Optimizers that can be named in `estimate`; `"none"` is inference-like training without one."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Which stages may be used."""

    static: bool = True
    empirical: bool = True
    warmup_steps: int = 2


def open_rehearsal(
    model: nn.Module, inputs: Inputs, device: torch.device, settings: ProfileSettings
) -> tuple[Rehearsal, StepTrace]:
    """The first stage on which the plain step runs, and that step: fake tensors, then a real run."""
    refusals = []
    if settings.static:
        try:
            rehearsal: Rehearsal = FakeRehearsal(model, inputs, device.type)
            return rehearsal, rehearsal.run()
        except Exception as error:  # whatever a user's model raises on fake tensors: a real step may still work
            refusals.append(f"on fake tensors: {type(error).__name__}: {error}")
            logger.debug("static profiling failed", exc_info=True)
    if settings.empirical and _has_real_tensors(model):
        logger.info("fake tensors do not suffice for this model (%s); running a real step", "; ".join(refusals))
        try:
            rehearsal = RealRehearsal(model, inputs, device, settings.warmup_steps)
            return rehearsal, rehearsal.run()
        except Exception as error:
            refusals.append(f"by a real step: {type(error).__name__}: {error}")
            raise ProfileError(_refusal(model, refusals)) from error
    raise ProfileError(_refusal(model, refusals))


def _refusal(model: nn.Module, refusals: list[str]) -> str:
    tried = "; ".join(refusals) or "both profilers are switched off"
    return (
        f"{type(model).__name__} could not be profiled: {tried}. "
        "Check that sample_input is what the model's forward takes in training."
    )


def _has_real_tensors(model: nn.Module) -> bool:
    return all(parameter.device.type != "meta" for parameter in model.parameters())


def profile_model(
    model: nn.Module, rehearsal: Rehearsal, plain: StepTrace, optimizer: OptimizerCost, inputs: Inputs
) -> Profile:
    """What the plain step on this stage has shown."""
    books = rehearsal.books()
    books.see_all(list(rehearsal.model.parameters()), "parameters")
    books.see_all(list(rehearsal.model.buffers()), "other")
    buffer_bytes = books.by_kind["other"]
    books.see_all((rehearsal.inputs.args, rehearsal.inputs.kwargs), "activations")
    layers = tuple(_with_calls(layer, rehearsal.num_calls) for layer in describe_layers(model))
    return Profile(
        device_type=rehearsal.target_type,
        source=rehearsal.source,
        model_class=type(model).__name__,
        inputs=inputs.specs(),
        parameter_bytes=books.by_kind["parameters"],
        buffer_bytes=buffer_bytes,
        input_bytes=books.by_kind["activations"],
        layers=layers,
        optimizer=optimizer,
        plain=plain,
    )


def _with_calls(layer: Layer, num_calls: dict[str, int]) -> Layer:
    return dataclasses.replace(layer, num_calls=num_calls.get(layer.module_fqn, 0))


def try_variant(rehearsal: Rehearsal, attach: Attach, name: str) -> StepTrace | None:
    """The step with a technique on every block; None where the technique does not run on this model."""
    try:
        return rehearsal.run(attach)
    except Exception as error:  # e.g. an in-place operator on a kept output: then the technique is not eligible
        logger.info("%s does not run on this model: %s: %s", name, type(error).__name__, error)
        return None


def optimizer_cost(model: nn.Module, optimizer: str | Optimizer, device_type: str) -> OptimizerCost:
    """State and step temporaries of an optimizer, by running two of its steps on fake parameters."""
    if optimizer == "none":
        return OptimizerCost("none", 0, 0, 0)
    try:
        return _run_twin(model, optimizer, device_type)
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        if isinstance(optimizer, str):
            raise
        logger.warning(
            "%s cannot be tried on fake tensors (%s: %s); its state is taken to be AdamW's",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        cost = _run_twin(model, "adamw", device_type)
        return dataclasses.replace(cost, name=f"{type(optimizer).__name__}, taken as AdamW")


def _run_twin(model: nn.Module, optimizer: str | Optimizer, device_type: str) -> OptimizerCost:
    rounding = 1 if device_type == "cpu" else 512
    mode = _torch_private.fake_tensor_mode()
    books = LiveBytes("cpu", rounding, counts_fakes=True)
    twin = _build_twin(model, optimizer, mode, foreach=device_type != "cpu")
    parameters = [p for group in twin.param_groups for p in group["params"]]
    with mode:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        books.see_all([parameters, [p.grad for p in parameters]])
        with books:
            before = books.total_bytes
            twin.step()
            state_bytes = books.total_bytes - before
            books.reset_peak()
            twin.step()
            step_bytes = books.peak_bytes - before - state_bytes
    gradient_bytes = sum(p.nbytes for p in parameters)
    moved_bytes = 3 * gradient_bytes + 2 * state_bytes
    return OptimizerCost(_name_of(optimizer), state_bytes, max(0, step_bytes), moved_bytes)


def _name_of(optimizer: str | Optimizer) -> str:
    return optimizer if isinstance(optimizer, str) else type(optimizer).__name__


def _build_twin(model: nn.Module, optimizer: str | Optimizer, mode: Any, *, foreach: bool) -> Optimizer:
    """The same optimizer over fake parameters on the CPU, choosing its implementation as the real device would."""
    fakes: dict[int, nn.Parameter] = {}

    def fake(parameter: torch.Tensor) -> nn.Parameter:
        if id(parameter) not in fakes:
            with mode:
                empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
            fakes[id(parameter)] = nn.Parameter(empty)
        return fakes[id(parameter)]

    if isinstance(optimizer, str):
        class_name, options = OPTIMIZERS[optimizer]
        groups = [{"params": [fake(p) for p in model.parameters() if p.requires_grad]}]
        twin: Optimizer = getattr(torch.optim, class_name)(groups, **options)
    else:
        groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": [fake(p) for p in group["params"] if p.requires_grad],
            }
            for group in optimizer.param_groups
        ]
        twin = _same_class(optimizer, groups)
    for group in twin.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = foreach
    return twin


def _same_class(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and hyperparameters over other parameters, without state or hooks."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(twin, name, type(value)())
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    return twin
