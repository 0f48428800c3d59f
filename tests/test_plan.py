"""The plan: frozen data that reads, writes and explains itself."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale import Config, Plan, PlanError
from memscale._decide import decide
from memscale._plan import Checkpoint, Reason, StreamParameters
from tests.parity import plan_of
from tests.profiles import hardware_of, profile_of

PLAN = decide(profile_of(4), hardware_of(), Config(force_optimize=True))


def test_round_trip() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.to_json() == PLAN.to_json()


def test_files(tmp_path: pathlib.Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Plan.load(str(tmp_path / "plan.json")) == PLAN


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.fits = False


def test_a_plan_can_be_edited_by_hand() -> None:
    data = json.loads(PLAN.to_json())
    data["actions"] = [{"type": "Checkpoint", "module_fqn": "blocks.1", "keep": ["matmul"]}]
    edited = Plan.from_json(json.dumps(data))
    assert edited.actions == (Checkpoint("blocks.1", keep=("matmul",)),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"plan"',
        "{}",
        '{"type": "Profile"}',
        PLAN.to_json().replace('"checkpoint', '"checkpoint', 1)[:-20],
        PLAN.to_json().replace('"Checkpoint"', '"Checkpint"'),
        PLAN.to_json().replace('"fits": true', '"fits": "yes"'),
        PLAN.to_json().replace('"budget_bytes"', '"budget"', 1),
    ],
)
def test_anything_else_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(PLAN.to_json()))), values)
def test_any_other_value_in_any_field_is_a_plan_or_refused(field: str, value: Any) -> None:
    data = json.loads(PLAN.to_json()) | {field: value}
    try:
        plan = Plan.from_json(json.dumps(data))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan


def test_explanation_shows_every_layer_its_cost_and_the_rule() -> None:
    text = PLAN.explain()
    for row in PLAN.rows:
        assert row.module_fqn in text
    for word in ("baseline", "budget", "planned", "optimizer", "adamw", "test card", "checkpoint", "frees", "rule"):
        assert word in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())


def test_explanation_says_how_sure_it_is() -> None:
    assert "peak model" in plan_of([]).explain()
    assert "rehears" in plan_of([], rehearsed=True).explain()
    assert "does not fit" in plan_of([], fits=False).explain()


def test_reduction() -> None:
    assert plan_of([], baseline_peak_bytes=100, predicted_peak_bytes=25).reduction == pytest.approx(0.75)
    assert plan_of([], baseline_peak_bytes=0, predicted_peak_bytes=0).reduction == 0.0


def test_reasons_read_well() -> None:
    assert str(Reason("rule")) == "rule"
    text = str(Reason("rule", {"frees_bytes": 2_610_000_000, "costs_ms": 1.5, "n": 3}))
    assert "2.61" in text
    assert "GB" in text
    assert "1.5 ms" in text


@pytest.mark.parametrize(("device_type", "is_said"), [("cuda", True), ("simgpu", False), ("cpu", False)])
def test_it_says_where_only_the_formula_is_promised(device_type: str, is_said: bool) -> None:
    """A GPU's kernels round differently from the host's, which step what is streamed; simgpu's are the host's own."""
    words = "stepped by the host's kernels"
    assert (words in plan_of([StreamParameters("a")], device_type=device_type).explain()) == is_said
    assert words not in plan_of([Checkpoint("a")], device_type=device_type).explain()
