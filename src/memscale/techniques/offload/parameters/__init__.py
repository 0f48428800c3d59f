"""Parameter streaming (exact): parameters have homes on the host and visit the device.

Blocks are streamed one by one; the rest of the model (embeddings, norms, heads) is streamed as a whole.

    streaming, streamer, parameter_homes                 a layer's forward, what travels, and where it lives
    borrowed_weights, inner_checkpoints, newcomers       weights outside of their layer, checkpoints and changes in it
    sum_order, gradient_norms                            sums of gradients, and of their norms, in plain PyTorch's order
    state_placement, state_following, step_visits        optimizer state beside its parameters, also for a step
    computing_device, placed_copies                      which device the model, and a copy of it, says and has
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._config import Config
from memscale._hardware import Hardware
from memscale._plan import OffloadActivations, Reason, StreamParameters
from memscale._profile import STREAM, STREAM_OFFLOAD, Layer, Profile, TraceKey
from memscale.techniques.offload.next_tier import no_next_tier
from memscale.techniques.technique import RunOption, Technique, Traced, Treated

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials

HOST_KERNELS = ("cpu", "simgpu")
"""Devices that compute with the host's own kernels, so that a step on the host has the same bits as one there."""


def _hindrance(config: Config, hardware: Hardware) -> str:
    missing = no_next_tier(config, hardware)
    if not missing and hardware.device_type == "cpu":
        return "the parameters of a CPU's model are in its memory anyway"
    if not missing and not config.enable_checkpointing:
        return "a streamed block is recomputed, and enable_checkpointing=False"
    if not missing and config.step_in_backward:
        return "streamed parameters are stepped on the host, after backward, and step_in_backward=True"
    return missing


def _attach(actions: Sequence[StreamParameters], to: Attachment) -> None:
    from memscale.techniques.offload.parameters import streaming

    settings, to.at_home = to.settings, actions
    how = streaming.Streaming(
        asynchronous=settings.asynchronous,
        prefetch_depth=settings.async_config.prefetch_depth,
        host_budget_bytes=settings.host_budget_bytes,
        gradient_window_bytes=min(settings.async_config.window_bytes, streaming.GRADIENT_WINDOW_BYTES),
        verify=settings.verify,
        placed_from=to.placed_from,
    )
    previous = to.offloading.handed_over
    streamer = to.users["streaming"] = streaming.attach(actions, to.model, to.device, to.undo, how, previous)
    to.lessons.append(streamer.known_order)
    to.offloading.handed_over = None


def _outcome(actions: Sequence[StreamParameters]) -> str:
    return f"the parameters of {len(actions)} blocks"


# ---- the rest of the model beside its blocks


def _rest_values(traced: Traced, eligible: Eligible) -> tuple[bool, ...]:
    return (True,) if traced.profile.rest else ()


def _rest_actions(is_streamed: bool, profile: Profile) -> Iterator[StreamParameters]:
    return (StreamParameters(module_fqn) for module_fqn in profile.rest)


def _rest_value(actions: Sequence[Any], profile: Profile) -> bool:
    return bool(actions)


def _rest_in_row(layer: Layer, profile: Profile) -> tuple[str, ...]:
    is_rest = any(f"{fqn}.".startswith(f"{layer.module_fqn}.") for fqn in profile.rest)
    return ("stream parameters",) if is_rest else ()


def _rest_reason(chosen: Chosen) -> Reason:
    return Reason("stream parameters", {"parameter_bytes": chosen.model.profile.rest_param_bytes})


def _rehearse(trials: Trials, eligible: Eligible) -> None:
    rest = trials.rest_actions()
    if rest:
        trials.try_variants({TraceKey(streams_rest=True): rest}, eligible)


def _note(device_type: str, names: frozenset[str]) -> str:
    """Say where bits may differ from the plain model's although nothing of the plan is an approximation."""
    if device_type in HOST_KERNELS or "device step" in names:
        return ""
    return (
        "parameters that are streamed are stepped by the host's kernels: by the same formula as on "
        f"{device_type}, which may round the last bit differently"
    )


PARAMETERS = Technique(
    name="parameter streaming",
    family="offloading",
    switch="enable_offloading",
    actions=(StreamParameters,),
    scope="block",
    travels=True,
    hindrance=_hindrance,
    treatments=(
        Treated(STREAM, (StreamParameters(""),)),
        Treated(STREAM_OFFLOAD, (StreamParameters(""), OffloadActivations(""))),
    ),
    traits=lambda action: {"recompute": "full", "streams": True},
    recomputes=True,
    option=RunOption(
        field="streams_rest",
        values=_rest_values,
        actions=_rest_actions,
        value=_rest_value,
        in_row=_rest_in_row,
    ),
    step=lambda actions: {"streams": True},
    rehearse=_rehearse,
    settling_steps=2,
    attach=_attach,
    place=50,
    places_model=True,
    words=lambda action: "stream parameters",
    begins=("stream parameters",),
    outcome=_outcome,
    outcome_rank=30,
    reason=_rest_reason,
    note=_note,
)
