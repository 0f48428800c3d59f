"""Stage 1: who says which techniques may be used, and that plans say who it was."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch

import memscale
from memscale import Config, ConfigError, DoesNotFitError, OptimizationMode, Plan, _json
from memscale._config import SWITCHES
from memscale._decide.budget import Budget
from memscale._decide.eligible import Eligible, resolve
from memscale._decide.policy import Situation, Strategy, choose_strategy, learned, rules
from memscale._decide.policy.features import LEARNED_SWITCHES, features_of
from memscale._decide.policy.strategies import SHORTLISTS, STRATEGIES
from memscale._decide.policy.trees import Forest, Tree
from memscale._planning import make_plan
from memscale._planning.job import open_job
from memscale._profile import CHECKPOINT, CHECKPOINT_OFFLOAD, KEEP, OFFLOAD, SELECTIVE, STREAM, Treatment
from memscale._profile.inputs import Inputs
from memscale.techniques import TREATMENTS
from tests.models import Chain, TwoLinears
from tests.profiles import MB, full_profile, hardware_of, profile_of

pytestmark = pytest.mark.unit
BASELINE = Situation(profile_of(), resolve(Config(), hardware_of())).baseline.peak_bytes


def situation_at(pressure: float, config: Config | None = None, **changes: Any) -> Situation:
    """A plain step that is so far above the budget, whatever budget the config names."""
    eligible = resolve(config or Config(), hardware_of(**changes))
    return Situation(profile_of(), with_budget(eligible, device_bytes=round(BASELINE / pressure)))


def with_budget(eligible: Eligible, **sizes: int) -> Eligible:
    return dataclasses.replace(eligible, budget=dataclasses.replace(eligible.budget, **sizes))


def chosen_at(pressure: float, config: Config, **changes: Any) -> Strategy:
    situation = situation_at(pressure, config, **changes)
    return choose_strategy(situation.eligible, situation.profile)


def always(odds: int) -> Forest:
    return Forest(odds, ())


def artifact_of(forests: dict[str, Forest]) -> learned.Artifact:
    names = tuple(features_of(situation_at(2.0)))
    return learned.Artifact(learned.FORMAT, names, forests, 900_000, "0" * 64, "nothing").sealed()


@pytest.fixture
def artifact_at(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """The policy that is written there is the one that is used."""

    def use(text: str | None) -> None:
        path = tmp_path / "policy.json"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(learned, "ARTIFACT", path)

    yield use
    learned.load.cache_clear()


def written(artifact: learned.Artifact) -> str:
    return artifact.to_json()


# ---- the user's own


def test_the_users_own_config() -> None:
    config = Config(mode=OptimizationMode.CONSERVATIVE)
    strategy = chosen_at(2.0, config)
    assert strategy.config is config
    assert (strategy.source, strategy.reason, strategy.wider) == ("user_config", None, None)


@pytest.mark.parametrize("value", ["rules", "ml", 1, None])
def test_other_values_of_auto_policy_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="auto_policy"):
        Config(auto_policy=value)


# ---- rules


@pytest.mark.parametrize(
    ("pressure", "mode"),
    [(0.5, "conservative"), (1.0, "conservative"), (1.2, "balanced"), (1.49, "balanced"), (1.51, "aggressive"),
     (2.99, "aggressive"), (9.0, "aggressive")],
)  # fmt: skip
def test_the_rule_table(pressure: float, mode: str) -> None:
    strategy = chosen_at(pressure, Config(auto_policy="rule"))
    assert strategy.source == "rule"
    assert strategy.config.mode.value == mode
    assert strategy.reason is not None
    assert strategy.reason.numbers["pressure"] == pytest.approx(pressure, rel=0.01)
    assert (strategy.wider is None) == (mode == "aggressive")


def test_far_above_the_budget_a_smaller_batch_is_named() -> None:
    _, reason = rules.choose(situation_at(4.0))
    assert "smaller batch" in reason.rule


def test_what_the_user_set_by_name_stays() -> None:
    config = Config(
        auto_policy="rule", use_8bit_optimizer=False, enable_offloading=True, memory_budget_gb=1.0, device="cpu"
    )
    before = dataclasses.asdict(config)
    far, near = (chosen_at(pressure, config).config for pressure in (2.0, 0.5))
    assert (far.use_8bit_optimizer, far.enable_tiling, near.enable_offloading) == (False, True, True)
    assert far.asks_for("enable_offloading")
    assert not far.asks_for("enable_tiling"), "a policy's wish is not the user's"
    assert (far.memory_budget_gb, far.device) == (1.0, "cpu")
    assert dataclasses.asdict(config) == before, "the caller's config is not changed"


@pytest.mark.parametrize("is_fast", [True, False])
def test_16_bits_are_eligible_where_the_planned_hardware_is_fast_in_them(is_fast: bool) -> None:
    strategy = chosen_at(2.0, Config(auto_policy="rule"), has_fast_16bit=is_fast)
    assert strategy.config.use_mixed_precision is is_fast


# ---- the learned policy

LIKELY, UNLIKELY = always(5_000_000), always(-5_000_000)


def test_the_shortest_list_that_is_likely_enough_is_taken(artifact_at: Any) -> None:
    artifact_at(written(artifact_of({"checkpoints": always(899_999), "no streaming": always(900_000)})))
    strategy = chosen_at(2.0, Config(auto_policy=True))
    assert (strategy.source, strategy.config.mode) == ("ml", OptimizationMode.BALANCED)
    assert strategy.reason is not None
    assert strategy.reason.numbers["strategy"] == "no streaming"
    widest = STRATEGIES["aggressive"].under(resolve(Config(auto_policy=True), hardware_of()))
    assert strategy.wider is not None
    assert (strategy.wider, strategy.wider.config) == (widest, widest.config)
    assert chosen_at(2.0, Config(auto_policy="learned")).reason == strategy.reason


def test_nothing_likely_means_everything_is_eligible(artifact_at: Any) -> None:
    artifact_at(written(artifact_of({"checkpoints": always(800_000), "no streaming": UNLIKELY})))
    strategy = chosen_at(1.2, Config(auto_policy=True))
    assert (strategy.source, strategy.config.mode, strategy.wider) == ("ml", OptimizationMode.AGGRESSIVE, None)


def test_a_short_list_says_what_is_rehearsed() -> None:
    for name, treatments, num_ways in (
        ("selective checkpoints", {SELECTIVE}, 1),
        ("head tiles", set(), 1),
        ("no streaming", {SELECTIVE, CHECKPOINT, OFFLOAD, CHECKPOINT_OFFLOAD}, 1),
        ("checkpoints, streaming", {CHECKPOINT, STREAM}, 1),
        ("everything exact", set(TREATMENTS) - {KEEP, Treatment("selective", offloads=True)}, 1),
    ):
        eligible = SHORTLISTS[name].under(resolve(Config(), hardware_of()))
        assert {t for t in TREATMENTS if t != KEEP and eligible.allows(t)} == treatments, name
        assert len(eligible.travels) == num_ways
        assert not any(technique.is_dear or not technique.is_exact for technique in eligible.techniques)
        assert any(t.name == "head tiling" for t in eligible.techniques) == (
            "tiles" in name or name == "everything exact"
        )
    said = resolve(Config(async_offload=False, enable_tiling=True), hardware_of())
    own = SHORTLISTS["no streaming"].under(said).config
    assert (own.async_offload, own.enable_tiling) == (False, True), "what the user has said stays"


@pytest.mark.parametrize("text", [None, "", "[]", '{"format": 2}', "{broken", "[" * 100_000, "1" * 1_000_001])
def test_without_a_readable_artifact_the_rules_decide(text: str | None, artifact_at: Any) -> None:
    artifact_at(text)
    strategy = chosen_at(1.2, Config(auto_policy=True))
    assert (strategy.source, strategy.config.mode) == ("rule_fallback", OptimizationMode.BALANCED)
    assert strategy.reason is not None
    assert "policy.json" in strategy.reason.rule


def test_an_artifact_of_other_features_or_versions_or_a_damaged_one_is_not_used(artifact_at: Any) -> None:
    good = artifact_of({"checkpoints": LIKELY})
    for bad in (
        dataclasses.replace(good, features=good.features[1:]).sealed(),
        dataclasses.replace(good, format=1).sealed(),
        dataclasses.replace(good, forests={"unheard of": LIKELY}).sealed(),
        dataclasses.replace(good, threshold=0),
    ):
        learned.load.cache_clear()
        artifact_at(written(bad))
        assert chosen_at(1.2, Config(auto_policy=True)).source == "rule_fallback"
    learned.load.cache_clear()
    artifact_at(written(good).replace("5000000", "5000000.0"))
    assert chosen_at(1.2, Config(auto_policy=True)).source == "rule_fallback", "integers only"


@pytest.mark.parametrize("wish", ["force_optimize", "use_mixed_precision", "use_8bit_optimizer"])
def test_what_was_not_learned_is_left_to_the_rules(wish: str, artifact_at: Any) -> None:
    artifact_at(written(artifact_of({"checkpoints": LIKELY})))
    assert chosen_at(1.2, Config(auto_policy=True)).source == "ml"
    config = Config(auto_policy=True).replace(**{wish: True})
    assert chosen_at(1.2, config).source == "rule_fallback"


def test_the_policy_of_the_package_is_the_one_of_the_document() -> None:
    results = (pathlib.Path(__file__).parents[2] / "docs" / "results" / "policy.txt").read_text()
    artifact = learned.load(learned.ARTIFACT)
    assert f"training hash {artifact.training_hash}" in results
    assert set(artifact.forests) == set(SHORTLISTS)
    assert learned.ARTIFACT.stat().st_size < 200_000
    for pressure in (1.1, 2.0, 5.0):
        for auto in (True, "learned"):
            assert chosen_at(pressure, Config(auto_policy=auto)).source == "ml"


def bounded(**wishes: Any) -> Eligible:
    """What is eligible on the tests' card, under budgets of three sizes."""
    budget = Budget(200 * MB, 300 * MB, 400 * MB)
    return dataclasses.replace(resolve(Config(**wishes), hardware_of()), budget=budget)


def test_the_choice_is_made_in_integers() -> None:
    """So that the same inputs give the same choice on every machine."""
    situation = Situation(full_profile(4), bounded())
    assert all(type(value) is int for value in features_of(situation).values())
    artifact = learned.load(learned.ARTIFACT)
    assert type(artifact.threshold) is int
    assert all(type(f.odds((0,) * len(artifact.features))) is int for f in artifact.forests.values())


def test_kept_plans_know_the_policy_that_they_rest_on(artifact_at: Any) -> None:
    assert learned.used_for(Config()) == learned.used_for(Config(auto_policy="rule")) == ""
    shipped = learned.used_for(Config(auto_policy=True))
    assert shipped == learned.used_for(Config(auto_policy="learned")) == learned.load(learned.ARTIFACT).checksum
    artifact_at(written(artifact_of({"checkpoints": LIKELY})))
    assert learned.used_for(Config(auto_policy=True)) not in ("", shipped)


def can(config: Config | None = None, **changes: Any) -> set[str]:
    features = features_of(situation_at(2.0, config, **changes))
    return {name for name, value in features.items() if name in LEARNED_SWITCHES and value}


def test_features_say_what_the_techniques_say() -> None:
    """And not what somebody says about them by name: `Technique.hindrance` is asked."""
    assert set(LEARNED_SWITCHES.values()) <= set(SWITCHES)
    everything = set(LEARNED_SWITCHES)
    assert can(has_fast_16bit=True) == everything
    assert can(has_fast_16bit=False) == everything - {"can_halve"}
    assert can(has_fast_16bit=True, unified_memory=True) == everything - {"can_offload"}
    for feature, switch in LEARNED_SWITCHES.items():
        assert can(Config(**{switch: False}), has_fast_16bit=True) == everything - {feature}


# ---- trees


def test_a_walk_goes_left_up_to_the_threshold() -> None:
    tree = Tree((0, -1, 1, -1, -1), (2, 0, 5, 0, 0), (1, 0, 3, 0, 0), (2, 0, 4, 0, 0), (0, 1, 0, 2, 3))
    assert [tree.at(row) for row in ((2, 9), (3, 5), (3, 6))] == [1, 2, 3]
    assert Forest(-1, (tree,)).odds((2, 0)) == 0
    assert Forest(-1, (tree,)).num_features == 2


@pytest.mark.parametrize("left", [0, -1, 3])
def test_a_tree_that_leads_nowhere_is_refused(left: int) -> None:
    with pytest.raises(ValueError, match="leads nowhere"):
        Tree((0, -1, -1), (1, 0, 0), (left, 0, 0), (2, 0, 0), (0, 1, 1))


@pytest.mark.parametrize("value", [0.5, True, 2**60])
def test_a_tree_is_made_of_integers(value: Any) -> None:
    with pytest.raises(ValueError, match="integers"):
        Tree((-1,), (0,), (0,), (0,), (value,))
    with pytest.raises(ValueError, match="integer"):
        Forest(value, ())


def doubled(data: Any, name: str = "") -> Any:
    """Every number of bytes and of operations in encoded data, twice."""
    if isinstance(data, dict):
        return {key: doubled(value, key) for key, value in data.items()}
    if isinstance(data, list):
        return [doubled(value, name) for value in data]
    is_size = name.endswith(("_bytes", "_bytes_per_s", "flops")) and data is not None
    return 2 * data if is_size else data


def test_features_have_no_unit() -> None:
    """A model twice as large, on a card twice as large and fast, under a budget twice as large: the same case."""
    once = Situation(full_profile(4), bounded())
    profile, hardware, budget = (
        _json.decode(type(part), doubled(_json.encode(part))) for part in (once.profile, once.hardware, once.budget)
    )
    twice = Situation(profile, dataclasses.replace(resolve(Config(), hardware), budget=budget))
    assert twice.baseline.peak_bytes == 2 * once.baseline.peak_bytes
    assert features_of(once) == features_of(twice)
    assert features_of(Situation(once.profile, bounded(enable_tiling=False))) != features_of(once)


# ---- through the pipeline


def plan_of(config: Config) -> Plan:
    model = Chain(*(TwoLinears() for _ in range(4)))
    return make_plan(open_job(model, config), Inputs(args=(torch.ones(4096, 16),)))


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    return plan_of(Config(enable_logging=False)).baseline_peak_bytes


def test_plans_say_who_chose_the_strategy(plain_bytes: int, artifact_at: Any) -> None:
    budget = {"memory_budget_gb": plain_bytes / 1.2 / 1e9, "enable_logging": False}
    own = plan_of(Config(**budget))
    assert (own.decision_source, own.strategy) == ("user_config", None)
    by_rule = plan_of(Config(auto_policy="rule", **budget))
    assert (by_rule.decision_source, by_rule.mode) == ("rule", "balanced")
    assert "strategy:  up to 1.5 times the budget: BALANCED" in by_rule.explain()
    assert Plan.from_json(by_rule.to_json()) == by_rule
    artifact_at(written(artifact_of({"checkpoints": LIKELY})))
    learned_plan = plan_of(Config(auto_policy=True, **budget))
    assert (learned_plan.decision_source, learned_plan.mode) == ("ml", "conservative")
    learned.load.cache_clear()
    artifact_at("")
    assert plan_of(Config(auto_policy=True, **budget)).decision_source == "rule_fallback"
    assert own.actions == by_rule.actions == learned_plan.actions


def test_a_short_list_under_which_nothing_fits_is_widened(plain_bytes: int, artifact_at: Any) -> None:
    """The plan is the one of the full search, whatever the policy said first."""
    config = Config(memory_budget_gb=plain_bytes / 1.3 / 1e9, enable_logging=False, auto_policy="learned")
    full = plan_of(config.replace(auto_policy=False, mode="aggressive"))
    artifact_at(written(artifact_of({"head tiles": LIKELY})))
    plan = plan_of(config)
    assert plan.fits
    assert plan.actions == full.actions
    assert plan.strategy is not None
    assert "everything is eligible" in plan.strategy.rule


def test_a_choice_under_which_nothing_fits_is_widened(plain_bytes: int) -> None:
    config = Config(
        memory_budget_gb=plain_bytes / 1.49 / 1e9,
        enable_checkpointing=False,
        use_mixed_precision=False,  # it would fit on a processor with fast 16-bit math
        enable_logging=False,
    )
    with pytest.raises(DoesNotFitError, match="mode balanced"):
        plan_of(config)
    with pytest.raises(DoesNotFitError, match="mode aggressive"):
        plan_of(config.replace(auto_policy="rule"))


def test_wrap_asks_the_policy(plain_bytes: int) -> None:
    config = Config(auto_policy="rule", memory_budget_gb=plain_bytes / 1.2 / 1e9, enable_logging=False)
    model = Chain(*(TwoLinears() for _ in range(4)))
    memscale.wrap(model, config, torch.ones(4096, 16))
    assert model._memscale_executor.plan.decision_source == "rule"  # type: ignore[attr-defined]
    memscale.detach(model)


def test_the_estimate_is_about_modes_whoever_would_choose() -> None:
    model, sample = Chain(*(TwoLinears() for _ in range(2))), torch.ones(64, 16)
    own, automatic = (
        memscale.estimate(model, sample, config=Config(auto_policy=auto, memory_budget_gb=1.0))
        for auto in (False, "rule")
    )
    assert own == automatic
