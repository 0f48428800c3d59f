"""`profile_model`: one training step tried on a stage, plain and under each technique, written down as a `Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from memscale._errors import MemScaleError, ProfileError, StaticProfileError, quoted
from memscale._profile import NOTHING_HELD, Layer, LoopHolds, OptimizerCost, Profile, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.layers import describe_layers
from memscale._profile.rehearsal import Attach, FakeRehearsal, Rehearsal
from memscale._profile.sharding import sharding_of
from memscale._progress import stage
from memscale._torch import private

logger = logging.getLogger("memscale")


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
    *,
    static: bool = True,
    holds_gradients: bool = False,
    num_shards: int = 1,
    loop: LoopHolds = NOTHING_HELD,
) -> tuple[FakeRehearsal, StepTrace]:
    """A stage of fake tensors, and the plain step on it; `StaticProfileError` where those do not suffice.

    `holds_gradients`: steps are those of a loop that accumulates gradients over several batches. `num_shards`: the
    ranks that share the model out. `loop`: what else it holds.
    """
    if not static:
        raise _needs_observation(model, "use_static_profiling is off")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise _needs_observation(model, "a rehearsal of a distributed model would communicate")
    if reason := private.why_not_rehearsed(model):
        raise _needs_observation(model, reason)
    try:
        with (
            stage(f"rehearsing a training step of {type(model).__name__} on fake tensors"),
            _unlogged("torch._subclasses.fake_tensor"),  # its traceback, when what it says is in our error
        ):
            rehearsal = FakeRehearsal(model, inputs, device.type)
            rehearsal.holds_gradients, rehearsal.loop = holds_gradients, loop
            if num_shards > 1:
                rehearsal.sharding = sharding_of(model, rehearsal.blocks, num_shards)
            plain = rehearsal.run()
            if holds_gradients and rehearsal.untrained:
                plain = rehearsal.run()  # without gradients that no batch leaves behind
            return rehearsal, plain
    except private.CommunicatesError as error:
        raise _communicates(model, error) from error
    except Exception as error:  # whatever a user's model raises on fake tensors: it may still train
        logger.debug("static profiling failed", exc_info=True)
        needs_values = private.asks_for_values(error)
        raise _refusal(model, f"on fake tensors: {quoted(error)}", needs_values=needs_values) from error


def _communicates(model: nn.Module, error: Exception) -> MemScaleError:
    """What ranks send each other may not depend on their plans, and a plan may compute a part of a forward twice."""
    return MemScaleError(
        f"{type(model).__name__} communicates with other processes in its forward ({error}), which MemScale cannot "
        "plan: a part that is computed again in backward would communicate again, and on one rank alone where the "
        "plans of ranks differ. Wrap a part of the model that does not communicate (memscale.wrap(model.encoder)), or "
        "let the loss outside of the model do it"
    )


@contextlib.contextmanager
def _unlogged(name: str) -> Iterator[None]:
    other = logging.getLogger(name)
    level = other.level
    other.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        other.setLevel(level)


def _needs_observation(model: nn.Module, reason: str) -> StaticProfileError:
    """Nothing is wrong with the inputs, and yet there is no rehearsal."""
    return _refusal(model, reason, needs_values=True)


def _refusal(model: nn.Module, reason: str, *, needs_values: bool) -> StaticProfileError:
    what = f"{type(model).__name__} could not be profiled before it is trained: {reason}."
    remedy = (
        "Check that sample_input is what the model's forward takes in training. Without a sample_input, "
        "memscale.wrap() plans such a model from its first training steps."
    )
    return StaticProfileError(f"{what} {remedy}", what=what, needs_values=needs_values)


def profile_model(
    model: nn.Module, rehearsal: FakeRehearsal, plain: StepTrace, optimizer: OptimizerCost, inputs: Inputs
) -> Profile:
    """What the plain step on this stage has shown."""
    books = rehearsal.books()
    books.see_all(list(rehearsal.model.parameters()), "parameters")
    books.see_all(list(rehearsal.model.buffers()), "other")
    buffer_bytes = books.by_kind["other"]
    books.see_all(rehearsal.inputs.tensors(), "activations")
    layers = tuple(_with_calls(layer, rehearsal.num_calls) for layer in describe_layers(model, rehearsal.blocks))
    sharding = rehearsal.sharding
    return Profile(
        device_type=rehearsal.target_type,
        source=rehearsal.source,
        model_class=type(model).__name__,
        inputs=inputs.specs(),
        parameter_bytes=books.by_kind["parameters"] if sharding is None else sharding.parameter_bytes,
        buffer_bytes=buffer_bytes,
        input_bytes=books.by_kind["activations"],
        layers=layers,
        optimizer=optimizer,
        plain=plain,
        deciding_inputs=rehearsal.deciding_inputs,
    )


def _with_calls(layer: Layer, num_calls: dict[str, int]) -> Layer:
    return dataclasses.replace(layer, num_calls=num_calls.get(layer.module_fqn, 0))


def try_variant(rehearsal: Rehearsal, attach: Attach, what: str) -> StepTrace | None:
    """The step with a technique on every block; None where the technique does not run on this model."""
    try:
        with stage(f"rehearsing a step with {what}"):
            return rehearsal.run(attach)
    except Exception as error:  # e.g. an in-place operator on a kept output: then the technique is not eligible
        logger.info("a step with %s does not run on this model: %s", what, quoted(error))
        logger.debug("a step with %s failed", what, exc_info=True)
        return None
