"""The table of techniques is closed and complete: what the stages iterate over leaves nothing out and nothing open."""

from __future__ import annotations

import ast
import collections
import dataclasses
import itertools
import pathlib
import subprocess
import sys

import pytest

import memscale
from memscale import Config, Hardware, OptimizationMode
from memscale._config import SWITCHES
from memscale._decide.choice import OPTIONS, RunOptions
from memscale._decide.eligible import resolve
from memscale._plan import (
    Action,
    Checkpoint,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    QuantizeOptimizer,
    StepInBuckets,
    StreamParameters,
    TileHead,
)
from memscale._profile import KEEP, Treatment
from memscale.techniques import (
    TECHNIQUES,
    TREATED,
    TREATMENTS,
    careful_actions,
    planned_step,
    settling_steps,
    streamed_fqns,
    technique_of,
)
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.technique import PlannedStep, Unrehearsed

pytestmark = pytest.mark.unit
SOURCE = pathlib.Path(memscale.__file__).parent


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
        moves=True, resident_share=0.25, packs=True, bucket_bytes=1, streams=True
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


def test_no_stage_asks_an_action_for_its_type() -> None:
    """The record of an action's technique answers instead (`technique_of`); a type may be made where it is planned."""
    names = {kind.__name__ for kind in Action.kinds()}
    stages = [path for path in SOURCE.rglob("*.py") if "techniques" not in path.parts]
    asked = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in stages
        for node in ast.walk(ast.parse(path.read_text()))
        if _asks_for_type(node) and names & {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    ]
    assert len(stages) > 50
    assert asked == []


def _asks_for_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
    return isinstance(node, ast.Compare | ast.MatchClass)


def test_what_is_streamed_is_known_by_its_traits() -> None:
    actions = [Checkpoint("a"), StreamParameters("b"), OffloadOptimizer(1), OffloadActivations("b"), TileHead("c", 8)]
    assert streamed_fqns(actions) == ("b",)


CAN_MOVE = {"can_move_state": True, "state_is_large": True, "streams": True}


@pytest.mark.parametrize(
    ("known", "kinds"),
    [
        (CAN_MOVE, [OffloadOptimizer, StepOnDevice]),
        (CAN_MOVE | {"streams": False}, [OffloadOptimizer]),
        (CAN_MOVE | {"state_is_large": False}, [StepOnDevice]),
        (CAN_MOVE | {"can_move_state": False}, []),
    ],
)
def test_a_careful_plan_does_what_the_table_says(known: dict[str, bool], kinds: list[type]) -> None:
    card = Hardware.from_name("RTX 3090")
    asked = resolve(Config(use_mixed_precision=True), card)
    assert [type(action) for action in careful_actions(Unrehearsed(asked, **known))] == [*kinds, MixedPrecision]
    aggressive = resolve(Config(mode="aggressive"), card)
    assert [type(action) for action in careful_actions(Unrehearsed(aggressive, **known))] == kinds  # the mode's wish
