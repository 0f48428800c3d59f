"""Streamed parameters are stepped on the device (exact): they, their gradients and their state visit it for the step.

The host's kernels compute the same formula, but may round the last bit differently from a GPU's, and a step on the host
reads and writes all of these tensors in host memory. On the device, the step has the bits of a model that is not
streamed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memscale._config import Config
from memscale._hardware import Hardware
from memscale._plan import OPTIMIZER_BUCKET_BYTES, Action, Reason, check_count
from memscale._profile import Profile
from memscale.techniques.offload.next_tier import no_next_tier
from memscale.techniques.technique import RunOption, Technique, Traced, Unrehearsed

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment


_ASKED_FOR = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class StepOnDevice(Action):
    """Streamed parameters visit the device, with their gradients and state, to be stepped there a few at a time."""

    bucket_bytes: int
    """The bytes of parameters that visit the device at once; a larger parameter comes alone."""
    reason: Reason = _ASKED_FOR

    def __post_init__(self) -> None:
        check_count(self, "bucket_bytes", minimum=1)


def _hindrance(config: Config, hardware: Hardware) -> str:
    if hardware.device_type == "cpu":
        return "the parameters of a CPU's model are in its memory anyway"
    return no_next_tier(config, hardware)


def _attach(actions: Sequence[StepOnDevice], to: Attachment) -> None:
    streamer = to.users.get("streaming")
    if streamer is not None:
        streamer.keep_gradients()
    to.hold_state(actions, guest_bytes=min(action.bucket_bytes for action in actions))


def _values(traced: Traced, eligible: Eligible) -> tuple[bool, ...]:
    return (True,) if traced.profile.guests is not None else ()


def _actions(is_on_device: bool, profile: Profile) -> Iterator[StepOnDevice]:
    yield StepOnDevice(profile.bucket_bytes)


def _value(actions: Sequence[StepOnDevice], profile: Profile) -> bool:
    return True


def _careful(model: Unrehearsed) -> Iterator[StepOnDevice]:
    if model.can_move_state and model.streams and not model.eligible.host_step:
        yield StepOnDevice(OPTIMIZER_BUCKET_BYTES)


def _reason(chosen: Chosen) -> Reason:
    run, optimizer, streamed = chosen.choice.run, chosen.model.optimizer, chosen.streamed_bytes
    on_host = chosen.run_with(steps_on_device=False)
    guests = chosen.model.profile.guests
    numbers: dict[str, int | float | str] = {
        "parameter_bytes": streamed,
        "visiting_bytes": 0 if guests is None else guests.step_bytes,
        **chosen.bucket_size(),
        "step_ms": round(float(optimizer.step_ms(run, streamed)), 4),
        "host_step_ms": round(float(optimizer.step_ms(on_host, streamed)), 4),
    }
    if chosen.steps_on_host_allowed:
        return Reason("step streamed parameters on the device: faster than on the host", numbers)
    return Reason("step streamed parameters on the device: the host's kernels round differently", numbers)


DEVICE_STEP = Technique(
    name="device step",
    family="offloading",
    switch="enable_offloading",
    actions=(StepOnDevice,),
    scope="run",
    travels=True,
    hindrance=_hindrance,
    option=RunOption(field="steps_on_device", values=_values, actions=_actions, value=_value),
    step=lambda actions: {"guests": True, "bucket_bytes": min(action.bucket_bytes for action in actions)},
    buckets_only_step=True,
    careful=_careful,
    attach=_attach,
    place=58,
    words=lambda action: "step streamed parameters on the device",
    outcome=lambda actions: "streamed parameters are stepped on the device",
    outcome_rank=33,
    reason=_reason,
)
