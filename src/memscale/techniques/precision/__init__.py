"""Mixed precision (not exact): the model computes in bf16, or in fp16 with dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from memscale._config import Config
from memscale._hardware import Hardware
from memscale._plan import MixedPrecision, Reason
from memscale._profile import Precision, Profile, TraceKey
from memscale.techniques.technique import RunOption, Technique, Traced, Unrehearsed

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials

HalfType: TypeAlias = Literal["bfloat16", "float16"]


def half_type(config: Config, hardware: Hardware) -> HalfType | None:
    """The 16-bit type that may be computed in: the user's wish, or the mode's where 16 bits are faster."""
    is_wanted = hardware.has_fast_16bit or config.asks_for("use_mixed_precision")
    if not (config.use_mixed_precision and is_wanted):
        return None
    chosen = MixedPrecision.choose_dtype(
        hardware.device_type,
        supports_bf16=hardware.supports_bf16,
        supports_fp16=hardware.supports_fp16,
        has_fast_16bit=hardware.has_fast_16bit,
    )
    return None if chosen == "float16" and config.step_in_backward else chosen


def _hindrance(config: Config, hardware: Hardware) -> str:
    if half_type(config, hardware) is not None:
        return ""
    if half_type(config.replace(step_in_backward=False), hardware) is not None:
        return "fp16 gradients are looked at before the step, and step_in_backward=True"
    return f"{hardware.device_name} has no fast 16-bit math"


def _refusal(actions: Sequence[MixedPrecision], config: Config, hardware: Hardware) -> str:
    halves = {action.dtype for action in actions}
    if "bfloat16" in halves and not hardware.supports_bf16 and hardware.device_type != "cpu":
        return (
            f"the plan computes in bfloat16, which {hardware.device_name} cannot. "
            "Or plan on this machine: memscale.wrap(model)."
        )
    return ""


def _attach(actions: Sequence[MixedPrecision], to: Attachment) -> None:
    from memscale.techniques.precision.autocast import attach

    for action in actions:
        to.precision = attach(action, to.model, to.device.type, to.undo, scale=to.loss_scale)


def _values(traced: Traced, eligible: Eligible) -> tuple[Precision, ...]:
    dtype = eligible.half_type
    return (dtype,) if dtype is not None and TraceKey(precision=dtype) in traced.sizes else ()


def _actions(dtype: HalfType, profile: Profile) -> Iterator[MixedPrecision]:
    yield MixedPrecision(dtype)


def _value(actions: Sequence[MixedPrecision], profile: Profile) -> Precision:
    return actions[-1].dtype


def _asked_for(profile: Profile, eligible: Eligible) -> Iterator[MixedPrecision]:
    if eligible.half_type is not None:
        yield MixedPrecision(eligible.half_type)


def _careful(model: Unrehearsed) -> Iterator[MixedPrecision]:
    dtype = model.eligible.half_type
    if dtype is not None and model.eligible.must_use(PRECISION):
        yield MixedPrecision(dtype)


def _reason(chosen: Chosen) -> Reason:
    return chosen.reason_of_lossy("use_mixed_precision", chosen.part(precision=""))


def _rehearse(trials: Trials, eligible: Eligible) -> None:
    trials.try_in_16_bits(eligible)


PRECISION = Technique(
    name="mixed precision",
    family="mixed precision",
    switch="use_mixed_precision",
    actions=(MixedPrecision,),
    scope="run",
    is_exact=False,
    hindrance=_hindrance,
    refusal=_refusal,
    option=RunOption(
        field="precision",
        values=_values,
        actions=_actions,
        value=_value,
        asked_for=_asked_for,
    ),
    careful=_careful,
    rehearse=_rehearse,
    attach=_attach,
    place=40,
    words=lambda action: f"compute in {action.dtype}",
    outcome=lambda actions: f"computes in {actions[0].dtype}",
    outcome_rank=40,
    reason=_reason,
)
