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
from benchmarks.policy.planned import Planned, planned_table
from benchmarks.policy.scores import compare, fit_policy, held_out_policies, log_odds, scores_table
from benchmarks.policy.shapes import Shape, build, draw_shape, hardware_for, profile_shape, stretch
from memscale import Config
from memscale._decide import decide
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.policy import learned
from memscale._decide.policy.strategies import SHORTLISTS, STRATEGIES, WIDEST
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


def quick_cases(seed: str = "a/b") -> list[Case]:
    return draw_cases("made up", full_profile(3), seed)


# ---- shapes


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_a_stretched_profile_is_that_of_the_deeper_model(family: str) -> None:
    def plain_at(num_blocks: int) -> Planner:
        model, inputs = build(dataclasses.replace(TINY, family=family, num_blocks=num_blocks))
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
def test_all_that_is_exact_and_soon_found_out_is_tried() -> None:
    tried = set(profile_shape(TINY).variants)
    assert {TraceKey(treatment) for treatment in (CHECKPOINT, SELECTIVE, OFFLOAD, STREAM)} <= tried
    assert TraceKey(streams_rest=True) in tried
    assert any(key.head_rows for key in tried)
    assert not any(key.precision or key.num_tiles for key in tried)


def test_every_family_has_an_architecture() -> None:
    families = [family for families in shapes.ARCHITECTURES.values() for family in families]
    assert sorted(families) == sorted(shapes.FAMILIES)
    assert shapes.architecture_of("llama") == shapes.architecture_of("gemma") != shapes.architecture_of("bert")


# ---- cases


def test_the_widest_strategy_solves_all_but_the_lowest_budgets() -> None:
    cases = quick_cases()
    assert len({case.group for case in cases}) == 3
    for case in cases:
        assert case.pressure >= 1
        assert all(v.ratio >= 1 for v in case.verdicts.values() if v.fits)
        assert case.is_good(WIDEST) == case.verdicts[WIDEST].fits
        assert case.is_good("everything exact") == case.verdicts[WIDEST].fits, "they are the same here"
        assert len(case.features) == len(feature_names())
        assert not any(v.fits for v in case.verdicts.values()) or case.verdicts[WIDEST].fits
    assert sum(not case.verdicts[WIDEST].fits for case in cases) == 3, "one for each setting"


def test_cases_differ_in_what_is_good() -> None:
    cases = quick_cases()
    assert 0 < sum(case.is_good("checkpoints") for case in cases) < len(cases)
    assert any(case.verdicts["balanced"].fits and not case.verdicts["conservative"].fits for case in cases)
    tried = {name: verdict.num_tried for name, verdict in cases[0].verdicts.items()}
    assert tried["selective checkpoints"] <= tried["checkpoints"] <= tried["everything exact"] == tried[WIDEST]


def test_the_truth_is_what_stage_2_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on a strategy is the plan that `decide` makes under it."""
    hardware = Hardware.from_name("RTX 3090")
    monkeypatch.setattr("benchmarks.policy.cases.draw_hardware", lambda device_type, rng: hardware)
    monkeypatch.setattr("benchmarks.policy.cases.DEPTHS", (3,))
    monkeypatch.setattr("benchmarks.policy.cases.RULED_OUT", ((),))
    profile = full_profile(3)
    baseline = CostModel(profile, hardware).evaluate(Choice()).peak_bytes
    for case in quick_cases()[:9]:
        budget_gb = baseline / case.pressure / 1e9
        for name in ("checkpoints", "head tiles", "no streaming"):
            eligible = SHORTLISTS[name].under(resolve(Config(memory_budget_gb=budget_gb), hardware))
            plan = decide(profile, eligible, raise_if_unfit=False)
            assert plan.fits == case.verdicts[name].fits


def test_one_profile_is_learned_from_once() -> None:
    cases = [dataclasses.replace(case_of("a", 1), group=group) for group in ("x/1/0", "x/1/1", "y/1/0", "y/2/0")]
    assert [case.group for case in policy.distinct(cases)] == ["x/1/0", "x/1/1", "y/2/0"]


def test_draws_depend_on_the_seed_alone() -> None:
    assert quick_cases() == quick_cases()
    assert quick_cases() != quick_cases("b/b")


def test_shapes_are_drawn_in_range() -> None:
    import random

    for family in shapes.FAMILIES:
        shape = draw_shape(family, random.Random(family))
        assert shape.width % shape.heads == 0
        assert shape == draw_shape(family, random.Random(family))


# ---- trees


def test_trees_learn_what_two_features_say_together() -> None:
    rows = np.random.default_rng(0).integers(-1000, 1000, (600, 3))
    labels = ((rows[:, 0] > 200) & (rows[:, 1] <= -100)).astype(float)
    forest = fit(rows[:400], labels[:400], Settings(num_trees=30, depth=3))
    said = np.array([forest.odds(row) > 0 for row in rows[400:].tolist()])
    assert (said == labels[400:].astype(bool)).mean() > 0.95


def test_trees_of_one_answer_say_it() -> None:
    forest = fit(np.zeros((50, 2), np.int64), np.ones(50), Settings(num_trees=5))
    assert forest.odds((0, 0)) > log_odds(0.9)


# ---- scores


def case_of(family: str, size: int) -> Case:
    """The first list does for small sizes; the rules do not know."""
    good, bad = Verdict(True, 1.0, 2), Verdict(False, 0.0, 2)
    verdicts = dict.fromkeys([*STRATEGIES, *SHORTLISTS], good if size < 500 else bad)
    return Case(family, family, (size,), 1.2, "balanced", verdicts | {WIDEST: Verdict(True, 1.0, 10)})


def test_policies_are_compared_on_architectures_that_were_held_out() -> None:
    cases = [case_of(family, 25 * index) for family in "abc" for index in range(40)]
    held_out = held_out_policies(cases)
    assert set(held_out) == set("abc")
    first = next(iter(SHORTLISTS))
    chosen = [held_out["a"].choose(case.features) for case in cases[:40]]
    assert chosen.count(first) in range(18, 21)
    assert set(chosen[20:]) == {WIDEST}
    by_policy = {score.policy: score for score in compare(cases, held_out) if score.band == "all"}
    assert by_policy["rules"].fits == 0.5
    assert by_policy["learned"].fits >= 0.97
    assert by_policy["everything eligible"].fits == 1.0
    assert all(score.is_close == 1.0 for score in by_policy.values()), "what does not fit is widened"
    assert by_policy["learned"].num_tried < 7 < by_policy["everything eligible"].num_tried == 10
    assert len(scores_table(list(by_policy.values())).splitlines()) == 4


def test_the_threshold_is_as_low_as_is_safe() -> None:
    easy = [case_of(family, 25 * index) for family in "abc" for index in range(40)]
    assert fit_policy(easy).threshold == log_odds(0.5)
    slow = dict.fromkeys(SHORTLISTS, Verdict(True, 2.0, 2))
    same = [case_of(family, 100) for family in "abc" for _ in range(40)]
    mixed = [c if k % 4 else dataclasses.replace(c, verdicts=c.verdicts | slow) for k, c in enumerate(same)]
    assert fit_policy(mixed).threshold >= log_odds(0.8), "one in four is slow, and nothing tells which"


def test_the_table_of_plans_says_what_was_saved() -> None:
    rows = [
        Planned("gpt2", "RTX 3090", 0.6, 8.0, 4.0, 1.10, 1.10, "checkpoints"),
        Planned("vit", "RTX 3090", 0.4, 4.0, 4.0, 2.00, 2.04, "no tiles"),
        Planned("t5", "RTX 3090", 0.4, 4.0, 4.0, None, None, "nothing fits"),
    ]
    text = planned_table(rows)
    assert "0.75 of the full search's in all, 1.00 in the median" in text
    assert "1 of 2 plans, the mean 1.0100" in text
    assert "not by the policy: 0 of 3" in text


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
    assert set(artifact.forests) == set(SHORTLISTS)
    assert json.loads(texts[0])["features"] == list(feature_names())
