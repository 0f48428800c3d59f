"""The table of techniques is closed and complete: what the stages iterate over leaves nothing out and nothing open."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import subprocess
import sys

import pytest

from memscale import Config, OptimizationMode
from memscale._config import SWITCHES
from memscale._decide.choice import OPTIONS, RunOptions
from memscale._plan import (
    Action,
    Checkpoint,
    MixedPrecision,
    OffloadOptimizer,
    QuantizeOptimizer,
    StepInBuckets,
    StreamParameters,
    TileHead,
)
from memscale._profile import KEEP, Treatment
from memscale.techniques import TECHNIQUES, TREATED, TREATMENTS, planned_step, settling_steps, technique_of
from memscale.techniques.technique import PlannedStep

pytestmark = pytest.mark.unit


def action_types(kind: type = Action) -> set[type]:
    """All dataclasses below `Action`. One with slots was made twice: the first class is nobody's."""
    below = {found for sub in kind.__subclasses__() for found in {sub, *action_types(sub)}}
    return {
        found
        for found in below
        if dataclasses.is_dataclass(found) and getattr(sys.modules[found.__module__], found.__name__, None) is found
    }


def repeated(values) -> list:
    return [value for value, count in collections.Counter(values).items() if count > 1]


def test_switches_of_the_config_and_of_the_table_agree() -> None:
    assert {technique.switch for technique in TECHNIQUES} == set(SWITCHES)
    assert set(SWITCHES) <= {field.name for field in dataclasses.fields(Config)}
    for technique, mode in itertools.product(TECHNIQUES, OptimizationMode):
        assert (mode in technique.modes) == getattr(Config(mode=mode), technique.switch)


def test_a_family_is_the_techniques_of_one_switch() -> None:
    pairs = {(technique.family, technique.switch) for technique in TECHNIQUES}
    assert not repeated(family for family, _ in pairs)
    assert not repeated(switch for _, switch in pairs)


def test_every_type_of_action_belongs_to_exactly_one_technique() -> None:
    owned = [kind for technique in TECHNIQUES for kind in technique.actions]
    assert not repeated(owned)
    assert set(owned) == action_types() == set(Action.kinds())


def test_the_order_of_attaching_is_total() -> None:
    assert not repeated(technique.place for technique in TECHNIQUES)
    assert not repeated(technique.outcome_rank for technique in TECHNIQUES)
    assert not repeated(technique.name for technique in TECHNIQUES)


def test_every_option_of_a_run_is_one_techniques_and_has_a_rule() -> None:
    options = [technique.option.field for technique in TECHNIQUES if technique.option is not None]
    assert not repeated(options)
    assert set(options) == {field.name for field in dataclasses.fields(RunOptions)} == set(OPTIONS)
    assert all(OPTIONS[field].reason is not None for field in options)
    for technique in TECHNIQUES:
        assert technique.treatments or technique.option is not None, f"{technique.name} can never be chosen"
        assert technique.option is not None or technique.state is None, f"{technique.name} has no effect on state"


def test_every_treatment_is_one_techniques_and_comes_back_from_its_actions() -> None:
    treatments = [treated.treatment for technique in TECHNIQUES for treated in technique.treatments]
    assert not repeated(treatments)
    assert set(TREATMENTS) == {KEEP, *treatments}
    assert TREATMENTS[0] == KEEP
    for treatment, treated in TREATED.items():
        traits: dict = {}
        for action in treated.actions:
            of_action = technique_of(action).traits
            assert of_action is not None
            traits.update(of_action(action))
        assert Treatment(**traits) == treatment


def test_what_concerns_the_optimizer_says_how_it_steps() -> None:
    assert {technique.name for technique in TECHNIQUES if technique.state} <= {t.name for t in TECHNIQUES if t.step}
    assert planned_step(()) == PlannedStep()
    assert planned_step([Checkpoint("a"), TileHead("b", 8), MixedPrecision("bfloat16")]) == PlannedStep()
    assert planned_step([StreamParameters("a"), OffloadOptimizer(1, 0.25), QuantizeOptimizer(1)]) == PlannedStep(
        moves=True, resident_share=0.25, packs=True, streams=True
    )
    assert planned_step([StepInBuckets(1)]) == PlannedStep(in_buckets=True)


def test_a_step_settles_when_the_slowest_technique_has() -> None:
    assert settling_steps(()) == settling_steps([Checkpoint("a")]) == 1
    assert settling_steps([Checkpoint("a"), StreamParameters("b")]) == 2


def test_techniques_of_blocks_say_how_their_words_begin() -> None:
    for technique in TECHNIQUES:
        words = {technique.words(a) for t in technique.treatments for a in t.actions if technique_of(a) is technique}
        assert words == set(technique.begins)


def test_the_table_loads_without_torch() -> None:
    code = "import sys, memscale._decide, memscale.report.explain; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "False"
