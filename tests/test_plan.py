"""The plan: frozen data that reads, writes and explains itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale import Config, Plan, PlanError
from memscale._decide import decide
from memscale._decide.eligible import resolve
from memscale._errors import shown
from memscale._plan import (
    Action,
    Checkpoint,
    FrontPoint,
    OffloadOptimizer,
    QuantizeOptimizer,
    StepInBuckets,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale.techniques.loss_by_rows import LossByRows
from tests.parity import plan_of
from tests.profiles import hardware_of, profile_of

pytestmark = pytest.mark.unit
PLAN = decide(profile_of(4), resolve(Config(force_optimize=True), hardware_of()))


def test_round_trip() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.to_json() == PLAN.to_json()


def test_files(tmp_path: pathlib.Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Plan.load(str(tmp_path / "plan.json")) == PLAN


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    write = pathlib.Path.write_text

    def fill_the_disk(file: pathlib.Path, text: str, **options: Any) -> int:
        write(file, text[:100], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_plan_stays_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    PLAN.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.load(tmp_path / "plan.json") == PLAN


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


HUGE = 10**400
ACTIONS = (
    TileHead("head", 8),
    TileMlp("blocks.0.mlp", 2),
    TileAttention("blocks.0.attention", 16),
    StepInBuckets(1000),
    LossByRows(1000),
    OffloadOptimizer(1000),
    QuantizeOptimizer(1000),
)


@pytest.mark.parametrize(
    ("action", "field"),
    [(a, f.name) for a in ACTIONS for f in dataclasses.fields(a) if isinstance(getattr(a, f.name), int)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("value", [-1, True, 1.5, "8", None, 2**63, HUGE], ids=shown)
def test_counts_that_no_action_can_have(action: Action, field: str, value: Any) -> None:
    whole = dataclasses.replace(PLAN, actions=(action,))
    data = json.loads(whole.to_json())
    data["actions"][0][field] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert len(str(caught.value)) < 400
    with pytest.raises(PlanError, match=field):
        dataclasses.replace(action, **{field: value})


@pytest.mark.parametrize(
    "field", ["baseline_peak_bytes", "predicted_peak_bytes", "budget_bytes", "host_bytes", "movable_bytes"]
)
@pytest.mark.parametrize("value", [-1, HUGE, 1.5], ids=shown)
def test_bytes_that_no_plan_can_have(field: str, value: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(json.loads(PLAN.to_json()) | {field: value}))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", str(HUGE)], ids=lambda value: value[:10])
def test_a_slowdown_that_is_no_number(value: str) -> None:
    text = re.sub(r'"predicted_slowdown": [^,]+', f'"predicted_slowdown": {value}', PLAN.to_json(), count=1)
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"actions":' * 100_000], ids=["lists", "objects"])
def test_a_plan_that_is_nested_too_deeply(text: str) -> None:
    with pytest.raises(PlanError, match="nested too deeply"):
        Plan.from_json(text)


def test_what_is_wrong_with_an_action_is_said_of_that_action_alone() -> None:
    data = json.loads(PLAN.to_json())
    data["actions"] = [{"type": "OffloadOptimizer", "bucket": 3}]
    with pytest.raises(PlanError, match=r"OffloadOptimizer has no field \['bucket'\]$"):
        Plan.from_json(json.dumps(data))


def test_a_file_that_is_no_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        Plan.load(tmp_path / "plan.json")


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


def places(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """How to come to everything in a JSON document."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*way, key)
        yield from places(tree[key], (*way, key))


PLACES = list(places(json.loads(PLAN.to_json())))
hostile = values | st.sampled_from([float("nan"), float("inf"), -1, 2**70, 10**400, "\ud800", [[[]]], {"": 0}])


@given(st.sampled_from(PLACES), hostile, st.sampled_from(["changed", "deleted", "added to"]))
def test_a_plan_that_is_changed_at_any_depth_is_a_plan_or_refused(way: tuple[Any, ...], value: Any, how: str) -> None:
    data = json.loads(PLAN.to_json())
    inner = functools.reduce(lambda tree, key: tree[key], way[:-1], data)
    if how == "deleted":
        del inner[way[-1]]
    elif how == "added to" and isinstance(inner, dict):
        inner["another"] = value
    else:
        inner[way[-1]] = value
    try:
        plan = Plan.from_json(json.dumps(data))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    plan.explain()


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


@pytest.mark.parametrize(("device_type", "is_said"), [("cuda", True), ("simgpu", False), ("cpu", False)])
def test_it_says_where_only_the_formula_is_promised(device_type: str, is_said: bool) -> None:
    """A GPU's kernels round differently from the host's, which step what is streamed; simgpu's are the host's own."""
    words = "stepped by the host's kernels"
    assert (words in plan_of([StreamParameters("a")], device_type=device_type).explain()) == is_said
    assert words not in plan_of([Checkpoint("a")], device_type=device_type).explain()


# ---- what the allocator holds


HELD = dataclasses.replace(
    PLAN, predicted_allocated_bytes=3_000_000, predicted_reserved_bytes=4_000_000, predicted_total_bytes=304_000_000
)


def test_what_is_held_survives_the_way_through_json() -> None:
    assert Plan.from_json(HELD.to_json()) == HELD
    assert "3.0 MB allocated, 4.0 MB reserved; 304.0 MB with the context" in HELD.explain()


def test_a_plan_of_an_earlier_version_has_no_such_numbers() -> None:
    fields = json.loads(HELD.to_json())
    for name in ("predicted_allocated_bytes", "predicted_reserved_bytes", "predicted_total_bytes"):
        del fields[name]
    assert Plan.from_json(json.dumps(fields)) == PLAN


def test_what_is_held_is_a_number_of_bytes() -> None:
    text = HELD.to_json().replace("304000000", "-1")
    with pytest.raises(PlanError, match="predicted_total_bytes"):
        Plan.from_json(text)


def test_a_neighbour_is_above_the_budget_with_what_is_reserved_for_it() -> None:
    chosen = dataclasses.replace(
        HELD,
        predicted_reserved_bytes=HELD.predicted_peak_bytes + HELD.budget_bytes,
        front=(FrontPoint(200, 1.0, "less"), FrontPoint(100, 1.1, "this", is_chosen=True)),
    )
    assert "next cheaper: 0.1 kB more, above the budget" in chosen.explain()
    assert "above the budget" not in dataclasses.replace(chosen, predicted_reserved_bytes=None).explain()
