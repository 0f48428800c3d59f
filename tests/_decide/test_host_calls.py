"""Calls cost time on a CPU and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest

from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._profile import CHECKPOINT, KEEP, SELECTIVE, Profile, StepTrace, Treatment
from tests.profiles import hardware_of, profile_of

pytestmark = pytest.mark.unit
ON_CPU, ON_GPU = hardware_of(device_type="cpu"), hardware_of()


def with_launches(num_launches: int) -> Profile:
    profile = profile_of(4)

    def launched(trace: StepTrace) -> StepTrace:
        return StepTrace(tuple(dataclasses.replace(s, num_launches=num_launches) for s in trace.segments))

    variants = {name: launched(trace) for name, trace in profile.variants.items()}
    optimizer = dataclasses.replace(profile.optimizer, num_tensors=num_launches)
    return dataclasses.replace(profile, plain=launched(profile.plain), variants=variants, optimizer=optimizer)


def step_ms(profile: Profile, hardware: object, treatment: Treatment = KEEP) -> float:
    named = tuple((f"blocks.{index}", treatment) for index in range(4)) if treatment != KEEP else ()
    return CostModel(profile, hardware).evaluate(Choice(named)).step_ms  # type: ignore[arg-type]


def test_operators_cost_a_cpu_their_calls() -> None:
    none, some = with_launches(0), with_launches(10)
    assert step_ms(some, ON_GPU) == step_ms(none, ON_GPU)
    assert step_ms(some, ON_CPU) > step_ms(none, ON_CPU)


def test_hooks_cost_a_cpu_time_and_selective_ones_the_most() -> None:
    profile = with_launches(40)
    for treatment in (CHECKPOINT, SELECTIVE):
        model = CostModel(profile, ON_CPU)
        hooks_ms = sum(model.hooks_ms(f"blocks.{index}", treatment) for index in range(4))  # type: ignore[arg-type]
        on_gpu = step_ms(profile, ON_GPU, treatment) - step_ms(profile, ON_GPU)
        assert abs(step_ms(profile, ON_CPU, treatment) - step_ms(profile, ON_CPU) - on_gpu - hooks_ms) < 1e-6
    model = CostModel(profile, ON_CPU)
    assert model.hooks_ms("blocks.0", SELECTIVE) > model.hooks_ms("blocks.0", CHECKPOINT) > 0
