"""The training of the learned policy: profiles at another depth, the truth about cases, trees, the same from a seed."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from benchmarks import policy
from benchmarks.policy import cases as case_module
from benchmarks.policy import shapes
from benchmarks.policy.boosting import Settings, fit
from benchmarks.policy.cases import Case, Verdict, draw_cases, feature_names
from benchmarks.policy.scores import NOT_EARNED, compare, held_out_choices, scores_table, verdict
from benchmarks.policy.shapes import Shape, build, draw_shape, hardware_for, profile_shape, stretch
from memscale import Config
from memscale._decide import decide
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.policy import learned
from memscale._decide.policy.strategies import STRATEGIES, WIDEST
from memscale._hardware import Hardware
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import CHECKPOINT, OFFLOAD, SELECTIVE, STREAM, TraceKey
from tests.profiles import full_profile

TINY = Shape("gpt2", "cuda", 32, 2, 64, 100, 2, 32)


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_module, "SETTINGS_PER_SHAPE", 3)
    monkeypatch.setattr(case_module, "DEPTHS", (3, 6))


def quick_cases(seed: str = "a") -> list[Case]:
    return draw_cases("made up", full_profile(3), seed)


# ---- shapes


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_a_stretched_profile_is_that_of_the_deeper_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_at(num_blocks: int) -> Planner:
        with monkeypatch.context() as patch:
            patch.setattr(shapes, "NUM_BLOCKS", num_blocks)
            model, inputs = build(dataclasses.replace(TINY, family=family))
        return Planner(Job(model, Config(enable_logging=False), hardware_for("cuda")), inputs)

    deep = plain_at(5).profile
    stretched = stretch(plain_at(3).profile, 5)
    by_name = {layer.module_fqn: layer for layer in stretched.layers}
    assert {name: layer.param_bytes for name, layer in by_name.items()} == {
        layer.module_fqn: layer.param_bytes for layer in deep.layers
    }
    assert stretched.plain.segments == deep.plain.segments
    assert stretched.optimizer.state_bytes == pytest.approx(deep.optimizer.state_bytes, rel=0.01)
    outcomes = [CostModel(profile, hardware_for("cuda")).evaluate(Choice()) for profile in (stretched, deep)]
    assert outcomes[0].peak_bytes == pytest.approx(outcomes[1].peak_bytes, rel=0.01)
    assert outcomes[0].step_ms == pytest.approx(outcomes[1].step_ms, rel=0.01)


@pytest.mark.full
def test_every_technique_is_tried() -> None:
    tried = set(profile_shape(TINY).variants)
    assert {TraceKey(treatment) for treatment in (CHECKPOINT, SELECTIVE, OFFLOAD, STREAM)} <= tried
    assert {
        TraceKey(streams_rest=True),
        TraceKey(precision="bfloat16"),
        TraceKey(STREAM, precision="bfloat16"),
    } <= tried
    assert any(key.head_rows and not key.precision for key in tried)


# ---- cases


def test_every_case_can_be_solved_and_the_widest_strategy_solves_it() -> None:
    cases = quick_cases()
    assert len({case.group for case in cases}) == 3
    for case in cases:
        assert case.pressure >= 1
        assert case.verdicts[WIDEST].fits
        assert all(v.ratio >= 1 for v in case.verdicts.values() if v.fits and v.is_exact == case.best_is_exact)
        assert any(case.is_good(name) for name in STRATEGIES)
        assert len(case.features) == len(feature_names())


def test_cases_differ_in_what_is_good() -> None:
    cases = quick_cases()
    assert 0 < sum(case.is_good("conservative") for case in cases) < len(cases)
    assert any(case.verdicts["balanced"].fits and not case.verdicts["conservative"].fits for case in cases)


def test_the_truth_is_what_stage_2_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on a strategy is the plan that `decide` makes under it."""
    hardware = Hardware.from_name("RTX 3090")
    monkeypatch.setattr("benchmarks.policy.cases.draw_hardware", lambda device_type, rng: hardware)
    monkeypatch.setattr("benchmarks.policy.cases.DEPTHS", (3,))
    monkeypatch.setattr("benchmarks.policy.cases.RULED_OUT", (("use_8bit_optimizer",),))
    profile = full_profile(3)
    baseline = CostModel(profile, hardware).evaluate(Choice()).peak_bytes
    for case in quick_cases()[:12]:
        budget_gb = baseline / case.pressure / 1e9
        config = STRATEGIES["conservative"].under(Config(memory_budget_gb=budget_gb), hardware)
        plan = decide(profile, hardware, config, raise_if_unfit=False)
        assert plan.fits == case.verdicts["conservative"].fits


def test_draws_depend_on_the_seed_alone() -> None:
    assert quick_cases() == quick_cases()
    assert quick_cases() != quick_cases("b")


def test_shapes_are_drawn_in_range() -> None:
    import random

    for family in shapes.FAMILIES:
        shape = draw_shape(family, random.Random(family))
        assert shape.width % shape.heads == 0
        assert shape == draw_shape(family, random.Random(family))


# ---- trees


def test_trees_learn_what_two_features_say_together() -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (600, 3))
    labels = ((rows[:, 0] > 0.2) & (rows[:, 1] <= -0.1)).astype(float)
    forest = fit(rows[:400], labels[:400], Settings(num_trees=30, depth=3))
    said = np.array([forest.probability(row) > 0.5 for row in rows[400:]])
    assert (said == labels[400:].astype(bool)).mean() > 0.95


def test_trees_of_one_answer_say_it() -> None:
    forest = fit(np.zeros((50, 2)), np.ones(50), Settings(num_trees=5))
    assert forest.probability((0.0, 0.0)) > 0.9


# ---- scores


def case_of(family: str, size: float) -> Case:
    """A mild strategy does for small sizes; the rules do not know."""
    small = size < 0.5
    good, bad = Verdict(True, 1.0, True, 2), Verdict(False, 0.0, False, 2)
    verdicts = {name: good if small or name == WIDEST else bad for name in STRATEGIES}
    return Case(family, family, (size,), 1.2, "balanced", verdicts, True)


def test_policies_are_compared_on_families_that_were_held_out() -> None:
    cases = [case_of(family, index / 40) for family in "abc" for index in range(40)]
    assert held_out_choices(cases)[:40].count("conservative") in range(18, 21)
    by_policy = {score.policy: score for score in compare(cases) if score.band == "all"}
    assert by_policy["rules"].fits == 0.5
    assert by_policy["learned"].fits >= 0.97
    assert by_policy["everything eligible"].fits == 1.0
    assert by_policy["learned"].num_tried == by_policy["rules"].num_tried == 2
    assert len(scores_table(list(by_policy.values())).splitlines()) == 4
    lines = verdict(list(by_policy.values())).splitlines()
    assert [line[:3] for line in lines[:5]] == ["yes", "yes", "yes", "yes", "NO "], "a mean of 1 cannot be beaten"
    assert lines[5] == NOT_EARNED


def test_a_run_from_a_seed_is_reproduced_to_the_byte(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, family in enumerate(shapes.FAMILIES):
        (tmp_path / f"3-{family}-{number}.json").write_text(full_profile(3).to_json())
    texts = []
    for name in ("once", "again"):
        path = tmp_path / f"{name}.out"
        assert (
            policy.main(["--num", "3", "--seed", "3", "--jobs", "1", "--cache", str(tmp_path), "--artifact", str(path)])
            == 0
        )
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    artifact = learned.load(tmp_path / "once.out")
    assert len(artifact.training_hash) == 64
    assert set(artifact.forests) == set(STRATEGIES) - {WIDEST}
    assert json.loads(texts[0])["features"] == list(feature_names())
