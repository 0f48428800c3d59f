"""`profile_model`: one training step tried on a stage, plain and under each technique, written down as a `Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memscale._errors import ProfileError
from memscale._profile import Layer, OptimizerCost, Profile, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.layers import describe_layers
from memscale._profile.rehearsal import Attach, FakeRehearsal, RealRehearsal, Rehearsal, device_exists

logger = logging.getLogger("memscale")


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Which stages may be used."""

    static: bool = True
    empirical: bool = True
    warmup_steps: int = 2
    holds_gradients: bool = False
    """Steps are those of a loop that accumulates gradients over several batches."""


def refuse_unprofilable(model: nn.Module) -> None:
    """Say at once what no stage can do anything about."""
    name = type(model).__name__
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ProfileError(f"{name} has uninitialized (lazy) parameters: run a batch through it first")
    for module_fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name}.{module_fqn}" if module_fqn else name
            raise ProfileError(f"{where} is TorchScript, which takes no hooks: use the model that it was made from")


def open_rehearsal(
    model: nn.Module,
    inputs: Inputs,
    device: torch.device,
    settings: ProfileSettings,
    before_real: Callable[[], None] | None = None,
) -> tuple[Rehearsal, StepTrace]:
    """The first stage on which the plain step runs, and that step: fake tensors, then a real run."""
    refusals = []
    if settings.static:
        try:
            with _unlogged("torch._subclasses.fake_tensor"):  # its traceback, when what it says is in our error
                rehearsal: Rehearsal = FakeRehearsal(model, inputs, device.type)
                rehearsal.holds_gradients = settings.holds_gradients
                plain = rehearsal.run()
                if rehearsal.holds_gradients and rehearsal.untrained:
                    plain = rehearsal.run()  # without gradients that no batch leaves behind
                return rehearsal, plain
        except Exception as error:  # whatever a user's model raises on fake tensors: a real step may still work
            refusals.append(f"on fake tensors: {_said(error)}")
            logger.debug("static profiling failed", exc_info=True)
    if settings.empirical and _has_real_tensors(model) and device_exists(device.type):
        logger.info("fake tensors do not suffice for this model (%s); running a real step", "; ".join(refusals))
        if before_real is not None:
            before_real()
        if any(parameter.device.type != device.type for parameter in model.parameters()):
            refusals.append(f"no real step: the model does not lie on {device}; move it there before it is wrapped")
            raise ProfileError(_refusal(model, refusals))
        try:
            rehearsal = RealRehearsal(model, inputs, device, settings.warmup_steps)
            rehearsal.holds_gradients = settings.holds_gradients
            return rehearsal, rehearsal.run()
        except Exception as error:
            refusals.append(f"by a real step: {_said(error)}")
            raise ProfileError(_refusal(model, refusals)) from error
    raise ProfileError(_refusal(model, refusals))


@contextlib.contextmanager
def _unlogged(name: str) -> Iterator[None]:
    other = logging.getLogger(name)
    level = other.level
    other.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        other.setLevel(level)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('. ')}"


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
    books.see_all(rehearsal.inputs.tensors(), "activations")
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
